"""`rollout-farm demo`: the promise of the first screen, kept from any directory; and its own check of that promise."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from deploy.commands.demo import check_demo
from orchestrator.records import Allocation, SettledReceipt
from orchestrator.vocabulary import Phase
from tests.e2e.commands import user

VISIBLE = {"east": 15, "west": 7}


@pytest.fixture(scope="module")
def demo() -> tuple[str, list[dict[str, Any]]]:
    """What a demo printed, run from a directory that has packages of the same names as ours."""
    with user() as someone:
        for name in ("deploy", "orchestrator", "workers", "redis"):
            (someone.home / name).mkdir()
            (someone.home / name / "__init__.py").write_text("raise ImportError('not this one')\n")
        before = sorted(path.name for path in someone.home.iterdir())
        code, process = someone.run(
            "demo",
            REDIS_URL="redis://127.0.0.1:1/0",
            E2B_API_KEY="not a key",
            FARM_E2B_API_URL="http://127.0.0.1:1",
            FARM_TEMPLATE="my-template",
        )
        assert code == 0, process.stderr
        assert sorted(path.name for path in someone.home.iterdir()) == before
        receipts, _ = json.JSONDecoder().raw_decode(process.stdout)
        return process.stdout, receipts


def test_it_prints_receipts_with_everything_it_promises(demo: tuple[str, list[dict[str, Any]]]) -> None:
    printed, receipts = demo
    assert [receipt["reward"] for receipt in receipts] == [0.0, 1.0]
    assert [receipt["outcome"] for receipt in receipts] == ["wrong_answer", "solved"]
    rows = [row for receipt in receipts for row in receipt["allocations"]]
    assert [row["role"] for row in rows] == ["policy", "verifier"] * 2
    assert len({row["sandbox_id"] for row in rows}) == 4
    assert all(row["state"] == "absent" and row["absent_at"] for row in rows)
    for policy, verifier in (rows[:2], rows[2:]):
        assert policy["absent_at"] <= verifier["created_at"]
    for receipt in receipts:
        assert set(receipt["phases"]) == {str(phase) for phase in Phase}
        assert receipt["sizes"]["artifact"] > 0
        assert float(receipt["cost_usd"]) > 0
    assert json.dumps(VISIBLE) in printed


def settled(demo: tuple[str, list[dict[str, Any]]]) -> list[SettledReceipt]:
    """The printed receipts, read back."""
    read = []
    for printed in demo[1]:
        body = {name: value for name, value in printed.items() if name != "cost_usd"}
        rows = tuple(Allocation.model_validate(row) for row in body["allocations"])
        body["allocations"] = [row.allocation_id for row in rows]
        read.append(SettledReceipt.model_validate({"receipt": body, "allocations": rows}))
    return read


Change = Callable[[dict[str, Any], list[dict[str, Any]]], object]
"""Doctors the second receipt and its allocations, as plain data."""

BROKEN: dict[str, tuple[Change, str]] = {
    "a reward": (lambda receipt, rows: receipt.update(outcome="wrong_answer", reward=0.0), "rewards are [0.0, 0.0]"),
    "a score": (lambda receipt, rows: receipt.update(outcome="transport", reward=None), "rewards are [0.0, None]"),
    "a verifier": (lambda receipt, rows: rows.pop(), "not two policies and two verifiers"),
    "its own id": (lambda receipt, rows: rows[1].update(sandbox_id=rows[0]["sandbox_id"]), "not all different"),
    "any id": (lambda receipt, rows: rows[1].update(sandbox_id=None), "not all different"),
    "its absence": (lambda receipt, rows: rows[1].update(absent_at=None, state="unresolved"), "not confirmed absent"),
    "the time of it": (lambda receipt, rows: rows[0].update(absent_at=None), "not confirmed absent"),
    "a duration": (lambda receipt, rows: receipt["phases"].pop("verify"), "no duration for ['verify']"),
    "a size": (lambda receipt, rows: receipt["sizes"].pop("artifact"), "no artifact size"),
    "the order": (
        lambda receipt, rows: rows[0].update(absent_at=rows[1]["created_at"] + 1),
        "was there when its verifier was created",
    ),
}


@pytest.mark.parametrize("promise", BROKEN)
def test_the_check_misses(demo: tuple[str, list[dict[str, Any]]], promise: str) -> None:
    first, second = settled(demo)
    change, problem = BROKEN[promise]
    body, rows = second.receipt.model_dump(), [row.model_dump() for row in second.allocations]
    change(body, rows)
    doctored = SettledReceipt.model_validate({"receipt": body, "allocations": rows})
    problems = check_demo([first, doctored], transcripts(first, doctored), visible=VISIBLE)
    assert any(problem in text for text in problems), problems


def transcripts(*receipts: SettledReceipt, printed: str = json.dumps(VISIBLE)) -> dict[str, list[dict[str, str]]]:
    """What the policies saw."""
    return {row.receipt.episode_id: [{"role": "observation", "text": printed}] for row in receipts}


def test_the_check_has_nothing_to_say_of_a_good_demo(demo: tuple[str, list[dict[str, Any]]]) -> None:
    receipts = settled(demo)
    assert check_demo(receipts, transcripts(*receipts), visible=VISIBLE) == []


@pytest.mark.parametrize("printed", ['{"east": 5, "west": 7}', "Traceback", ""])
def test_the_check_misses_the_repaired_output(demo: tuple[str, list[dict[str, Any]]], printed: str) -> None:
    receipts = settled(demo)
    problems = check_demo(receipts, transcripts(*receipts, printed=printed), visible=VISIBLE)
    assert len(problems) == 1
    assert "the repaired program printed" in problems[0]


def test_the_check_finds_a_demo_without_receipts_wanting() -> None:
    assert check_demo([], {}, visible=VISIBLE)
