"""Who may write into a run's directory, and what is left of one that nothing was written to."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.errors import SettingsError
from trainer.output_directory import OutputDirectory


def test_one_run_at_a_time_and_the_next_one_after_it(tmp_path: Path) -> None:
    with OutputDirectory(tmp_path / "out"):
        with pytest.raises(SettingsError, match="another run is writing there"), OutputDirectory(tmp_path / "out"):
            pass
        (tmp_path / "out" / "metrics.jsonl").touch()
    with OutputDirectory(tmp_path / "out"):
        assert (tmp_path / "out" / "metrics.jsonl").exists()


def test_a_directory_to_which_nothing_was_written_is_gone_again(tmp_path: Path) -> None:
    with OutputDirectory(tmp_path / "out"):
        pass
    assert not (tmp_path / "out").exists()


def test_an_empty_directory_that_was_there_before_stays(tmp_path: Path) -> None:
    with OutputDirectory(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["file", "file/out"])
def test_a_path_that_is_no_directory_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"not a directory.*--output-dir"), OutputDirectory(tmp_path / path):
        pass
