"""Every number of the page's tiles and of its latency table, against what was worked out by hand for a known farm."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from orchestrator.dashboard.lookout import Lookout
from orchestrator.dashboard.panes import Asked, changed
from orchestrator.errors import ConcurrencyLimited, RateLimited
from orchestrator.farm import Farm
from orchestrator.keys import Keys
from orchestrator.limiter import PermitAnswer
from orchestrator.presence import WorkerRow, slot_name
from orchestrator.records import EpisodeSpec
from orchestrator.rows import Lease
from orchestrator.settings import Settings
from orchestrator.unresolved import ORPHANS_DELETED
from orchestrator.vocabulary import Outcome, Phase, Role
from tests.support.bare_farm import a_receipt, a_spec, admit, farm_settings, intended, leased
from tests.support.creators import create

# A second of a sandbox of 2 vCPUs and half a GiB is 2 * 14 + 0.5 * 4.5 = 30.25 millionths of a dollar. The most that an
# episode may cost is 611 s of its policy sandbox and 120 s of its verifier: 731 * 30.25 = 22,112.75 of them.


@dataclass(frozen=True)
class Tile:
    """One tile as it is read; `meter` is how full it is drawn."""

    value: str
    unit: str
    note: str
    meter: str | None
    state: str


@pytest.fixture
def settings(redis_url: str) -> Settings:
    return farm_settings(redis_url, concurrency_limit=4, creation_rate=50)


def tiles(farm: Farm) -> dict[str, Tile]:
    """Every tile by its name."""
    text = str(changed(Lookout(farm), Asked())["tiles"])
    found = re.findall(
        r'<div class="tile ?([a-z]*)"><h3>([^<]*)</h3><p class="number"><b>([^<]*)</b> <span>([^<]*)</span></p>'
        r'(?:<div class="meter"><i style="width:([\d.]+%)"></i></div>)?<p class="note">([^<]*)</p></div>',
        text,
    )
    assert len(found) == text.count("<h3>") == 8
    return {name: Tile(value, unit, note, meter or None, state) for state, name, value, unit, meter, note in found}


def rows(text: str) -> list[list[str]]:
    """The cells of every row that has some, without their markup."""
    cells = (re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", text))
    return [[re.sub(r"<[^>]+>", "", cell) for cell in row] for row in cells if row]


def sandbox(farm: Farm, spec: EpisodeSpec, lease: Lease, role: Role, *, ran_ms: int | None = None) -> str:
    """A sandbox of known size, settled after `ran_ms` or running still; its allocation."""
    create(farm, spec.episode_id, role)
    row = intended(farm, spec, lease, role)
    farm.ledger.allocations.created(row, f"sandbox-{row.allocation_id}", lease.token, creating_ms=10)
    row = farm.ledger.allocations.sized(row, vcpus=2, memory_mb=512).row
    if ran_ms is not None:
        farm.ledger.allocations.absent(row, lease.token, running_ms=ran_ms)
    return row.allocation_id


def end(farm: Farm, outcome: Outcome, phases: dict[str, float], *ran_ms: tuple[Role, int]) -> None:
    """An episode that ends now, with these settled sandboxes."""
    spec, lease = leased(farm)
    admit(farm, spec.episode_id)
    names = tuple(sandbox(farm, spec, lease, role, ran_ms=ms) for role, ms in ran_ms)
    now = farm.ledger.now()
    times = {"queued_at": now - 60, "started_at": now - 50, "finished_at": now}
    farm.ledger.commit(a_receipt(spec, outcome, phases=phases, allocations=names, **times), lease.token)


def run(farm: Farm) -> None:
    """Three ended episodes, one that runs in its sandbox, a reserved batch, and two in the queue."""
    for name, slots in (("worker-a", 3), ("worker-b", 2)):
        row = WorkerRow(name, "here", 1, "running", slots, "http://127.0.0.1:1")
        farm.presence.beat_worker(row, [slot_name(name, number) for number in range(slots)])
    end(farm, Outcome.SOLVED, {Phase.POLICY: 2, Phase.VERIFY: 0.5}, (Role.POLICY, 60_000), (Role.VERIFIER, 20_000))
    end(farm, Outcome.WRONG_ANSWER, {Phase.POLICY: 30, Phase.VERIFY: 0.25})
    end(farm, Outcome.WORKER_LOST, {Phase.POLICY: 1, Phase.VERIFY: 4})
    spec, lease = leased(farm)
    admit(farm, spec.episode_id)
    sandbox(farm, spec, lease, Role.POLICY)
    assert farm.limiter.reserve("batch", 3, life_seconds=60)
    for queued in (a_spec(), a_spec()):
        farm.ledger.open(queued)
        farm.queue.enqueue(queued)
    farm.redis.hincrby(Keys.COUNTERS, ORPHANS_DELETED, 7)


def test_each_tile_says_what_was_worked_out_by_hand(farm: Farm) -> None:
    farm.budget.set("0.075")
    run(farm)
    found = tiles(farm)
    assert found["Sandboxes"] == Tile("1", "of 4 allowed", "1 permit held, 3 reserved", "25.0%", "")
    assert found["Slots"] == Tile("1", "of 5 busy", "2 workers", "20.0%", "")
    assert found["Queue"] == Tile("2", "episodes wait", "3 open episodes, 0 wait for a permit", None, "")
    assert found["Creations"] == Tile(
        "3", "tried, 0 refused", "429 answers: 0 for the rate, 0 for concurrency; at most 50 per second", None, ""
    )
    assert found["Episodes"] == Tile("3", "ended", "2 scored, 1 aborted", None, "")
    assert found["Reward"] == Tile("0.500", "on average", "the newest 2 scored episodes", None, "")
    assert found["Clean-ups"] == Tile("0", "unresolved", "3 sandboxes made, 7 orphans deleted", None, "good")
    # spent: 80 s at 30.25; an hour of one sandbox: 3,600 at 30.25; left: 75,000 - 2,420 - 22,112.75
    note = "$0.1089 an hour now; $0.0221 reserved, $0.0505 left"
    assert found["Spent"] == Tile("$0.002420", "of $0.0750", note, "32.7%", "")


def test_the_meter_of_the_money_is_red_from_four_fifths_on_and_there_is_none_without_a_budget(farm: Farm) -> None:
    run(farm)
    assert tiles(farm)["Spent"] == Tile("$0.002420", "without a budget", "$0.1089 an hour now", None, "")
    for limit, meter, state in (("0.031", "79.1%", ""), ("0.03", "81.8%", "alarmed")):
        farm.budget.set(limit)
        found = tiles(farm)["Spent"]
        assert (found.unit, found.meter, found.state) == (f"of ${float(limit):.4f}", meter, state)


def test_refusals_are_counted_by_kind_and_a_lowered_limit_and_who_waits_are_said(farm: Farm) -> None:
    spec, lease = leased(farm)
    admit(farm, spec.episode_id)
    sandbox(farm, spec, lease, Role.POLICY)
    refused = [leased(farm)[0].episode_id for _ in range(3)]
    for episode in refused:
        admit(farm, episode)
    first, second, third = [create(farm, episode) for episode in refused]
    first.refused(RateLimited("too fast", retry_after_seconds=30))
    second.refused(RateLimited("too fast", retry_after_seconds=30))
    third.refused(ConcurrencyLimited("too many"))
    patient, _ = leased(farm)
    assert farm.limiter.ask(patient.episode_id, reservation_id=None) is PermitAnswer.WAIT
    found = tiles(farm)
    creations = found["Creations"]
    assert (creations.value, creations.unit, creations.state) == ("4", "tried, 3 refused", "alarmed")
    told = re.fullmatch(r"429 answers: 2 for the rate, 1 for concurrency; all pause for ([\d.]+) s", creations.note)
    assert told is not None, creations.note
    assert 0 < float(told[1]) <= 30
    note = "4 permits held, 0 reserved; lowered from 4 after a 429"
    assert found["Sandboxes"] == Tile("1", "of 3 allowed", note, "33.3%", "alarmed")
    assert found["Queue"] == Tile("0", "episodes wait", "5 open episodes, 1 wait for a permit", None, "")


def test_a_clean_up_that_is_not_confirmed_is_counted_in_red(farm: Farm) -> None:
    spec, lease = leased(farm)
    admit(farm, spec.episode_id)
    create(farm, spec.episode_id)
    farm.ledger.allocations.unknown(intended(farm, spec, lease), lease.token, "its answer was lost")
    assert tiles(farm)["Clean-ups"] == Tile("1", "unresolved", "0 sandboxes made, 0 orphans deleted", None, "alarmed")


def test_the_latency_rows_and_the_outcomes_are_those_of_the_receipts(farm: Farm) -> None:
    run(farm)
    text = str(changed(Lookout(farm), Asked())["trends"])
    assert rows(text) == [["policy", "2.0 s", "30.0 s", "3"], ["verify", "500 ms", "4.0 s", "3"]]
    assert re.findall(r"</i>(\w+) <b>(\d+)</b>", text) == [("solved", "1"), ("wrong_answer", "1"), ("worker_lost", "1")]
