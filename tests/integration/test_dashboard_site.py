"""The dashboard's address on a real Redis: JSON and its 404s, tokens, what is let through to the page, an outage."""

from __future__ import annotations

import asyncio
import base64
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from fastapi.responses import PlainTextResponse
from redis import Redis
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.embedded import EmbeddedRedis
from deploy.web_server import serving
from orchestrator.allocations import RECONCILER_TOKEN
from orchestrator.connection import client
from orchestrator.dashboard.episode import episode_page
from orchestrator.dashboard.gate import _question
from orchestrator.dashboard.history import History
from orchestrator.dashboard.lookout import AWAY, Lookout
from orchestrator.dashboard.panes import PANES, Asked, changed
from orchestrator.dashboard.site import add_dashboard
from orchestrator.farm import Farm, open_farm
from orchestrator.keys import Keys
from orchestrator.receipts import Receipts
from orchestrator.transcripts import Transcript
from orchestrator.vocabulary import Outcome, Role
from orchestrator.web import create_app
from tests.support.bare_farm import (
    a_receipt,
    a_spec,
    admit,
    beat_slots,
    ended_unresolved,
    farm_settings,
    intended,
    leased,
    opened_farm,
)
from tests.support.redis_processes import RedisProcess
from tests.support.waiting import wait_until

QUESTION = {"data": ['{"search": "", "digests": {}}'], "fn_index": 0, "session_hash": "s", "trigger_id": 4}


async def stand_in(scope: Scope, receive: Receive, send: Send) -> None:
    """In the page's place: says what reached it. Gradio itself is in tests/e2e/test_dashboard.py."""
    request = Request(scope, receive)
    body = (await request.body()).decode()
    answer = PlainTextResponse(f"{request.method} {scope['path']} {request.headers.get('origin')} {body}")
    answer.headers["Access-Control-Allow-Origin-Seen"] = "none"
    await answer(scope, receive, send)


@contextmanager
def site(farm: Farm, *, token: str | None = None, page: ASGIApp = stand_in) -> Iterator[httpx.Client]:
    app = create_app(farm, token=token)
    add_dashboard(app, farm, lambda lookout, path: page, token=token)
    with serving(app, "127.0.0.1", 0) as url, httpx.Client(base_url=url, timeout=20) as browser:
        yield browser


def ended(farm: Farm, outcome: Outcome = Outcome.SOLVED, **changes: str) -> str:
    """An episode with a transcript and a receipt; its id."""
    spec, lease = leased(farm, a_spec(**changes))
    transcript = Transcript(farm.redis, spec.episode_id, limit_bytes=1000, retention_seconds=100)
    transcript.add("terminal", "echo \x00<b>")
    transcript.flush()
    now = farm.ledger.now()
    farm.ledger.commit(a_receipt(spec, outcome, queued_at=now - 2, started_at=now - 1, finished_at=now), lease.token)
    return spec.episode_id


def test_an_episode_and_its_run_are_json_and_what_is_unknown_is_a_clear_404(farm: Farm) -> None:
    name = ended(farm)
    running, _ = leased(farm)
    with site(farm) as browser:
        body = browser.get(f"/api/episodes/{name}").raise_for_status().json()
        assert (body["state"], body["run_id"], body["receipt"]["outcome"]) == ("final", "run-test", "solved")
        assert body["transcript"] == [{"role": "terminal", "text": "echo \x00<b>"}]
        body = browser.get(f"/api/episodes/{running.episode_id}").raise_for_status().json()
        assert (body["state"], body["receipt"], body["transcript"]) == ("running", None, [])
        body = browser.get("/api/runs/run-test").raise_for_status().json()
        assert (body["open"], body["ended"], body["budget"]["limit_usd"]) == ({"running": 1}, 1, None)
        assert [row["episode_id"] for row in body["newest_receipts"]] == [name]
        for path, said in (
            ("/api/episodes/e-nope", "no episode 'e-nope'"),
            ("/api/runs/run-nope", "no run 'run-nope'"),
        ):
            answer = browser.get(path)
            assert answer.status_code == 404
            assert said in answer.json()["error"]
        assert browser.get("/api/runs/%2e%2e%00<script>").status_code == 404


def test_a_run_is_counted_among_many_without_reading_the_rows_of_others(tmp_path: Path) -> None:
    with RedisProcess(tmp_path / "redis") as server, opened_farm(f"redis://127.0.0.1:{server.port}/0") as farm:
        for number in range(4500):
            farm.ledger.open(a_spec(run_id="run-few" if number in (0, 2000, 4499) else "run-many"))
        leased(farm, a_spec(run_id="run-few"))
        with site(farm) as browser:
            said = browser.get("/api/runs/run-few").raise_for_status().json()["open"]
            assert said == {"queued": 3, "running": 1}
            sent = farm.redis.info("stats")["total_net_output_bytes"]
            assert browser.get("/api/runs/run-none").status_code == 404
            assert farm.redis.info("stats")["total_net_output_bytes"] - sent < 50_000


