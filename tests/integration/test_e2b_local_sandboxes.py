"""The control plane of the local sandbox service, through the real SDK."""

import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from e2b import AuthenticationException, RateLimitException, Sandbox, SandboxException, SandboxQuery
from e2b.exceptions import SandboxNotFoundException

from tests.support.e2b_local import LocalService, jails_of, running_service
from tests.support.processes import children, exists
from tests.support.waiting import wait_until

pytest_plugins = ["tests.support.e2b_local"]

BODY = {"templateID": "base", "timeout": 60, "metadata": {"a": "b"}}


def test_a_wrong_key_is_an_authentication_error(service: LocalService) -> None:
    with pytest.raises(AuthenticationException):
        service.client("e2b_" + "6" * 40).Sandbox.create()
    answer = service.call("GET", "/v2/sandboxes", headers={"X-API-KEY": "nope"})
    assert (answer.status_code, answer.json()["code"]) == (401, 401)


def test_info_tells_what_was_asked_for(service: LocalService) -> None:
    box = service.create(timeout=100, metadata={"who": "me"})
    info = box.get_info()
    assert (info.sandbox_id, info.metadata, info.template_id) == (box.sandbox_id, {"who": "me"}, "base")
    assert 95 < (info.end_at - info.started_at).total_seconds() <= 100.1
    assert box.kill()


def test_a_killed_sandbox_is_gone_for_every_call(service: LocalService) -> None:
    box = service.create()
    assert box.kill()
    assert not box.is_running()
    assert not service.client().Sandbox.kill(box.sandbox_id)
    for call in (service.client().Sandbox.get_info, service.client().Sandbox.connect):
        with pytest.raises(SandboxNotFoundException):
            call(box.sandbox_id)


def test_list_filters_by_metadata_and_pages_newest_first(service: LocalService) -> None:
    odd = "ü&=% +"
    boxes = [service.create(metadata={"page": odd}) for _ in range(3)]
    other = service.create(metadata={"page": "other"})
    paginator = service.client().Sandbox.list(query=SandboxQuery(metadata={"page": odd}), limit=2)
    first, second = paginator.next_items(), paginator.next_items()
    assert [row.sandbox_id for row in first + second] == [box.sandbox_id for box in reversed(boxes)]
    assert not paginator.has_next
    for box in (*boxes, other):
        box.kill()


def test_list_finds_a_sandbox_by_its_own_start_time_and_not_by_a_later_one(service: LocalService) -> None:
    for _ in range(10):
        box = service.create(metadata={"start": "time"})
        started = box.get_info().started_at
        for after, found in ((started, 1), (started + timedelta(milliseconds=1), 0)):
            query = SandboxQuery(metadata={"start": "time"}, started_after=after)
            assert len(service.client().Sandbox.list(query=query).next_items()) == found
        box.kill()


def test_a_sandbox_ends_at_its_time(service: LocalService) -> None:
    box = service.create(timeout=1)
    wait_until(lambda: service.events_of(box.sandbox_id) == ["created", "expired"], description="it expired")
    assert not box.is_running()


def test_connect_never_shortens_a_lifetime_but_set_timeout_does(service: LocalService) -> None:
    box = service.create(timeout=100)
    end = box.get_info().end_at
    service.client().Sandbox.connect(box.sandbox_id, timeout=10)
    assert box.get_info().end_at == end
    box.set_timeout(10)
    assert box.get_info().end_at < end
    box.kill()


def test_a_resumed_sandbox_keeps_its_files(service: LocalService) -> None:
    box = service.create()
    box.files.write("kept", "yes")
    box.pause()
    assert not box.is_running()
    assert service.client().Sandbox.connect(box.sandbox_id).files.read("kept") == "yes"
    box.kill()


def test_the_log_tells_creations_and_ends_with_their_metadata(service: LocalService) -> None:
    before = time.time()
    box = service.create(metadata={"log": "1"})
    box.kill()
    rows = [row for row in service.events() if row["sandbox_id"] == box.sandbox_id]
    assert [row["event"] for row in rows] == ["created", "deleted"]
    assert before <= rows[0]["time"] <= rows[1]["time"] <= time.time()
    assert all(row["metadata"] == {"log": "1"} for row in rows)
    assert service.call("GET", "/admin/events", headers={"X-API-KEY": "no"}).status_code == 401


