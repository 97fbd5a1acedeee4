"""The reconciler's plan as a table: what is seen, what is to be done. Nothing here has a clock or a Redis."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.plan import DeleteOrphan, End, Enqueue, Finish, Repair, Settle, Snapshot, apart, is_orphan, plan
from orchestrator.provider import SandboxRow
from orchestrator.records import Allocation
from orchestrator.rows import OpenEpisode
from orchestrator.vocabulary import AllocationState, EpisodeState, Outcome, Role

NOW = 10_000.0
LEASE = 12.0

QUEUED = OpenEpisode("e-queued", EpisodeState.QUEUED, "e-queued-a1")
RUNNING = OpenEpisode("e-running", EpisodeState.RUNNING, "e-running-a1")
SANDBOX = Allocation(
    allocation_id="e-over-a1-policy",
    episode_id="e-over",
    role=Role.POLICY,
    state=AllocationState.UNRESOLVED,
    intended_at=1.0,
)
CALM = Snapshot(now=NOW, watched_since=NOW - 1000, open=[], lease_ends={}, suspected_seconds={}, unsettled=[])


def actions(view: Snapshot) -> list[Repair]:
    return plan(view, lease_seconds=LEASE)


def test_an_empty_farm_needs_nothing() -> None:
    assert actions(CALM) == []


@pytest.mark.parametrize(
    ("suspected_for", "expected"),
    [(None, []), (0.0, []), (9.9, []), (10.0, [Enqueue("e-queued")]), (500.0, [Enqueue("e-queued")])],
)
def test_a_queued_row_without_a_waiting_job_is_enqueued_after_a_while(
    suspected_for: float | None, expected: list[Repair]
) -> None:
    suspected = {} if suspected_for is None else {QUEUED.job_id: suspected_for}
    assert actions(replace(CALM, open=[QUEUED], suspected_seconds=suspected)) == expected


@pytest.mark.parametrize(("up_for", "expected"), [(0.0, []), (11.9, []), (12.0, [Enqueue("e-queued")])])
def test_no_job_is_taken_for_lost_until_redis_has_been_up_for_one_lease_time(
    up_for: float, expected: list[Repair]
) -> None:
    """Whoever popped it before the outage may be about to take its lease."""
    view = replace(CALM, open=[QUEUED], suspected_seconds={QUEUED.job_id: 60}, watched_since=NOW - up_for)
    assert actions(view) == expected


def test_suspicion_of_another_attempt_does_not_count() -> None:
    assert actions(replace(CALM, open=[QUEUED], suspected_seconds={"e-queued-a2": NOW})) == []


WAITS = replace(QUEUED, batch="r1", together_seconds=30.0)


@pytest.mark.parametrize(
    ("apart_for", "expected"),
    [({}, []), ({"e-queued": 29.9}, []), ({"e-queued": 30.0}, [End("e-queued", Outcome.ADMISSION_TIMEOUT)])],
)
def test_a_batch_that_runs_without_one_of_it_does_not_wait_until_its_windows_are_over(
    apart_for: dict[str, float], expected: list[Repair]
) -> None:
    assert actions(replace(CALM, open=[WAITS], apart_seconds=apart_for)) == expected
    assert actions(replace(CALM, open=[QUEUED], apart_seconds=apart_for)) == []
    assert actions(replace(CALM, open=[WAITS], apart_seconds=apart_for, watched_since=NOW)) == []


def test_apart_is_who_is_queued_while_others_of_its_batch_run() -> None:
    runs = replace(RUNNING, batch="r1")
    assert apart([WAITS, runs, QUEUED, RUNNING]) == {"e-queued"}
    assert apart([WAITS, replace(runs, batch="r2")]) == set()
    assert apart([WAITS, replace(WAITS, episode_id="e-other")]) == set(), "nobody's window runs"
    assert apart([runs, RUNNING]) == set()


@pytest.mark.parametrize(
    ("lease_ends", "expected"),
    [
        ({"e-running": NOW + 5}, []),
        ({"e-running": NOW}, []),
        ({"e-running": NOW - 0.001}, [Finish("e-running")]),
        ({}, [Finish("e-running")]),
        ({"e-other": NOW + 5}, [Finish("e-running")]),
    ],
)
def test_a_running_row_is_finished_once_its_lease_has_run_out(
    lease_ends: dict[str, float], expected: list[Repair]
) -> None:
    assert actions(replace(CALM, open=[RUNNING], lease_ends=lease_ends)) == expected


@pytest.mark.parametrize(("up_for", "expected"), [(0.0, []), (11.9, []), (12.0, [Finish("e-running")])])
def test_no_lease_is_judged_until_redis_has_been_up_for_one_lease_time(up_for: float, expected: list[Repair]) -> None:
    assert actions(replace(CALM, open=[RUNNING], watched_since=NOW - up_for)) == expected


def test_a_queued_row_has_no_lease_to_lose() -> None:
    assert actions(replace(CALM, open=[QUEUED], lease_ends={QUEUED.episode_id: 1.0})) == []


def test_a_sandbox_of_an_ended_episode_is_settled_even_while_leases_are_not_judged() -> None:
    assert actions(replace(CALM, unsettled=[SANDBOX], watched_since=NOW)) == [Settle(SANDBOX.allocation_id)]


@pytest.mark.parametrize("state", [EpisodeState.QUEUED, EpisodeState.RUNNING])
def test_a_sandbox_of_an_open_episode_is_left_to_its_slot(state: EpisodeState) -> None:
    row = OpenEpisode(SANDBOX.episode_id, state, "e-over-a1")
    view = replace(CALM, open=[row], lease_ends={row.episode_id: NOW + 5}, unsettled=[SANDBOX])
    assert actions(view) == []


def test_everything_that_is_due_is_planned_in_one_round() -> None:
    view = replace(
        CALM, open=[QUEUED, RUNNING], suspected_seconds={QUEUED.job_id: 60}, lease_ends={}, unsettled=[SANDBOX]
    )
    assert actions(view) == [Enqueue("e-queued"), Finish("e-running"), Settle(SANDBOX.allocation_id)]


# queued episodes that nobody wants any more


@pytest.mark.parametrize(("lost", "up_for", "ended"), [(True, 12.0, True), (True, 11.9, False), (False, 500.0, False)])
def test_a_queued_row_of_a_lost_trainer_ends_once_heartbeats_can_be_trusted(
    lost: bool, up_for: float, ended: bool
) -> None:
    row = replace(QUEUED, trainer_id="trainer-1")
    gone = frozenset({"trainer-1" if lost else "trainer-2"})
    expected: list[Repair] = [End("e-queued", Outcome.TRAINER_LOST)] if ended else []
    assert actions(replace(CALM, open=[row], lost_trainers=gone, watched_since=NOW - up_for)) == expected


def test_a_row_that_runs_by_itself_loses_no_trainer() -> None:
    assert QUEUED.trainer_id == ""
    assert actions(replace(CALM, open=[QUEUED], lost_trainers=frozenset({"", "trainer-1"}))) == []


def test_a_cancelled_queued_row_ends_and_a_running_one_is_left_to_its_slot() -> None:
    view = replace(
        CALM,
        open=[replace(QUEUED, cancelled=True), replace(RUNNING, cancelled=True)],
        lease_ends={"e-running": NOW + 5},
        suspected_seconds={QUEUED.job_id: NOW},
        watched_since=NOW,
    )
    assert actions(view) == [End("e-queued", Outcome.CANCELLED)]


# orphans

TAG = "tag-of-ours"


def sandbox(allocation: str = "e-over-a1-policy", tag: str = TAG, sandbox_id: str = "sbx") -> SandboxRow:
    return SandboxRow(sandbox_id, {"farm": tag, "allocation": allocation}, 1.0, vcpus=2, memory_mb=512)


@pytest.mark.parametrize(
    ("state", "named", "orphan"),
    [
        (AllocationState.INTENDED, None, False),
        (AllocationState.UNKNOWN, None, False),
        (AllocationState.CREATED, "sbx", False),
        (AllocationState.UNRESOLVED, "sbx", False),
        (AllocationState.CREATED, "another", True),
        (AllocationState.UNRESOLVED, "another", True),
        (AllocationState.ABSENT, "sbx", True),
        (AllocationState.REFUSED, None, True),
        (AllocationState.EXPIRED, None, True),
    ],
)
def test_a_sandbox_of_ours_is_an_orphan_unless_an_open_allocation_can_be_it(
    state: AllocationState, named: str | None, orphan: bool
) -> None:
    row = SANDBOX.model_copy(update={"state": state, "sandbox_id": named})
    assert is_orphan(sandbox(), TAG, row) is orphan
    assert not is_orphan(sandbox(tag="tag-of-theirs"), TAG, row)


def test_nothing_is_an_orphan_without_our_tag() -> None:
    bare = SandboxRow("sbx", {}, 1.0, vcpus=2, memory_mb=512)
    assert is_orphan(sandbox(), TAG, None)
    assert not is_orphan(sandbox(tag=""), TAG, None)
    assert not is_orphan(bare, TAG, None)
    assert not is_orphan(bare, None, None), "a farm without a tag owns nothing"
    assert is_orphan(SandboxRow("sbx", {"farm": TAG}, 1.0, vcpus=2, memory_mb=512), TAG, None)


def test_only_orphans_of_the_list_are_planned_whatever_else_it_names() -> None:
    newborn = SANDBOX.model_copy(update={"allocation_id": "e-new-a1-policy", "state": AllocationState.INTENDED})
    view = replace(
        CALM,
        farm_tag=TAG,
        unsettled=[newborn],
        open=[replace(RUNNING, episode_id=newborn.episode_id)],
        lease_ends={newborn.episode_id: NOW + 5},
        sandboxes=[sandbox("e-new-a1-policy", sandbox_id="a"), sandbox(tag="other", sandbox_id="b"), sandbox()],
    )
    assert actions(view) == [DeleteOrphan("sbx", "e-over-a1-policy")]


def test_an_orphan_that_was_kept_is_planned_though_the_list_no_longer_names_it() -> None:
    kept = {"sbx": "e-over-a1-policy", "gone": ""}
    view = replace(CALM, farm_tag=TAG, sandboxes=[sandbox()], kept_orphans=kept)
    assert actions(view) == [DeleteOrphan("sbx", "e-over-a1-policy"), DeleteOrphan("gone", "")]
