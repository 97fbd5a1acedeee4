"""The results file: one evaluation, one writer, and nothing lost but a line that was cut short."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import FarmError
from orchestrator.vocabulary import Outcome
from tests.support.evaluations import a_result, an_identity
from trainer.evaluation.collection import Planned, plan
from trainer.evaluation.identity import Sampling
from trainer.evaluation.results import RESULTS, Interrupted, ResultsFile, read_evaluation

IDENTITY = an_identity()
SOLVED = a_result(IDENTITY, 0, 0, Outcome.SOLVED)
LOST = a_result(IDENTITY, 1, 0, Outcome.SANDBOX_LOST)


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    with ResultsFile(tmp_path / "new" / "place", IDENTITY) as file:
        file.add(SOLVED)
        file.add(LOST)
        found = read_evaluation(tmp_path / "new" / "place")  # also while it is written
    assert found.identity == IDENTITY
    assert found.results == (SOLVED, LOST)
    assert found.missing() == 2


def test_what_an_interruption_cost_is_kept_once(tmp_path: Path) -> None:
    cut = Interrupted(episode_id=IDENTITY.episode_id(1, 1), cost_picousd=7)
    with ResultsFile(tmp_path, IDENTITY) as file:
        file.add(SOLVED)
        file.add_interrupted(cut)
        file.add_interrupted(cut)
    with ResultsFile(tmp_path, IDENTITY) as file:
        file.add_interrupted(cut)
        file.add(LOST)
    found = read_evaluation(tmp_path)
    assert (found.results, found.interrupted) == ((SOLVED, LOST), (cut,))
    assert found.missing() == 2, "it is no result"
    with (tmp_path / RESULTS).open("a") as stream:
        stream.write(json.dumps({"interrupted": cut.model_dump()}) + "\n")
    with pytest.raises(FarmError, match=r"jsonl:5: is no line of an evaluation .*is there already"):
        read_evaluation(tmp_path)


@pytest.mark.parametrize("line", ['{"interrupted": 3}', '{"interrupted": {"episode_id": "x"}}', '{"interrupted"'])
def test_a_line_that_is_no_interruption_is_refused(tmp_path: Path, line: str) -> None:
    with ResultsFile(tmp_path, IDENTITY) as file:
        file.add(SOLVED)
    with (tmp_path / RESULTS).open("a") as stream:
        stream.write(line + "\n")
    with pytest.raises(FarmError, match=r"jsonl:3: is no line of an evaluation"):
        read_evaluation(tmp_path)


def test_the_same_evaluation_goes_on(tmp_path: Path) -> None:
    with ResultsFile(tmp_path, IDENTITY) as file:
        file.add(SOLVED)
    with ResultsFile(tmp_path, an_identity()) as file:
        assert file.results == [SOLVED]
        file.add(LOST)
    assert read_evaluation(tmp_path / RESULTS).results == (SOLVED, LOST)


@pytest.mark.parametrize("kept", [-1, -20])
def test_a_line_that_was_cut_short_is_dropped(tmp_path: Path, kept: int) -> None:
    with ResultsFile(tmp_path, IDENTITY) as file:
        file.add(SOLVED)
        file.add(LOST)
    path = tmp_path / RESULTS
    path.write_bytes(path.read_bytes()[:kept])
    assert read_evaluation(tmp_path).results == (SOLVED,)
    with ResultsFile(tmp_path, IDENTITY) as file:
        assert file.results == [SOLVED]
        file.add(LOST)
    assert read_evaluation(tmp_path).results == (SOLVED, LOST)


def test_a_file_whose_first_line_was_cut_short_begins_anew(tmp_path: Path) -> None:
    (tmp_path / RESULTS).write_bytes(b'{"identity": {"schema')
    with ResultsFile(tmp_path, IDENTITY) as file:
        assert file.results == []
    assert read_evaluation(tmp_path).identity == IDENTITY


def test_another_evaluation_is_refused_with_what_differs(tmp_path: Path) -> None:
    with ResultsFile(tmp_path, IDENTITY):
        pass
    other = an_identity(
        sampling=Sampling(temperature=0.5), subject=IDENTITY.subject.model_copy(update={"name": "other"}), label="x"
    )
    with pytest.raises(FarmError) as refused:
        ResultsFile(tmp_path, other).__enter__()
    for said in ("sampling.temperature: 1.0 and 0.5", "name: base and other", "label: '' and 'x'", "--output"):
        assert said in str(refused.value)


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    with ResultsFile(tmp_path, IDENTITY):
        with pytest.raises(FarmError, match="another process is writing"):
            ResultsFile(tmp_path, IDENTITY).__enter__()
    with ResultsFile(tmp_path, IDENTITY):
        pass


def test_what_is_no_evaluation_is_said_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(FarmError, match="rollout-farm evaluate"):
        read_evaluation(tmp_path)
    (tmp_path / RESULTS).write_text("")
    with pytest.raises(FarmError, match="is empty"):
        read_evaluation(tmp_path)
    (tmp_path / RESULTS).write_text("hello\n")
    with pytest.raises(FarmError, match=r"jsonl:1: is no line"):
        read_evaluation(tmp_path)
    with ResultsFile(tmp_path / "b", IDENTITY) as file:
        file.add(SOLVED)
    with (tmp_path / "b" / RESULTS).open("a") as stream:
        stream.write("{}\n")
    with pytest.raises(FarmError, match=r"jsonl:3: is no line"):
        read_evaluation(tmp_path / "b")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"reward": 5.0}, "the reward of solved is 1.0, not 5.0"),
        ({"reward": 0.0}, "the reward of solved is 1.0, not 0.0"),
        ({"reward": None}, "the reward of solved is 1.0, not None"),
        ({"reward": float("nan")}, "the reward of solved is 1.0, not nan"),
        ({"outcome": "sandbox_lost"}, "the reward of sandbox_lost is None, not 1.0"),
        ({"outcome": "splendid"}, "outcome: Input should be"),
        ({"task": 7}, "task 7 is none of the evaluation's 2"),
        ({"task": -1}, "task: Input should be greater than or equal to 0"),
        ({"sample": 99}, "sample 99 is none of the 2 of a task"),
        ({"task": 1}, "task 1 is task-1, not task-0"),
        ({"sample": 1}, f"{SOLVED.episode_id} is not the episode of this task, sample and retry"),
        ({"cost_picousd": -5}, "cost_picousd: Input should be"),
        ({"episode_seconds": float("inf")}, "episode_seconds: Input should be a finite number"),
        ({"usage": {"turns": -1}}, "usage.turns: Input should be"),
        ({"usage": {}}, "usage.turns: Field required"),
    ],
)
def test_a_line_that_no_evaluation_writes_is_refused_with_what_is_wrong(
    tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    with ResultsFile(tmp_path, IDENTITY) as file:
        file.add(LOST)
    with (tmp_path / RESULTS).open("a") as stream:
        stream.write(json.dumps(SOLVED.model_dump(mode="json") | changed) + "\n")
    with pytest.raises(FarmError) as refused:
        read_evaluation(tmp_path)
    assert str(refused.value).startswith(f"{tmp_path / RESULTS}:3: is no line of an evaluation ({said}")
    assert "\n" not in str(refused.value)


def test_an_episode_counts_once(tmp_path: Path) -> None:
    again = a_result(IDENTITY, 0, 0, Outcome.SOLVED, retry=1)
    for number, (first, second) in enumerate(((SOLVED, SOLVED), (LOST, LOST), (SOLVED, again))):
        with ResultsFile(tmp_path / str(number), IDENTITY) as file:
            file.add(first)
            file.add(second)
        with pytest.raises(FarmError, match=r"jsonl:3: .*sample 0 has a result already"):
            read_evaluation(tmp_path / str(number))
        with pytest.raises(FarmError, match="has a result already"):
            ResultsFile(tmp_path / str(number), IDENTITY).__enter__()


def test_another_schema_version_is_named(tmp_path: Path) -> None:
    body = IDENTITY.model_dump(mode="json") | {"schema_version": 2, "new": True}
    (tmp_path / RESULTS).write_text(json.dumps({"identity": body}) + "\n")
    with pytest.raises(FarmError, match=r"jsonl:1: was written with schema version 2, and .* reads version 1"):
        read_evaluation(tmp_path)


@pytest.mark.parametrize("line", ["[]", "7", '{"identity": 7}', '{"identity": {}}', "[" * 100_000, "\xff\xfe"])
def test_a_first_line_of_another_kind_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / RESULTS).write_bytes(line.encode("latin-1") + b"\n")
    with pytest.raises(FarmError, match=r"jsonl:1: is no line of an evaluation"):
        read_evaluation(tmp_path)


def test_a_result_that_does_not_fit_on_the_disk_is_an_error_and_spoils_nothing(tmp_path: Path) -> None:
    program = """
