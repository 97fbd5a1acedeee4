"""The compact form of a task: a sales report that overwrites repeated regions, with data of one's own.

    {"id": ..., "prompt": ..., "input": CSV, "expected": {region: total},
     "verification": {"input": CSV, "expected": {region: total}}}

Program, command, grader and scripts are always the same; `expected` is what the visible input should give. The two
files lie in /home/user, or in the directory below it where the prompt says that report.py is.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue

from orchestrator.tasks.graders import expectation_problem
from orchestrator.tasks.schema import FileText, Prompt, Task, TaskId

PROGRAM = "/home/user/report.py"
SALES = "/home/user/sales.csv"
COMMAND = f"python3 -B {PROGRAM}"
BUGGY = f"""\
import csv
import json

totals = {{}}
with open("{SALES}", newline="") as sales:
    for row in csv.DictReader(sales):
        totals[row["region"]] = int(row["amount"])
print(json.dumps(totals, sort_keys=True))
"""
REPAIRED = BUGGY.replace('= int(row["amount"])', '= totals.get(row["region"], 0) + int(row["amount"])')


_PROGRAM_IN_PROMPT = re.compile(r"(/home/user(?:/[A-Za-z0-9_-]+)*)/report\.py\b")


def _totals(expected: JsonValue) -> JsonValue:
    if problem := expectation_problem("integer_totals", expected):
        raise ValueError(problem)
    return expected


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be empty")
    return text


_Totals = Annotated[JsonValue, AfterValidator(_totals), Field(repr=False)]
_Csv = Annotated[FileText, AfterValidator(_not_blank)]


class HeldOut(BaseModel):
    """The input that only the verifier sees, and its totals."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    input: _Csv = Field(repr=False)
    expected: _Totals


class CompactTask(BaseModel):
    """A task in the compact form."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    id: TaskId
    prompt: Prompt
    input: _Csv
    expected: _Totals
    verification: HeldOut

    def task(self) -> Task:
        """The same task in the full form."""
        named = _PROGRAM_IN_PROMPT.search(self.prompt)
        directory = named[1] if named else "/home/user"
        program, sales = (f"{directory}{path.removeprefix('/home/user')}" for path in (PROGRAM, SALES))

        def there(text: str) -> str:
            return text.replace(PROGRAM, program).replace(SALES, sales)

        command = there(COMMAND)
        inspect = f"cat {program} {sales}; {command}"
        return Task(
            id=self.id,
            prompt=self.prompt,
            files={program: there(BUGGY), sales: self.input},
            artifact=program,
            command=command,
            verification={sales: self.verification.input},
            grader="integer_totals",
            expected=self.verification.expected,
            visible_expected=self.expected,
            scripts={
                "buggy": (inspect,),
                "repair": (inspect, f"printf %s {shlex.quote(there(REPAIRED))} > {program}", command),
            },
        )


def is_compact(raw: Mapping[str, object]) -> bool:
    """Whether `raw` is meant in the compact form, mistakes in it included."""
    held_out = raw.get("verification")
    looks_compact = "input" in raw or (isinstance(held_out, Mapping) and "expected" in held_out)
    return looks_compact and not raw.keys() & {"files", "artifact", "command", "grader"}
