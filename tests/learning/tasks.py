"""The task that has to be learnt: a total that is off by one, upwards or downwards, and nothing but a look tells which.

Each repair undoes one of the two bugs and doubles the other, so guessing is right every second time and doing both
never is. Commands are plain shell: an episode costs its sandboxes and hardly anything else.
"""

from __future__ import annotations

from typing import Literal

from orchestrator.tasks import Task, parse_task

Bug = Literal["high", "low"]
BUGS: tuple[Bug, ...] = ("high", "low")

PROMPT = "fix it"
PROGRAM = "/home/user/total.sh"
NUMBERS = "/home/user/numbers"
_WRONG = {"high": "total=$((a+b+1))", "low": "total=$((a+b-1))"}
PATCHED = "patched"

LOOK = f"tail -n 1 {PROGRAM}"
REPAIR: dict[Bug, str] = {
    "high": f"echo 'total=$((total-1))' >> {PROGRAM}; echo {PATCHED}",
    "low": f"echo 'total=$((total+1))' >> {PROGRAM}; echo {PATCHED}",
}


def seen(bug: Bug) -> str:
    """What a look at an untouched program shows."""
    return _WRONG[bug]


def task(bug: Bug) -> Task:
    """The task with one of the bugs; everything else is the same."""
    return parse_task(
        {
            "id": f"off-by-one-{bug}",
            "prompt": PROMPT,
            "files": {PROGRAM: f"read a b < {NUMBERS}\n{_WRONG[bug]}\n", NUMBERS: "3 4\n"},
            "artifact": PROGRAM,
            "command": f". {PROGRAM}; echo $total",
            "verification": {NUMBERS: "20 35\n"},
            "grader": "exact_stdout",
            "expected": "55\n",
            "network": False,
            "scripts": {
                "right": [LOOK, REPAIR[bug]],
                "wrong": [LOOK, *(REPAIR[other] for other in BUGS if other != bug)],
                "both": [*REPAIR.values()],
            },
        }
    )