def test_an_idempotency_key_creates_once_even_after_the_kill(service: LocalService) -> None:
    headers = {"Idempotency-Key": "key-once"}
    first = service.call("POST", "/v2/sandboxes", json=BODY, headers=headers).json()["sandboxID"]
    again = service.call("POST", "/v2/sandboxes", json=BODY, headers=headers)
    assert (again.status_code, again.json()["sandboxID"]) == (201, first)
    assert service.client().Sandbox.kill(first)
    assert service.call("POST", "/v2/sandboxes", json=BODY, headers=headers).json()["sandboxID"] == first
    assert service.events_of(first) == ["created", "deleted"]


def test_an_idempotency_key_refuses_another_request(service: LocalService) -> None:
    headers = {"Idempotency-Key": "key-mismatch"}
    first = service.call("POST", "/v2/sandboxes", json=BODY, headers=headers).json()["sandboxID"]
    other = service.call("POST", "/v2/sandboxes", json={**BODY, "timeout": 61}, headers=headers)
    assert (other.status_code, other.json()["error_code"]) == (422, "idempotency_request_mismatch")
    service.client().Sandbox.kill(first)


def test_concurrent_creations_with_one_key_share_one_sandbox(service: LocalService) -> None:
    def create(_: int) -> str:
        return service.create(idempotency_key="key-together").sandbox_id

    with ThreadPoolExecutor(6) as pool:
        ids = set(pool.map(create, range(6)))
    assert len(ids) == 1
    service.client().Sandbox.kill(ids.pop())


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"templateID": "unheard-of"}, 404),
        ({"timeout": -1}, 400),
        ({"timeout": 10**9}, 400),
        ({"metadata": {"a": 1}}, 400),
        ({"envVars": ["A"]}, 400),
    ],
)
def test_a_bad_creation_is_refused_with_a_reason(service: LocalService, change: dict[str, object], status: int) -> None:
    answer = service.call("POST", "/v2/sandboxes", json={**BODY, **change})
    assert (answer.status_code, answer.json()["code"]) == (status, status)
    assert answer.json()["message"]


def test_a_body_that_is_no_json_object_is_refused(service: LocalService) -> None:
    for content in (b"{", b"[]", b"\xff"):
        assert service.call("POST", "/v2/sandboxes", content=content).status_code == 400


def test_an_unknown_template_is_a_sandbox_error_for_the_sdk(service: LocalService) -> None:
    with pytest.raises(SandboxException, match="unheard-of"):
        service.client().Sandbox.create("unheard-of")


def test_over_the_cap_a_creation_is_rate_limited_until_one_is_killed(tmp_path: Path) -> None:
    with running_service(tmp_path / "root", max_sandboxes=1) as service:
        first = service.create()
        with pytest.raises(RateLimitException, match="maximum number of concurrent"):
            service.create()
        first.kill()
        assert service.create().kill()


def test_sigterm_ends_every_sandbox_and_leaves_no_file(tmp_path: Path) -> None:
    with running_service(tmp_path / "root") as service:
        box = service.create()
        handle = box.commands.run("sleep 1000", background=True)
        assert handle.pid
        jails = children(service.process.pid)
        assert len(jails) == 1
        assert service.stop() == 0
    assert list((tmp_path / "root").iterdir()) == []
    assert not Path("/proc", str(jails[0])).exists()


def test_a_killed_service_takes_its_sandboxes_along_and_its_files_are_swept_later(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with running_service(root) as service:
        service.create()
        (jail,) = children(service.process.pid)
        inner = children(jail)
        service.stop(signal.SIGKILL)
        wait_until(lambda: not any(map(exists, (jail, *inner))), description="no jail")
        assert jails_of(root) != []
        with running_service(root) as heir:
            assert jails_of(root) == [f"run-{heir.process.pid}"]


def test_a_python_that_other_users_cannot_reach_serves_sandboxes_too(tmp_path: Path) -> None:
    python = Path(sys.base_prefix, "bin", f"python3.{sys.version_info[1]}")
    with running_service(tmp_path / "root", python=str(python)) as service:
        box = service.create()
        script = "/opt/farm/bin/python3 -c 'import sys, json, ssl; print(sys.prefix)'"
        assert box.commands.run(script).stdout.strip() == str(python.parent.parent.resolve())
    if os.geteuid() == 0:
        assert list(Path("/run").glob("rollout-farm-python-*")) == []


def test_many_sandboxes_at_once_are_all_different_and_all_work(service: LocalService) -> None:
    def once(number: int) -> tuple[str, str]:
        box: Sandbox = service.create()
        said = box.commands.run(f"echo {number}").stdout
        box.kill()
        return box.sandbox_id, said

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(once, range(16)))
    assert len({sandbox_id for sandbox_id, _ in results}) == 16
    assert [said for _, said in results] == [f"{number}\n" for number in range(16)]
