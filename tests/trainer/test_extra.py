"""What works without the extra `train`, and what is said where it is needed."""

from __future__ import annotations

import subprocess
import sys

from tests.support.processes import ROOT


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


def test_environments_and_commands_load_without_torch_and_trl() -> None:
    code = (
        "import sys; import deploy.command_line, deploy.commands.train, trainer; trainer.RemoteEpisodes;"
        "deploy.command_line.build();"
        "sys.exit(str([name for name in ('torch', 'trl', 'transformers', 'datasets') if name in sys.modules] or 0))"
    )
    done = run(code.replace("or 0)", "or '')"))
    assert done.stderr.strip() == ""


def test_training_without_the_extra_says_what_to_install() -> None:
    hidden = "import sys; sys.modules['trl'] = None; import deploy.cli; sys.argv = ['x', 'train', '--model', 'm'];"
    done = run(hidden + "deploy.cli.main()")
    assert done.returncode == 3
    assert "rollout-farm[train]" in done.stderr.replace("\n", "")
