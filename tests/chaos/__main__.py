"""`python -m tests.chaos`: one or more rounds; prints what was struck and what came of it, exits 1 on a violation."""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
from pathlib import Path

from tests.chaos.plant import Target
from tests.chaos.round import FAULTS, play


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Kill a farm piece by piece.")
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=None, help="of the first round; random by default")
    parser.add_argument("--rest", type=float, nargs=2, default=(0.5, 4.0), help="least and most seconds between blows")
    parser.add_argument("--faults", action="store_true", help="let the sandbox service refuse, lose and lag meanwhile")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else secrets.randbelow(1_000_000)
    failed = 0
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
            outcome = play(
                Path(directory),
                seed=seed + number,
                episodes=options.episodes,
                workers=options.workers,
                rest_seconds=tuple(options.rest),
                faults=FAULTS if options.faults else {},
            )
        receipts, solved = sum(outcome.outcomes.values()), outcome.outcomes["solved"]
        print(f"seed {outcome.seed}: {receipts} receipts, {solved} solved, in {outcome.seconds:.0f} s")
        fell = [f"{kind} {outcome.blows[kind]}" for kind in Target]
        print(f"  blows that fell: {', '.join(fell)}; starts: {outcome.restarts}")
        print(f"  sandboxes: {outcome.sandboxes}")
        print(f"  outcomes: {dict(outcome.outcomes)}")
        print(*(f"  VIOLATED: {problem}" for problem in outcome.violations), sep="\n")
        failed += bool(outcome.violations)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
