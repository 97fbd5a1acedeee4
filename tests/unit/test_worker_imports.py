"""What a worker has imported before its first fork: all that an episode needs, and no web UI."""

from __future__ import annotations

import subprocess
import sys


def imported_by(*modules: str) -> dict[str, bool]:
    """Whether each of some heavy modules is really there in a fresh process that imported these."""
    heavy = ["gradio", "e2b", "openenv.core.env_server", "rq", "uvicorn", "fastmcp", "torch", "trl"]
    code = (
        f"import sys\nfor name in {list(modules)!r}: __import__(name)\n"
        f"print(*[sys.modules.get(name) is not None for name in {heavy!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return dict(zip(heavy, (word == "True" for word in done.stdout.split()), strict=True))


def test_a_worker_has_everything_before_it_forks_and_no_web_ui() -> None:
    found = imported_by("workers.crew", "workers.sandboxes.provider")
    there = {"e2b", "openenv.core.env_server", "rq", "uvicorn", "fastmcp"}
    assert found == {name: name in there for name in found}


def test_an_orchestrator_serves_without_gradio_until_somebody_opens_its_page() -> None:
    assert not imported_by("deploy.commands.orchestrator", "orchestrator.dashboard.site", "deploy.web_server")["gradio"]
