"""Every way in which an episode can end by itself, each by really running one."""

from __future__ import annotations

import pytest

from orchestrator.errors import ProviderError
from orchestrator.keys import Keys
from orchestrator.provider import Sandbox
from orchestrator.vocabulary import Outcome, Phase
from tests.support.farm import Field
from tests.support.ground import BUDGETS, KEY
from tests.support.policies import REPORT, candidate, repaired, script, weekly_sales
from workers.sandboxes.provider import E2BProvider
from workers.sandboxes.sandbox import E2BSandbox

pytest_plugins = ["tests.support.farm"]

BOTH = ("policy", "verifier")


def test_a_repaired_report_is_solved_and_its_receipt_tells_everything(field: Field) -> None:
    spec = field.spec(script(candidate(repaired())))
    assert field.run(spec) == "solved"
    settled = field.check_ended(spec.episode_id, Outcome.SOLVED, roles=BOTH)
    receipt = settled.receipt
    assert receipt.reward == 1.0
    assert set(receipt.phases) == {str(phase) for phase in Phase}
    assert all(seconds >= 0 for seconds in receipt.phases.values())
    assert receipt.sizes["artifact"] == len(repaired().encode())
    assert [step.name for step in receipt.operations] == ["reset", "terminal", "submit"]
    assert all(row.cost_picousd and row.running_seconds for row in settled.allocations)
    assert len({row.sandbox_id for row in settled.allocations}) == 2


def test_the_buggy_report_is_a_wrong_answer(field: Field) -> None:
    spec = field.spec(script())
    assert field.run(spec) == "wrong_answer"
    assert field.check_ended(spec.episode_id, Outcome.WRONG_ANSWER, roles=BOTH).receipt.reward == 0.0


FAILING = {
    "exits non-zero": ("raise SystemExit(3)", "exit code 3"),
    "never ends": ("while True: pass", "timed out"),
    "prints no JSON": ("print('nothing')", "invalid output"),
    "prints JSON of another form": ("print('[1]')", "invalid output"),
    "prints more than fits": ("print('7' * 70_000)", "too large"),
    "prints binary": ("import sys; sys.stdout.buffer.write(bytes(range(256)))", "invalid output"),
    "prints a NaN": ("print('{\"east\": NaN}')", "invalid output"),
    "prints nothing": ("", "invalid output"),
}


@pytest.mark.parametrize("case", FAILING)
def test_a_submission_fails_as_a_candidate_when_it(field: Field, case: str) -> None:
    source, detail = FAILING[case]
    spec = field.spec(script(candidate(source)))
    assert field.run(spec) == "candidate_failed"
    receipt = field.check_ended(spec.episode_id, Outcome.CANDIDATE_FAILED, roles=BOTH).receipt
    assert detail in (receipt.detail or "")


NO_REASON_FOR_A_ZERO = {
    "it warns without end": (weekly_sales(), repaired() + "\nimport sys; sys.stderr.write('warning\\n' * 20_000)\n"),
    "its test runner is verbose": (
        weekly_sales(grader="exit_code", expected=None, visible_expected=None, command="seq 20000; exit 0"),
        repaired(),
    ),
    "variables have the names that ours had": (
        weekly_sales(envs={"out": REPORT, "c": "x"}, command='python3 -B "$out"'),
        repaired(),
    ),
    "a locale is missing": (weekly_sales(envs={"LC_ALL": "no_SUCH.UTF-8"}), repaired()),
    "it has a home of its own": (
        weekly_sales(envs={"HOME": "/home/user/w"}, command=f'[ "$HOME" = /home/user/w ] && python3 -B {REPORT}'),
        repaired(),
    ),
}


@pytest.mark.parametrize("case", NO_REASON_FOR_A_ZERO)
def test_a_right_submission_is_solved_though(field: Field, case: str) -> None:
    task, source = NO_REASON_FOR_A_ZERO[case]
    spec = field.spec(script(candidate(source)), task=task)
    assert field.run(spec) == "solved"
    field.check_ended(spec.episode_id, Outcome.SOLVED, roles=BOTH)


def test_a_program_that_was_made_executable_still_is(field: Field) -> None:
    task = weekly_sales(command=REPORT)
    source = "#!/usr/bin/env python3\n" + repaired()
    spec = field.spec(script(candidate(source), f"chmod u+x {REPORT}"), task=task)
    assert field.run(spec) == "solved"
    closed = field.spec(script(candidate(source)), task=task)
    assert field.run(closed) == "candidate_failed"


MISSING = {
    "deleted": f"rm {REPORT}",
    "over 64 KiB": f"head -c 65537 /dev/zero > {REPORT}",
    "a symlink to a large file": f"head -c 1000000 /dev/zero > /tmp/large; ln -sf /tmp/large {REPORT}",
    "a symlink to a secret file": f"ln -sf /etc/shadow {REPORT}",
    "a symlink to itself": f"rm {REPORT}; ln -s {REPORT} {REPORT}",
    "a symlink to a right report": f"{candidate(repaired())}; mv {REPORT} /tmp/r.py; ln -s /tmp/r.py {REPORT}",
    "a directory": f"rm {REPORT}; mkdir {REPORT}",
    "a pipe": f"rm {REPORT}; mkfifo {REPORT}",
    "a device": f"ln -sf /dev/zero {REPORT}",
    "closed to everybody": f"chmod 000 {REPORT}",
    "in a directory that is closed": "chmod 000 /home/user",
    "of a time before all calendars": f"python3 -c \"import os; os.utime('{REPORT}', (-63135596801, -63135596801))\"",
}


