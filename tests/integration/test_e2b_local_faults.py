"""The faults of the local sandbox service as its clients meet them, and its own log of creations."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from e2b import RateLimitException, SandboxException, SandboxQuery, TimeoutException

from tests.support.e2b_local import API_KEY, LocalService, running_service
from tests.support.faults import ServiceFaults
from tests.support.waiting import wait_until

pytest_plugins = ["tests.support.e2b_local"]

BODY = {"templateID": "base", "timeout": 60}


@pytest.fixture
def faults(service: LocalService) -> Iterator[ServiceFaults]:
    """The faults of this module's service; cleared after each test."""
    handle = ServiceFaults(service.url, API_KEY)
    yield handle
    handle.clear()


def create(service: LocalService, key: str | None = None, **metadata: str) -> httpx.Response:
    headers = {"Idempotency-Key": key} if key else {}
    return service.call("POST", "/v2/sandboxes", json={**BODY, "metadata": metadata}, headers=headers)


def created(service: LocalService) -> str:
    """The id of a sandbox, once the service makes one."""

    def answered() -> str:
        answer = create(service)
        return str(answer.json()["sandboxID"]) if answer.status_code == 201 else ""

    return wait_until(answered, description="a sandbox may be made")


def delete(service: LocalService, sandbox_id: str) -> int:
    return service.call("DELETE", f"/sandboxes/{sandbox_id}").status_code


def there(service: LocalService, sandbox_id: str) -> bool:
    return service.call("GET", f"/sandboxes/{sandbox_id}").status_code == 200


# setting them


def test_faults_are_shown_replaced_and_cleared(service: LocalService, faults: ServiceFaults) -> None:
    faults.set(create_rate=5, lost__create=2)
    faults.set(rate_limited="25%")
    assert faults.call("GET", "faults").json() == {"faults": {"rate_limited": "25%"}, "hits": {}}
    faults.clear()
    assert faults.call("GET", "faults").json() == {"faults": {}, "hits": {}}


def test_faults_need_the_key(service: LocalService) -> None:
    for method, path in (("GET", "faults"), ("PUT", "faults"), ("DELETE", "faults"), ("GET", "creations")):
        answer = service.call(method, f"/admin/{path}", headers={"X-API-KEY": "nope"})
        assert answer.status_code == 401


@pytest.mark.parametrize("body", [{"create_rte": 1}, {"lost": {"create": "sometimes"}}, {"latency": {"nap": "1"}}])
def test_a_wrong_fault_is_refused_by_name_and_changes_nothing(
    service: LocalService, faults: ServiceFaults, body: dict[str, Any]
) -> None:
    faults.set(rate_limited=1)
    answer = faults.call("PUT", "faults", json=body)
    assert answer.status_code == 400
    assert next(iter(body)) in answer.json()["message"]
    assert faults.call("GET", "faults").json()["faults"] == {"rate_limited": 1}


# 429


def test_a_rate_429_names_its_pause_or_not(service: LocalService, faults: ServiceFaults) -> None:
    faults.set(create_rate=0.5)
    made, refused = create(service), create(service)
    assert (made.status_code, refused.status_code) == (201, 429)
    assert refused.headers["retry-after"] in ("1", "2")
    assert refused.json()["code"] == 429
    faults.set(rate_limited=1, retry_after=False)
    silent = create(service)
    assert silent.status_code == 429
    assert "retry-after" not in silent.headers
    delete(service, made.json()["sandboxID"])


def test_an_html_429_keeps_its_header(service: LocalService, faults: ServiceFaults) -> None:
    faults.set(rate_limited="always", html_429=True)
    answer = create(service)
    assert (answer.status_code, answer.headers["content-type"]) == (429, "text/html")
    assert answer.headers["retry-after"] == "1"
    assert answer.text.startswith("<html>")


def test_a_cap_counts_what_ended_a_moment_ago(service: LocalService, faults: ServiceFaults) -> None:
    faults.set(max_sandboxes=1, count_lag_seconds=1)
    delete(service, created(service))
    ended = time.monotonic()
    refused = create(service)
    assert refused.status_code == 429
    assert refused.json()["message"] == "you have reached the maximum number of concurrent E2B sandboxes (1)"
    assert "retry-after" not in refused.headers
    with pytest.raises(RateLimitException):
        service.create()
    sandbox_id = created(service)
    assert time.monotonic() - ended >= 0.9
    delete(service, sandbox_id)


