"""The dashboard in a real browser, served by a real orchestrator: real episodes, hostile output, outages, a token."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Error, Request

from deploy.embedded import EmbeddedRedis
from orchestrator.vocabulary import Outcome
from tests.e2e.commands import COMMAND
from tests.support import warm
from tests.support.bare_farm import a_receipt, leased
from tests.support.browser import OpenPage, Watched
from tests.support.farm import Field, open_field
from tests.support.faults import ServiceFaults
from tests.support.ground import BUDGETS, Ground
from tests.support.policies import candidate, repaired, script
from tests.support.processes import Marked, worker_environment
from tests.support.waiting import wait_until

pytest_plugins = ["tests.support.farm", "tests.support.faults", "tests.support.browser"]

pytestmark = pytest.mark.timeout(240)

HOSTILE = (
    "printf '<img src=x onerror=alert(1)><script>alert(2)</script><h1 id=injected>mine</h1>\\n'",
    "printf '</pre></article><svg onload=alert(3)> ${alert(4)} {{alert(5)}} **bold** [x](javascript:alert(6))\\n'",
    "printf '\\033[31mred\\033[0m \\033]0;owned\\007 nul \\000 turned \\342\\200\\256 around\\n'",
    "head -c 65000 /dev/zero | tr '\\0' A; printf 'THE-END'",
)


@contextmanager
def orchestrator(
    field: Field, output: Path, *arguments: str, port: int = 0, installed: bool = False, **environment: str
) -> Iterator[str]:
    """An orchestrator of this farm; the URL of its dashboard. Checks at its end that it showed no trace."""
    program = [str(COMMAND)] if installed else warm.FARM_COMMAND
    command = [*program, "orchestrator", "--metrics-port", str(port), *arguments]
    output.mkdir(exist_ok=True)
    given = {**worker_environment(field.settings), "PYTHONUNBUFFERED": "1", **environment}
    template = None if installed else warm.dashboard()
    process = Marked(command, environment=given, cwd=output, output=output / "orchestrator", template=template)
    try:
        found = wait_until(
            lambda: re.search(r"Dashboard at (http://\S+/),", process.stdout), seconds=60, description="it says where"
        )
        assert found is not None
        yield found.group(1)
        process.process.terminate()
        assert process.wait(30) == 0, process.stderr
    finally:
        process.end()
    assert "Traceback" not in process.stderr + process.stdout
    assert "Warning" not in process.stderr


@pytest.fixture(scope="module")
def lasting(ground: Ground) -> Iterator[Field]:
    """A farm whose reconciler is the orchestrator."""
    with open_field(ground, own_database=True) as field:
        yield field


@pytest.fixture(scope="module")
def url(lasting: Field, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An orchestrator's dashboard."""
    with orchestrator(lasting, tmp_path_factory.mktemp("orchestrator"), installed=True) as found:
        yield found


def check_harmless(watched: Watched) -> None:
    """Nothing ran that somebody else wrote, and nothing was asked of another host."""
    assert watched.dialogs == []
    assert watched.errors == []
    assert watched.hosts == {"127.0.0.1"}


def test_it_opens_and_shows_an_episode_that_starts_while_one_watches(
    lasting: Field, url: str, open_page: OpenPage
) -> None:
    watched = open_page()
    watched.goto(url)
    watched.wait_text("No worker is alive")
    assert watched.page.title() == "rollout farm"
    spec = lasting.spec()
    running = lasting.remote(spec)
    try:
        running.episode.reset()
        watched.wait_text(spec.episode_id, "#episodes")
        row = f"#episodes tr:has-text('{spec.episode_id}')"
        watched.wait_text("running", row)
        tile = ".tile:has-text('Sandboxes') .number"
        watched.wait(lambda: watched.text(tile).split()[:3] == ["1", "of", "20"], "its sandbox is counted")
        watched.page.click(f"text={spec.episode_id}")
        watched.wait_text("Conversation")
        assert watched.page.url.endswith(f"?episode={spec.episode_id}")
        watched.wait_text("Sandboxes (1)", "#sandboxes")
        watched.wait_text("has none yet", "#receipt")
        running.episode.terminal("echo seen-while-it-runs")
        running.episode.terminal("true")
        watched.wait_text("seen-while-it-runs", "#conversation")
        running.episode.submit()
    finally:
        running.end()
    watched.wait_text("wrong_answer: reward 0", "#conversation")
    watched.wait_text("Sandboxes (2)", "#sandboxes")
    check_harmless(watched)


