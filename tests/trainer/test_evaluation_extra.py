"""Scripts are evaluated, and evaluations compared, without the extra `train`; a model asks for it."""

from __future__ import annotations

from pathlib import Path

from orchestrator.vocabulary import Outcome
from tests.support.evaluations import a_result, an_identity
from tests.trainer.test_extra import run
from trainer.evaluation.results import ResultsFile

HIDDEN = "import sys; sys.modules.update(torch=None, trl=None, transformers=None); import deploy.cli; sys.argv = ['x', "


def test_a_model_without_the_extra_says_what_to_install(tmp_path: Path) -> None:
    arguments = f"'evaluate', 'weekly-sales', '--model', 'm', '--output', {str(tmp_path / 'out')!r}]"
    done = run(f"{HIDDEN}{arguments}; deploy.cli.main()")
    assert done.returncode == 3
    assert "rollout-farm[train]" in done.stderr.replace("\n", "")
    assert not (tmp_path / "out").exists()


def test_evaluations_are_compared_without_the_extra(tmp_path: Path) -> None:
    identity = an_identity(episodes=1)
    with ResultsFile(tmp_path, identity) as file:
        for task in range(2):
            file.add(a_result(identity, task, 0, Outcome.SOLVED))
    done = run(f"{HIDDEN}'compare', {str(tmp_path)!r}, {str(tmp_path)!r}]; deploy.cli.main()")
    assert done.returncode == 0, done.stderr
    assert '"difference"' in done.stdout
    assert "the difference is noise" in done.stdout


def test_a_script_without_the_extra_comes_as_far_as_its_name(tmp_path: Path) -> None:
    arguments = f"'evaluate', 'weekly-sales', '--script', 'nothing', '--output', {str(tmp_path / 'out')!r}]"
    done = run(f"{HIDDEN}{arguments}; deploy.cli.main()")
    assert done.returncode == 7
    assert "it has: buggy, repair" in done.stderr.replace("\n", " ")