@pytest.mark.parametrize("case", MISSING)
def test_the_artifact_is_missing_when_it_is(field: Field, case: str) -> None:
    spec = field.spec(script(MISSING[case]))
    assert field.run(spec) == "artifact_missing"
    field.check_ended(spec.episode_id, Outcome.ARTIFACT_MISSING)


@pytest.mark.parametrize(
    "case", ["ln -s out out", "ln -s /proc/self out", "mkdir out; echo 1 > out/mem; chmod 000 out", "touch out"]
)
def test_an_artifact_in_a_directory_that_is_none_is_missing(field: Field, case: str) -> None:
    """The sandbox's agent answers with errors of its own, or cuts the file off: none of them is ours."""
    task = weekly_sales().model_copy(update={"artifact": "/home/user/out/mem", "command": "cat out/mem"})
    spec = field.spec(script(case), task=task)
    assert field.run(spec) == "artifact_missing"
    field.check_ended(spec.episode_id, Outcome.ARTIFACT_MISSING)


def test_an_artifact_of_exactly_64_kib_is_judged(field: Field) -> None:
    source = repaired() + "#" * (65536 - len(repaired()))
    spec = field.spec(script(candidate(source)))
    assert field.run(spec) == "solved"
    field.check_ended(spec.episode_id, Outcome.SOLVED, roles=BOTH)


def test_a_healthy_episode_that_is_not_submitted_scores_zero(field: Field) -> None:
    spec = field.spec(script(candidate(repaired()), submit=False))
    assert field.run(spec) == "not_submitted"
    field.check_ended(spec.episode_id, Outcome.NOT_SUBMITTED)


def test_an_exhausted_window_scores_zero_and_blocks_later_commands(field: Field) -> None:
    budgets = BUDGETS.model_copy(update={"policy_window_seconds": 0.5})
    spec = field.spec(script("sleep 0.7", "touch /tmp/too-late"), budgets=budgets)
    assert field.run(spec) == "window_exhausted"
    receipt = field.check_ended(spec.episode_id, Outcome.WINDOW_EXHAUSTED).receipt
    assert [step.name for step in receipt.operations] == ["reset", "terminal", "health"]


def test_a_deadline_that_passes_aborts_without_a_score(field: Field) -> None:
    budgets = BUDGETS.model_copy(update={"deadline_seconds": 2.0})
    spec = field.spec(script("sleep 1.2", "sleep 1.2", candidate(repaired())), budgets=budgets)
    assert field.run(spec) == "deadline"
    field.check_ended(spec.episode_id, Outcome.DEADLINE)


def test_a_score_that_comes_after_the_deadline_is_not_given(field: Field) -> None:
    budgets = BUDGETS.model_copy(update={"deadline_seconds": 1.8})
    spec = field.spec(script(candidate("import time; time.sleep(1.9)\n" + repaired())), budgets=budgets)
    assert field.run(spec) == "deadline"
    field.check_ended(spec.episode_id, Outcome.DEADLINE, roles=BOTH)


def test_an_unknown_template_fails_the_setup(field: Field) -> None:
    spec = field.spec(script(), template="nowhere")
    assert field.run(spec) == "setup_failed"
    settled = field.check_ended(spec.episode_id, Outcome.SETUP_FAILED, roles=())
    assert [row.state for row in settled.allocations] == ["refused"]
    assert "nowhere" in (settled.receipt.detail or "")


class FullSandbox(E2BSandbox):
    """Its disk takes no file."""

    def write(self, path: str, data: bytes, *, timeout_seconds: float) -> None:
        raise ProviderError(f"write {path}: no space left")


class FullDisks(E2BProvider):
    """Every sandbox it attaches is full."""

    def attach(self, sandbox_id: str, *, lifetime_seconds: int) -> Sandbox:
        attached = super().attach(sandbox_id, lifetime_seconds=lifetime_seconds)
        assert isinstance(attached, E2BSandbox)
        return FullSandbox(attached._e2b)


def test_a_starter_file_that_the_sandbox_refuses_fails_the_setup(field: Field) -> None:
    spec = field.spec(script())
    assert field.run(spec, provider=FullDisks(KEY, api_url=field.settings.e2b_api_url)) == "setup_failed"
    field.check_ended(spec.episode_id, Outcome.SETUP_FAILED)


def test_an_episode_without_a_permit_ends_in_time_and_allocates_nothing(field: Field) -> None:
    field.farm.redis.hset(Keys.LIMITS, "concurrency", 1)
    field.farm.redis.zadd(Keys.PERMITS, {"e-other": 1})
    spec = field.spec(script(), budgets=BUDGETS.model_copy(update={"admission_seconds": 0.4}))
    assert field.run(spec) == "admission_timeout"
    field.check_ended(spec.episode_id, Outcome.ADMISSION_TIMEOUT, roles=())
    assert field.farm.redis.zrange(Keys.PERMITS, 0, -1) == ["e-other"]


def test_a_command_larger_than_a_message_is_an_observation_and_the_script_goes_on(field: Field) -> None:
    budgets = BUDGETS.model_copy(update={"command_bytes": 2000})
    spec = field.spec(script("echo " + "x" * 3000, candidate(repaired())), budgets=budgets)
    assert field.run(spec) == "solved"
    field.check_ended(spec.episode_id, Outcome.SOLVED, roles=BOTH)


def test_the_same_episode_is_never_run_twice(field: Field) -> None:
    spec = field.spec(script())
    assert field.run(spec) == "wrong_answer"
    before = field.receipt(spec.episode_id)
    assert field.run(spec) == "skipped"
    assert field.receipt(spec.episode_id) == before
    field.check_ended(spec.episode_id, Outcome.WRONG_ANSWER, roles=BOTH)