def test_it_asks_at_least_once_a_second_and_is_sent_only_what_has_changed(
    lasting: Field, url: str, open_page: OpenPage
) -> None:
    lasting.run(lasting.spec(script("echo hello")))
    watched = open_page()
    watched.goto(url)
    watched.wait_text("rollout farm", "header")
    assert watched.page.evaluate("window.gradio_config.components.find(one => one.type === 'timer').props.value") <= 1
    watched.wait(lambda: len(watched.asked) >= 4, "it has asked four times")
    told = [json.loads(json.loads(body)["data"][0]) for body in watched.asked]
    assert told[0]["digests"] == {}
    assert set(told[-1]["digests"]) == {"header", "alarms", "tiles", "trends", "episodes", "workers", "episode"}
    for _ in range(20):  # two answers may show the same second
        with watched.page.expect_response("**/run/predict**") as found:
            pass
        panes = found.value.json()["data"]
        assert "data-pane" not in str(panes[5]), "the workers have not changed"
        if 'data-pane="header"' in str(panes[0]):
            break
    else:
        pytest.fail("its clock stands still")


def test_a_running_episode_is_shown_within_two_seconds(lasting: Field, url: str, open_page: OpenPage) -> None:
    """No stopwatch, which a busy machine would stop late: what is asked a second after an episode has begun is
    answered with it, and there is a question every second (the test before this one)."""
    watched = open_page()
    answered: list[Request] = []
    watched.page.on("requestfinished", lambda one: answered.append(one) if "/run/predict" in one.url else None)
    watched.goto(url)
    watched.wait_text("rollout farm", "header")

    def shown_anew() -> bool:
        """Whether the next answer comes from a new look, so that an older one could be shown longest."""
        with watched.page.expect_response("**/run/predict**") as found:
            pass
        return 'data-pane="header"' in str(found.value.json()["data"][0])

    wait_until(shown_anew, description="a look has just been taken")
    spec, lease = leased(lasting.farm)
    due = 1000 * (time.time() + 1)
    try:
        watched.wait(lambda: any(asked_at(one) >= due for one in answered), "a question of a second later is answered")
        first = min(asked_at(one) for one in answered if asked_at(one) >= due)
        told = [body(one) for one in answered if asked_at(one) <= first]
        assert any(spec.episode_id in text for text in told), f"none of {len(told)} answers"
        watched.wait_text("running", f"#episodes tr:has-text('{spec.episode_id}')")
    finally:
        lasting.farm.ledger.commit(a_receipt(spec), lease.token)
    check_harmless(watched)


def asked_at(request: Request) -> float:
    """When the browser sent it, in unix milliseconds."""
    return float(request.timing["startTime"])


def body(request: Request) -> str:
    """What it was answered."""
    answer = request.response()
    assert answer is not None
    return str(answer.text())


