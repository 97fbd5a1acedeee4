"""Receipts written out: exact money, flat columns, nothing that steers a terminal or a spreadsheet."""

from __future__ import annotations

import csv
import json
from typing import Any

import pytest

from deploy.receipt_formats import FLAT, csv_lines, full_lines, json_lines, table_lines
from orchestrator.cost import usd_text
from orchestrator.records import Allocation, Operation, SettledReceipt
from orchestrator.vocabulary import AllocationState, Outcome, Role
from tests.support.bare_farm import a_receipt, a_spec


def sandbox(role: Role, cost: int, **changes: Any) -> Allocation:
    given: dict[str, Any] = {
        "allocation_id": f"e-1-a1-{role}",
        "episode_id": "e-1",
        "role": role,
        "state": AllocationState.ABSENT,
        "sandbox_id": f"sbx-{role}",
        "intended_at": 1.0,
        "absent_at": 2.0,
        "running_seconds": 1.25,
        "cost_picousd": cost,
    }
    return Allocation(**{**given, **changes})


def settled(outcome: Outcome = Outcome.SOLVED, **changes: Any) -> SettledReceipt:
    receipt = a_receipt(
        a_spec("e-1", group_id="g-1"),
        outcome,
        group_id="g-1",
        phases={"queue": 0.5, "policy": 3.0},
        operations=(Operation(name="reset", seconds=1.0), Operation(name="terminal", seconds=0.1, exit_code=0)),
        started_at=1.5,
        **changes,
    )
    return SettledReceipt(receipt=receipt, allocations=(sandbox(Role.POLICY, 37_812_500), sandbox(Role.VERIFIER, 7)))


def rows(*receipts: SettledReceipt) -> list[dict[str, str]]:
    return list(csv.DictReader(csv_lines(receipts)))


@pytest.mark.parametrize(
    ("picousd", "text"),
    [
        (0, "0"),
        (7, "0.000000000007"),
        (37_812_507, "0.000037812507"),
        (10**12, "1"),
        (10**24 + 1, "1000000000000.000000000001"),
    ],
)
def test_money_is_plain_decimal_digits(picousd: int, text: str) -> None:
    assert usd_text(picousd) == text


def test_a_csv_record_is_flat_and_exact() -> None:
    [row] = rows(settled())
    assert tuple(row) == FLAT
    assert (row["episode_id"], row["group_id"], row["outcome"], row["scored"]) == ("e-1", "g-1", "solved", "true")
    assert float(row["reward"]) == 1.0
    assert (row["queued_at"], row["started_at"], row["finished_at"], row["total_seconds"]) == (
        "1.0",
        "1.5",
        "2.0",
        "1.0",
    )
    assert (row["queue_seconds"], row["policy_seconds"], row["verify_seconds"]) == ("0.5", "3.0", "")
    assert (row["tool_calls"], row["sandboxes"], row["sandboxes_absent"]) == ("1", "2", "2")
    assert (row["policy_sandbox_seconds"], row["sandbox_seconds"]) == ("1.25", "2.5")
    assert row["policy_cost_usd"] == "0.0000378125"
    assert row["verifier_cost_usd"] == "0.000000000007"
    assert row["cost_usd"] == "0.000037812507"


def test_an_aborted_episode_has_an_empty_reward_and_its_reason() -> None:
    [row] = rows(settled(Outcome.CANCELLED, detail='it said "no",\nand left'))
    assert (row["scored"], row["reward"]) == ("false", "")
    assert row["detail"] == 'it said "no",\\nand left', "one record is one line"


@pytest.mark.parametrize("detail", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1"])
def test_text_is_never_a_formula(detail: str) -> None:
    [row] = rows(settled(Outcome.TRANSPORT, detail=detail))
    assert not row["detail"].startswith(("=", "+", "-", "@"))


def test_a_json_line_is_what_run_prints() -> None:
    [line] = json_lines([settled()])
    body = json.loads(line)
    assert body["cost_usd"] == "0.000037812507"
    assert [row["sandbox_id"] for row in body["allocations"]] == ["sbx-policy", "sbx-verifier"]
    assert body["reward"] == 1.0


def test_a_table_has_a_line_a_receipt_and_no_steering() -> None:
    lines = list(table_lines([settled(), settled(Outcome.SANDBOX_LOST, detail="\x1b[2Jgone\nfor ever")]))
    assert len(lines) == 3
    assert lines[1].split()[2:] == ["e-1", "weekly-sales", "solved", "1.00", "1.00", "0.000038"]
    assert lines[2].endswith("\\x1b[2Jgone\\nfor ever")
    assert lines[0].index("outcome") == lines[1].index("solved")


def test_one_receipt_in_full_names_its_sandboxes_and_shows_the_transcript_harmlessly() -> None:
    entries = [{"role": "terminal", "text": "ls"}, {"role": "observation", "text": "\x1b]0;title\x07a\nb\n"}]
    text = "\n".join(full_lines(settled(), entries))
    assert "sandbox   policy: sbx-policy, absent, ran 1.25 s, 0.0000378125 USD" in text
    assert "outcome   solved, reward 1.0" in text
    assert text.endswith("--- terminal\nls\n--- observation\n\\x1b]0;title\\x07a\nb")
    assert "no transcript" in "\n".join(full_lines(settled(), []))
    assert "---" not in "\n".join(full_lines(settled(), None))