import resource, signal, sys
from pathlib import Path
from tests.unit.test_evaluation_results import IDENTITY, SOLVED, ResultsFile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = Path(sys.argv[1])
with ResultsFile(path, IDENTITY) as file:
    size = file.path.stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, size + 20))
    try:
        file.add(SOLVED)
    except OSError as error:
        print(error.strerror, file.path.stat().st_size == size)
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "No space left on device True\n", done.stderr
    with ResultsFile(tmp_path, IDENTITY) as file:
        assert file.results == []


def test_a_directory_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FarmError, match="cannot be written"):
        ResultsFile(tmp_path / "file" / "below", IDENTITY).__enter__()


# what is left to run


def test_the_plan_takes_tasks_in_turn() -> None:
    assert plan(IDENTITY, [], retry_failed=False) == [Planned(t, s, 0) for s in range(2) for t in range(2)]


def test_what_has_a_result_is_not_planned_again() -> None:
    assert plan(IDENTITY, [SOLVED, LOST], retry_failed=False) == [Planned(0, 1, 0), Planned(1, 1, 0)]


def test_failures_are_planned_again_only_when_that_is_asked_for() -> None:
    lost_again = a_result(IDENTITY, 1, 0, Outcome.TRANSPORT, retry=1)
    assert Planned(1, 0, 1) in plan(IDENTITY, [SOLVED, LOST], retry_failed=True)
    assert Planned(1, 0, 2) in plan(IDENTITY, [LOST, lost_again], retry_failed=True)
    made_good = a_result(IDENTITY, 1, 0, Outcome.WRONG_ANSWER, retry=1)
    assert all((it.task, it.sample) != (1, 0) for it in plan(IDENTITY, [LOST, made_good], retry_failed=True))