def test_hostile_output_is_shown_and_does_nothing(lasting: Field, url: str, open_page: OpenPage) -> None:
    spec = lasting.spec(script(*HOSTILE))
    lasting.run(spec)
    watched = open_page()
    for address in (url, f"{url}?episode={spec.episode_id}"):
        watched.goto(address)
        watched.wait_text(spec.episode_id)
    watched.wait_text("<img src=x onerror=alert(1)><script>alert(2)</script><h1 id=injected>mine</h1>", "#conversation")
    shown = watched.text("#conversation")
    assert "</pre></article><svg onload=alert(3)> ${alert(4)} {{alert(5)}} **bold** [x](javascript:alert(6))" in shown
    assert "\\x1b[31mred\\x1b[0m \\x1b]0;owned\\x07 nul \\x00 turned \\u202e around" in shown
    assert "A" * 1000 in shown
    assert "A" * 3500 not in shown
    assert "characters not shown" in shown
    assert "THE-END" in shown, "the end of a long output is what one looks for"
    page = watched.page
    assert (
        page.locator(
            "#injected, #conversation img, #conversation svg, #conversation script, .farm a[href^=java]"
        ).count()
        == 0
    )
    assert page.title() == "rollout farm"
    width, seen = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert width <= seen, "a long line does not make the page scroll sideways"
    check_harmless(watched)


def test_one_episode_has_its_conversation_its_sandboxes_and_its_receipt(
    lasting: Field, url: str, open_page: OpenPage
) -> None:
    spec = lasting.spec(script("echo visible", "exit 3", candidate(repaired())))
    lasting.run(spec)
    settled = lasting.check_ended(spec.episode_id, Outcome.SOLVED, roles=("policy", "verifier"))
    watched = open_page()
    watched.goto(f"{url}?episode={spec.episode_id}")
    watched.wait_text("solved: reward 1", "#conversation")
    messages = watched.page.locator("#conversation .message")
    kinds = [str(messages.nth(n).get_attribute("class")).split()[-1] for n in range(messages.count())]
    assert kinds == ["task", *["terminal", "observation"] * 3, "submit"]
    assert spec.task.prompt.split("\n")[0] in watched.text(".message.task")
    assert "echo visible" in messages.nth(1).inner_text()
    assert "exit 0" in messages.nth(1).inner_text()
    assert messages.nth(2).inner_text().split() == ["output", "visible"]
    assert "exit 3" in messages.nth(3).inner_text()
    for row in settled.allocations:
        line = watched.text(f"#sandboxes tr:has-text('{row.sandbox_id}')")
        assert str(row.role) in line
        assert "absent" in line
    watched.page.click("#receipt summary")
    body = json.loads(watched.page.locator("#receipt pre").inner_text())
    assert body == settled.as_json() == httpx.get(f"{url}api/episodes/{spec.episode_id}").json()["receipt"]
    assert "1" in watched.text(".facts div:has(dt:text-is('reward'))")
    watched.wait(lambda: len(watched.asked) >= 4, "it has been asked for again")
    assert watched.page.locator("#receipt details[open]").count() == 1, "what one has opened stays open"
    check_harmless(watched)


def test_an_unknown_episode_is_said_to_be_unknown(url: str, open_page: OpenPage) -> None:
    watched = open_page()
    for name in ("e-nope", "%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E"):
        watched.goto(f"{url}?episode={name}")
        watched.wait_text("There is no episode", "#unknown-episode")
    assert "<img src=x" in watched.text("#unknown-episode")
    assert httpx.get(f"{url}api/episodes/e-nope").status_code == 404
    assert httpx.get(f"{url}api/runs/run-nope").status_code == 404
    check_harmless(watched)


def test_an_unresolved_clean_up_is_red_until_it_is_settled(
    lasting: Field, url: str, open_page: OpenPage, faults: ServiceFaults
) -> None:
    watched = open_page()
    watched.goto(url)
    watched.wait_text("rollout farm", "header")
    assert watched.page.locator("#unresolved").count() == 0
    faults.set(undeletable_seconds=3600)
    spec = lasting.spec(script("echo hello"), budgets=BUDGETS.model_copy(update={"cleanup_seconds": 1}))
    lasting.run(spec)
    watched.wait_text(spec.episode_id, "#unresolved")
    for selector in ("#unresolved h2", "#unresolved td a", ".tile:has-text('Clean-ups') .number b"):
        red, green, blue = watched.color(selector)
        assert red > 180, selector
        assert max(green, blue) < 130, selector
    assert "1 unresolved clean-up" in watched.text("#unresolved h2")
    faults.clear()
    watched.wait(lambda: watched.page.locator("#unresolved").count() == 0, "it is settled and the alarm is gone")
    red, green, _ = watched.color(".tile:has-text('Clean-ups') .number b")
    assert green > red