def test_the_root_leads_to_the_dashboard_and_keeps_what_is_asked_for(farm: Farm) -> None:
    with site(farm) as browser:
        assert browser.get("/?episode=e-1").headers["location"] == "dashboard/?episode=e-1"
        assert browser.get("/").headers["location"] == "dashboard/"
        assert browser.get("/favicon.ico").status_code == 204


def test_only_what_the_page_needs_reaches_gradio(farm: Farm) -> None:
    with site(farm) as browser:
        for path in ("/", "/theme.css", "/assets/index.js", "/static/a.js", "/gradio_api/app_id"):
            assert browser.get(f"/dashboard{path}").text.startswith(f"GET /dashboard{path}")
        shut: tuple[str, ...] = (
            "/config",
            "/gradio_api/file=/etc/passwd",
            "/gradio_api/proxy=http://a.hf.space",
            "/gradio_api/info",
        )
        shut += ("/gradio_api/proxy=http://a.hf.space", "/gradio_api/queue/data", "/monitoring", "/login_check")
        for path in shut:
            assert browser.get(f"/dashboard{path}").text == "there is nothing here\n"
        for path in ("/gradio_api/upload", "/gradio_api/queue/join", "/gradio_api/call/x", "/login", "/"):
            assert browser.post(f"/dashboard{path}", json=QUESTION).status_code == 404
        assert browser.put("/dashboard/").status_code == 404


def test_a_question_reaches_gradio_as_the_page_would_ask_it_and_nothing_else_does(farm: Farm) -> None:
    ask = "/dashboard/gradio_api/run/predict"
    with site(farm) as browser:
        told = browser.post(ask, json={**QUESTION, "event_id": "x", "batched": True, "simple_format": True}).text
        assert '"fn_index": 0' in told
        assert "event_id" not in told
        wrong: tuple[object, ...] = ({}, [], {"data": [], "fn_index": 0}, {**QUESTION, "fn_index": 1})
        wrong += ({**QUESTION, "data": [{"path": "/etc/passwd"}]}, {**QUESTION, "data": ["x" * 20_000]})
        for content in ("[" * 16_000, '{"data": ["{}"], "fn_index": 1e999}', '{"data": ["{}"], "fn_index": NaN}'):
            assert browser.post(ask, content=content).status_code == 400, content[:50]
        for body in wrong:
            answer = browser.post(ask, json=body)
            assert (answer.status_code, answer.text) == (400, "not a question of the page\n")
        assert browser.post(ask, content=b"\xff{").status_code == 400


def test_no_other_origin_may_read_and_the_browser_may_load_from_none(farm: Farm) -> None:
    with site(farm) as browser:
        answer = browser.get("/dashboard/", headers={"Origin": "https://evil.example"})
        assert "None" in answer.text, "Gradio would let an origin read, where it saw one"
        policy = answer.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "http" not in policy
        for path in ("/api/runs/run-nope", "/dashboard/"):
            assert browser.get(path).headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", ["Host", "X-Forwarded-Host"])