def test_a_key_names_its_sandbox_also_when_no_more_may_be_made(service: LocalService, faults: ServiceFaults) -> None:
    made = create(service, "cap-key")
    faults.set(max_sandboxes=1)
    again = create(service, "cap-key")
    assert (again.status_code, again.json()) == (201, made.json())
    assert create(service, "other-key").status_code == 429
    delete(service, made.json()["sandboxID"])


# answers


def test_a_lost_create_answer_is_repeated_under_its_key(service: LocalService, faults: ServiceFaults) -> None:
    faults.set(lost__create=1)
    with pytest.raises(httpx.RemoteProtocolError):
        create(service, "lost-key", test="lost")
    rows = service.client().Sandbox.list(query=SandboxQuery(metadata={"test": "lost"})).next_items()
    again = create(service, "lost-key", test="lost")
    assert [row.sandbox_id for row in rows] == [again.json()["sandboxID"]]
    assert [row["status"] for row in faults.creations()["attempts"]] == [None, 201]
    delete(service, again.json()["sandboxID"])


def test_a_hung_create_makes_nothing_and_frees_its_key(service: LocalService, faults: ServiceFaults) -> None:
    faults.set(hung__create=1)
    before = faults.creations()["live"]
    headers = {"X-API-KEY": API_KEY, "Idempotency-Key": "hung-key"}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{service.url}/v2/sandboxes", json=BODY, headers=headers, timeout=0.5)
    wait_until(lambda: faults.statuses("hung-key") == [None], description="the hung call ends with its client")
    assert faults.creations()["live"] == before
    made = create(service, "hung-key")
    assert made.status_code == 201
    delete(service, made.json()["sandboxID"])


def test_503_carries_nothing_out_and_502_everything(service: LocalService, faults: ServiceFaults) -> None:
    sandbox_id = create(service).json()["sandboxID"]
    faults.set(unavailable__delete=1)
    assert delete(service, sandbox_id) == 503
    assert there(service, sandbox_id)
    faults.set(bad_gateway__delete=1)
    assert delete(service, sandbox_id) == 502
    assert not there(service, sandbox_id)
    assert delete(service, sandbox_id) == 404


def test_latency_delays_its_operation_and_no_other(service: LocalService, faults: ServiceFaults) -> None:
    faults.set(latency__create="constant:0.3")
    began = time.monotonic()
    sandbox_id = create(service).json()["sandboxID"]
    assert time.monotonic() - began >= 0.3
    assert faults.hits() == {"latency.create": 1}
    assert delete(service, sandbox_id) == 204
    assert faults.hits() == {"latency.create": 1}


def test_a_command_is_cut_and_goes_on(service: LocalService, faults: ServiceFaults) -> None:
    box = service.create()
    faults.set(stream_cut=1)
    with pytest.raises(SandboxException):
        box.commands.run("sleep 0.2; touch done")
    wait_until(lambda: box.files.exists("/home/user/done"), description="the command has ended")
    assert box.commands.run("echo whole").stdout == "whole\n"
    assert box.kill()


def test_a_command_falls_silent_and_goes_on(service: LocalService, faults: ServiceFaults) -> None:
    box = service.create()
    faults.set(stream_stalled=1)
    with pytest.raises(TimeoutException):
        box.commands.run("touch done", timeout=1)
    assert box.files.exists("/home/user/done")
    assert box.commands.run("echo whole").stdout == "whole\n"
    assert box.kill()


# sandboxes


def test_a_deletion_answered_early_comes_later(service: LocalService, faults: ServiceFaults) -> None:
    sandbox_id = create(service).json()["sandboxID"]
    faults.set(delete_lag_seconds=1)
    assert delete(service, sandbox_id) == 204
    assert there(service, sandbox_id)
    assert delete(service, sandbox_id) == 204
    faults.clear()
    wait_until(lambda: service.events_of(sandbox_id) == ["created", "deleted"], description="it is gone")
    assert not there(service, sandbox_id)