def test_an_orchestrator_that_goes_and_comes_back_is_seen(lasting: Field, open_page: OpenPage, tmp_path: Path) -> None:
    watched = open_page()
    with orchestrator(lasting, tmp_path / "first") as url:
        watched.goto(url)
        watched.wait_text("rollout farm", "header")
    lost = "document.body.classList.contains('farm-lost')"
    watched.wait(lambda: watched.page.evaluate(lost), "the page says that nobody answers")
    port = int(url.rstrip("/").rpartition(":")[2])
    with orchestrator(lasting, tmp_path / "second", port=port):
        watched.wait(lambda: not watched.page.evaluate(lost), "it goes on by itself")
    check_harmless(watched)


def test_when_redis_is_away_the_page_says_so(ground: Ground, open_page: OpenPage, tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "redis", appendfsync="no") as server:
        field = open_field(ground, redis_url=server.url)
        with field as opened, orchestrator(opened, tmp_path / "orchestrator") as url:
            watched = open_page()
            watched.goto(url)
            watched.wait_text("of 20 allowed")
            opened.farm.redis.close()
            server.stop()
            watched.wait_text("Redis does not answer", ".warning")
            assert "of 20 allowed" in watched.text(), "the last look stays"
            answer = httpx.get(f"{url}readyz")
            assert (answer.status_code, answer.text) == (503, "the farm's Redis does not answer\n")
            assert "redis.sock" not in watched.text(), "no address is shown"
            check_harmless(watched)


def test_behind_a_proxy_the_page_is_called_what_the_browser_calls_it(url: str) -> None:
    told = {"Host": "localhost:8443", "X-Forwarded-Proto": "https"}

    def page(**more: str) -> str:
        headers = [(name.encode(), value.encode("latin-1")) for name, value in (told | more).items()]
        return httpx.get(f"{url}dashboard/", headers=headers, timeout=20).text

    root = '"root":"https://localhost:8443/dashboard"'
    wait_until(lambda: root in page(), description="the page is ready", seconds=60)
    for nonsense in ("[::1", "a:b:c", "127.0.0.1:abc", "256.1.1.1", "\xe9", "::", ""):
        assert root in page(**{"X-Forwarded-Host": nonsense}), nonsense
    assert root in page(**{"X-Gradio-Server": "https://elsewhere.example"})
    named = {"X-Forwarded-Host": "farm.example, localhost:8443"}
    assert '"root":"https://farm.example/dashboard"' in page(**named)


def test_beyond_loopback_the_browser_gives_the_token_as_a_password(
    lasting: Field, open_page: OpenPage, tmp_path: Path
) -> None:
    token = "a-secret-of-ours"
    with orchestrator(lasting, tmp_path / "o", "--metrics-host", "0.0.0.0", FARM_METRICS_TOKEN=token) as shown:
        url = shown.replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(f"{url}dashboard/").status_code == 401
        with pytest.raises(Error, match="ERR_INVALID_AUTH_CREDENTIALS"):
            open_page().goto(url)
        watched = open_page(http_credentials={"username": "anybody", "password": token})
        watched.goto(url)
        watched.wait_text("of 20 allowed")
        watched.wait(lambda: len(watched.asked) >= 2, "it asks again with the token")
        assert token not in watched.page.content()
        check_harmless(watched)
    written = "".join(path.read_text(errors="replace") for path in (tmp_path / "o").iterdir() if path.is_file())
    assert token not in written
