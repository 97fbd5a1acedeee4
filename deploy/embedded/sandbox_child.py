"""The process that LocalSandboxes starts: reads its order from standard input, serves, ends when that input ends."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

from deploy.embedded.tether import tether
from orchestrator.errors import SettingsError


def main() -> None:
    """Serve until SIGTERM, the end of standard input, or the parent's death."""
    order = json.loads(sys.stdin.readline())
    tether(order["parent"])
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints goes to the log, not into our answer

    from workers.e2b_local.capability import JailUnavailable
    from workers.e2b_local.service import RootInUse, ServiceConfig, serve

    def ready(url: str) -> None:
        os.write(answers, json.dumps({"url": url}).encode() + b"\n")
        threading.Thread(target=_follow_input, name="input", daemon=True).start()

    config = ServiceConfig(api_key=order["api_key"], root=Path(order["root"]), port=order["port"])
    try:
        serve(config, ready=ready)
    except SettingsError as problem:
        os.write(answers, json.dumps({"refused": str(problem)}).encode() + b"\n")
        sys.exit(str(problem))
    except (JailUnavailable, RootInUse) as problem:
        sys.exit(str(problem))


def _follow_input() -> None:
    while os.read(0, 4096):  # not sys.stdin: its lock, held by this thread, would abort the exit
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