def test_an_undeletable_sandbox_can_be_deleted_in_the_end(service: LocalService, faults: ServiceFaults) -> None:
    sandbox_id = create(service).json()["sandboxID"]
    faults.set(undeletable_seconds=0.5)
    assert delete(service, sandbox_id) == 500
    assert there(service, sandbox_id)
    wait_until(lambda: delete(service, sandbox_id) == 204, description="it can be deleted")
    assert not there(service, sandbox_id)


def test_a_sandbox_crashes_at_its_time_or_after_its_commands(service: LocalService, faults: ServiceFaults) -> None:
    faults.set(dies_after_seconds=0.3, only__dies="soon")
    soon, later = service.create(metadata={"dies": "soon"}), service.create()
    wait_until(lambda: service.events_of(soon.sandbox_id) == ["created", "lost"], description="it has crashed")
    faults.set(dies_after_commands=2)
    assert later.commands.run("echo 1").stdout == "1\n"
    assert later.commands.run("echo 2").stdout == "2\n"
    wait_until(lambda: service.events_of(later.sandbox_id) == ["created", "lost"], description="it has crashed")
    assert not later.is_running()


def test_cleared_faults_kill_nobody(service: LocalService, faults: ServiceFaults) -> None:
    faults.set(dies_after_seconds=1.5)
    box = service.create()
    faults.clear()
    box.commands.run("sleep 1.7")
    assert box.is_running()
    assert box.kill()


def test_a_list_can_ignore_its_filter(service: LocalService, faults: ServiceFaults) -> None:
    box = service.create(metadata={"mine": "yes"})
    query = SandboxQuery(metadata={"mine": "no"})
    assert service.client().Sandbox.list(query=query).next_items() == []
    faults.set(list_unfiltered=True)
    assert box.sandbox_id in [row.sandbox_id for row in service.client().Sandbox.list(query=query).next_items()]
    assert box.kill()


# the port


def test_an_outage_refuses_connections_and_ends(service: LocalService, faults: ServiceFaults) -> None:
    box = service.create()
    with httpx.Client(base_url=service.url, headers={"X-API-KEY": API_KEY}) as kept:
        assert kept.get("/admin/faults").status_code == 200
        faults.set(outage_seconds=1)
        with pytest.raises(httpx.ConnectError):
            httpx.get(service.url)
        with pytest.raises(httpx.TransportError):  # connections that were open are not an exception
            kept.get("/admin/faults")
    faults.clear()
    assert box.commands.run("echo still here").stdout == "still here\n"
    assert box.kill()


def test_a_service_can_be_stopped_during_an_outage(tmp_path_factory: pytest.TempPathFactory) -> None:
    with running_service(tmp_path_factory.mktemp("deaf") / "root") as running:
        running.create()
        ServiceFaults(running.url, API_KEY).set(outage_seconds=600)
        assert running.stop() == 0


# the log


def test_the_log_tells_attempts_answers_and_the_most_at_once(service: LocalService, faults: ServiceFaults) -> None:
    made: list[str] = []

    def make() -> None:
        made.append(create(service).json()["sandboxID"])

    threads = [threading.Thread(target=make) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    faults.set(rate_limited=1)
    assert create(service, "refused-key").status_code == 429
    for sandbox_id in made:
        delete(service, sandbox_id)
    log = faults.creations()
    assert [row["status"] for row in log["attempts"]] == [201, 201, 201, 429]
    assert all(row["time"] >= faults.began and row["seconds"] >= 0 for row in log["attempts"])
    assert log["attempts"][-1]["key"] == "refused-key"
    assert (log["live"], log["most_live"], log["forgotten"]) == (0, 3, 0)
    later = ServiceFaults(service.url, API_KEY)
    assert later.creations()["attempts"] == []
    assert later.creations()["most_live"] == 0
    events = [row for row in service.events() if row["time"] >= faults.began]
    assert [row["live"] for row in events] == [1, 2, 3, 2, 1, 0]


def test_a_wrong_since_is_refused(faults: ServiceFaults) -> None:
    assert faults.call("GET", "creations", params={"since": "yesterday"}).status_code == 400