def test_a_name_that_is_none_is_as_if_it_were_not_there(farm: Farm, name: str) -> None:
    async def page(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        root = httpx.URL(f"http://{request.headers.get('x-forwarded-host') or request.url.netloc}")  # as Gradio does
        await PlainTextResponse(str(root))(scope, receive, send)

    with site(farm, token="secret", page=page) as browser:
        told = {"Authorization": "Bearer secret"}
        here = f"http://127.0.0.1:{browser.base_url.port}"
        for nonsense in ("256.1.1.1", "1.2.3.4444:80", "[::1"):
            answer = browser.get("/dashboard/", headers={**told, name: nonsense})
            assert (answer.status_code, answer.text) == (200, here), nonsense
        assert browser.get("/dashboard/", headers={**told, name: "farm.example.:81"}).text == "http://farm.example.:81"


def test_a_token_guards_page_and_json_and_comes_as_bearer_or_as_password(farm: Farm) -> None:
    def basic(text: str) -> dict[str, str]:
        return {"Authorization": "Basic " + base64.b64encode(text.encode()).decode()}

    name = ended(farm)
    with site(farm, token="sécret:x") as browser:
        paths = ("/dashboard/", "/dashboard/assets/a.js", f"/api/episodes/{name}", "/api/runs/run-test")
        refused: tuple[dict[str, str] | dict[bytes, bytes], ...] = (
            {},
            basic("any:wrong"),
            basic("sécret:x"),
        )
        refused += ({"Authorization": "Bearer wrong"}, {"Authorization": "Basic ="}, {"Authorization": "Digest a"})
        refused += ({b"Authorization": b"Basic \xe9"}, {b"Authorization": b"Bearer \xe9"})
        for path in paths:
            for headers in refused:
                answer = browser.get(path, headers=headers)
                assert answer.status_code == 401
                assert answer.headers["www-authenticate"].startswith("Basic ")
            assert browser.get(path, headers=basic("any:sécret:x")).status_code == 200
        assert browser.get(paths[2], params={"token": "sécret:x"}).status_code == 401, "never in an address"
        assert browser.post("/dashboard/gradio_api/run/predict", json=QUESTION).status_code == 401
        assert browser.get("/healthz").status_code == 200
        foreign = {"Host": "farm.example", **basic("any:sécret:x")}
        assert browser.get("/dashboard/", headers=foreign).status_code == 200


@pytest.mark.parametrize("host", ["farm.example", "farm.example:80", "127.0.0.1.evil.example", "", "[::2]:9400"])
def test_without_a_token_a_name_of_somebody_elses_is_refused(farm: Farm, host: str) -> None:
    with site(farm) as browser:
        for path in ("/dashboard/", "/api/runs/run-test"):
            answer = browser.get(path, headers={"Host": host})
            assert answer.status_code == 403
            assert "FARM_METRICS_TOKEN" in answer.text


@pytest.mark.parametrize("host", ["localhost", "localhost:9400", "127.0.0.1:9400", "[::1]:9400", "[::1]"])
def test_without_a_token_this_host_is_answered(farm: Farm, host: str) -> None:
    with site(farm) as browser:
        assert browser.get("/dashboard/", headers={"Host": host}).status_code == 200


def test_a_page_that_takes_long_to_make_says_so_and_keeps_nobody_else_waiting(farm: Farm) -> None:
    ready = threading.Event()
    app = create_app(farm)

    def slow(lookout: Lookout, path: str) -> ASGIApp:
        assert ready.wait(20)
        return stand_in

    add_dashboard(app, farm, slow, token=None)
    with serving(app, "127.0.0.1", 0) as url, httpx.Client(base_url=url, timeout=20) as browser:
        try:
            answer = browser.get("/dashboard/")
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert "getting ready" in answer.text
            assert browser.get("/metrics").status_code == 200
        finally:
            ready.set()
        wait_until(lambda: browser.get("/dashboard/").status_code == 200, description="the page is made")


def test_a_missing_gradio_is_said_and_tried_again(farm: Farm) -> None:
    tries: list[str] = []

    def broken(lookout: Lookout, path: str) -> ASGIApp:
        tries.append(path)
        if len(tries) == 1:
            raise ModuleNotFoundError("No module named 'gradio'")
        return stand_in

    app = create_app(farm)
    add_dashboard(app, farm, broken, token=None)
    with serving(app, "127.0.0.1", 0) as url, httpx.Client(base_url=url, timeout=20) as browser:
        answer = browser.get("/dashboard/")
        assert (answer.status_code, "pip install" in answer.text) == (503, True)
        assert browser.get("/dashboard/").status_code == 200
    assert tries == ["/dashboard", "/dashboard"]


def test_without_redis_every_answer_says_so_and_the_last_look_stays(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "redis", appendfsync="no") as server:
        farm = open_farm(farm_settings(server.url), patient=False)
        name = ended(farm)
        clock = iter(range(10_000))
        lookout = Lookout(farm, clock=lambda: float(next(clock)))
        assert name in str(changed(lookout, Asked())["episodes"])
        assert "solved" in str(changed(lookout, Asked(episode=name))["episode"])
        with site(farm) as browser:
            server.stop()
            for path in (f"/api/episodes/{name}", "/api/runs/run-test"):
                answer = browser.get(path)
                assert (answer.status_code, "does not answer" in answer.json()["error"]) == (503, True)
            assert browser.get("/readyz").status_code == 503
        panes = changed(lookout, Asked())
        assert "does not answer" in str(panes["header"])
        assert name in str(panes["episodes"])
        clock = iter(range(20_000, 30_000))
        panes = changed(lookout, Asked(episode=name))
        assert AWAY.partition("'")[0] in str(panes["episode"])
        assert "solved" in str(panes["episode"])
        farm.redis.close()
        farm.queue.rq.connection.close()


def test_an_overview_shows_what_runs_waits_ended_and_is_stuck(farm: Farm) -> None:
    beat_slots(farm, 4)
    solved, aborted = ended(farm), ended(farm, Outcome.WORKER_LOST)
    spec, lease = leased(farm, a_spec(run_id="run-now"))
    admit(farm, spec.episode_id)
    row = intended(farm, spec, lease, Role.POLICY)
    farm.ledger.allocations.created(row, "sandbox-1", lease.token, creating_ms=10)
    queued = a_spec()
    farm.ledger.open(queued)
    farm.queue.enqueue(queued)
    panes = {name: str(pane) for name, pane in changed(Lookout(farm), Asked()).items()}
    for name in (solved, aborted, spec.episode_id, queued.episode_id):
        assert f"?episode={name}" in panes["episodes"]
    assert panes["episodes"].count("badge running") == 1
    assert panes["episodes"].count("badge queued") == 1
    assert "worker_lost" in panes["trends"]
    assert "<b>1</b> <span>of 20 allowed</span>" in panes["tiles"]
    assert "of 4 busy" in panes["tiles"]
    assert "nope" not in panes["alarms"]
    assert "unresolved" not in panes["alarms"]
    farm.ledger.allocations.unresolved(row, lease.token, "the deletion <was> not answered")
    panes = {name: str(pane) for name, pane in changed(Lookout(farm), Asked()).items()}
    assert "1 unresolved clean-up" in panes["alarms"]
    assert "the deletion &lt;was&gt; not answered" in panes["alarms"]
    assert "sandbox-1" in panes["alarms"]
    assert "badge stuck" in str(changed(Lookout(farm), Asked(episode=spec.episode_id))["episode"])


def test_a_pane_that_the_browser_shows_already_is_not_sent_again(farm: Farm) -> None:
    name = ended(farm)
    lookout = Lookout(farm)
    first = changed(lookout, Asked(episode=name))
    digests = {pane: str(first[pane]).partition('data-digest="')[2][:16] for pane in PANES}
    again = changed(Lookout(farm), Asked(episode=name, digests=digests))
    assert again["episode"] is None, "nothing of an ended episode changes, so a reader's selection stays"
    assert again["trends"] is None
    assert changed(lookout, Asked(digests=digests))["episode"] is not None, "the overview takes the episode away"


def test_what_ends_later_is_seen_and_what_was_known_stays(farm: Farm) -> None:
    clock = iter(range(10_000))
    lookout = Lookout(farm, clock=lambda: float(next(clock)))

    def shown() -> list[str]:
        look = lookout.view().look
        assert look is not None
        return [one.episode_id for one in look.ended]

    first = ended(farm)
    assert shown() == [first]
    later = [ended(farm) for _ in range(3)]
    assert set(shown()) == {first, *later}
    fresh = Lookout(farm).view().look
    assert fresh is not None
    assert {one.episode_id for one in fresh.ended} == {first, *later}, "another orchestrator sees the same"


def test_a_sandbox_that_is_not_settled_shows_what_it_has_cost_so_far(farm: Farm, redis: Redis) -> None:
    row, _ = ended_unresolved(farm)
    redis.hincrby(Keys.allocation(row.allocation_id), "created_at", -100_000)
    view = Lookout(farm).find(row.episode_id)
    assert 100 * 30_250_000 <= view.costs[row.allocation_id] <= 160 * 30_250_000
    assert re.search(r"cost</dt><dd>\$0\.00[34]\d+ so far<", episode_page(view))
    assert len(re.findall(r"\$0\.00[34]\d+ so far", episode_page(view))) == 2, "and beside the sandbox"
    farm.ledger.allocations.absent(row, RECONCILER_TOKEN, running_ms=100_000)
    settled = Lookout(farm).find(row.episode_id)
    assert settled.costs == {row.allocation_id: 100 * 30_250_000}
    assert "so far" not in episode_page(settled)


def test_many_pages_cost_one_look_and_nobody_waits_for_it(farm: Farm) -> None:
    with client(farm.settings) as watcher:
        lookout = Lookout(farm, clock=lambda: 0.0)
        lookout.view()
        before = int(watcher.info("stats")["total_commands_processed"])
        for _ in range(100):
            lookout.view()
        after = int(watcher.info("stats")["total_commands_processed"])
    assert after - before <= 2, "a hundred pages asked Redis nothing"
    lookout = Lookout(farm)
    with lookout._looking:  # as if another page's look took long
        began = time.monotonic()
        assert lookout.view().look is None
        assert time.monotonic() - began < 5


def test_a_browser_that_leaves_in_the_middle_of_its_question_has_asked_nothing() -> None:
    messages: list[Message] = [
        {"type": "http.request", "body": b'{"data": ["', "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Message:
        return messages.pop(0)

    assert asyncio.run(_question(Request({"type": "http", "headers": []}, receive))) is None


def test_what_ended_since_redis_clock_stepped_back_is_shown(farm: Farm) -> None:
    history = History(Receipts(farm.redis, farm.ledger.allocations))
    history.look(farm.ledger.now() + 3600)  # an hour later, as it was then
    spec, lease = leased(farm)
    farm.ledger.commit(a_receipt(spec), lease.token)
    history.look(farm.ledger.now())
    assert [ended.episode_id for ended in history.newest] == [spec.episode_id]
