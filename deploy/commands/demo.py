"""`rollout-farm demo`: the first two episodes, on a machine that has nothing, with every claim checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from deploy.commands.examples import examples

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orchestrator.records import SettledReceipt
    from orchestrator.settings import Settings

_HEEDED = ("budgets", "log_level")
"""The settings that the demo takes from the user: tighter budgets are a way to see it fail."""

_ELSEWHERE = (
    "the demo uses nothing but this machine; with E2B_API_KEY set, and REDIS_URL where this is no Linux, the same "
    "episodes run there: rollout-farm run weekly-sales --episodes 2"
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=examples("rollout-farm demo"))(demo)


def demo() -> None:
    """Run two scripted repair episodes on an embedded stack with two workers; print receipts and a summary.

    The first submits a buggy report and earns 0.0, the second repairs it and earns 1.0. Exits 1, saying why, when
    anything is not as it should be. Of all settings it heeds FARM_BUDGETS__... and FARM_LOG_LEVEL only: what a farm of
    yours needs, such as REDIS_URL and E2B_API_KEY, is not used.
    """
    import contextlib
    import json

    from deploy.commands.resolve import stop_as_ctrl_c_does
    from deploy.exit_codes import ExitCode
    from deploy.local_farm import LocalFarm
    from deploy.rollouts import run_scripted, summary
    from deploy.terminal import errors, output, print_error
    from orchestrator.errors import ProviderError, RedisUnavailable, SettingsError
    from orchestrator.pool import Pool
    from orchestrator.tasks import load_builtin
    from orchestrator.transcripts import read_transcript

    stop_as_ctrl_c_does()
    task = load_builtin("weekly-sales")
    settings = demo_settings()
    errors().print("starting Redis, the sandbox service, an orchestrator and two workers (four slots) ...")
    with contextlib.ExitStack() as stack:
        try:
            farm = stack.enter_context(LocalFarm(settings, workers=2, temporary=True))
        except (SettingsError, RedisUnavailable, ProviderError) as error:
            raise type(error)(f"{error}\n{_ELSEWHERE}") from None
        pool = stack.enter_context(Pool(farm.settings))
        found = {
            settled.receipt.episode_id: settled
            for settled in run_scripted(pool, [task], episodes=2, script=None, check=farm.check)
        }
        receipts = [found[episode] for episode in pool.submitted]
        seen = {
            settled.receipt.episode_id: read_transcript(pool.redis, settled.receipt.episode_id) for settled in receipts
        }
    typer.echo(json.dumps([settled.as_json() for settled in receipts], indent=2))
    output().print(summary(receipts), soft_wrap=False)
    problems = check_demo(receipts, seen, visible=task.visible_expected)
    for problem in problems:
        print_error(problem)
    if problems:
        raise typer.Exit(ExitCode.FAILED)
    visible = last_observation(seen[receipts[1].receipt.episode_id])
    output().print(
        f"rewards {[settled.receipt.reward for settled in receipts]}; the repaired program prints {visible} on the "
        "visible data;\nfour sandboxes were created and each is confirmed absent. Everything this started has stopped.",
        markup=False,
    )


def demo_settings() -> Settings:
    """The defaults, but for what is heeded; the values of all other variables are not even looked at."""
    from orchestrator.settings import Settings, load_settings

    fields = Settings.model_fields.items()
    return load_settings(**{name: field.get_default() for name, field in fields if name not in _HEEDED})


def last_observation(transcript: Sequence[Mapping[str, str]]) -> str:
    """What the last command printed."""
    texts = [entry["text"] for entry in transcript if entry["role"] == "observation"]
    return texts[-1].strip() if texts else ""


def check_demo(
    receipts: Sequence[SettledReceipt], transcripts: Mapping[str, Sequence[Mapping[str, str]]], *, visible: object
) -> list[str]:
    """Everything that the demo promises and these receipts do not show."""
    import json

    from orchestrator.vocabulary import Phase

    problems = []
    rewards = [settled.receipt.reward for settled in receipts]
    if rewards != [0.0, 1.0]:
        reasons = "; ".join(f"{settled.receipt.outcome}: {settled.receipt.detail}" for settled in receipts)
        problems.append(f"rewards are {rewards}, not [0.0, 1.0] ({reasons})")
    printed = last_observation(transcripts[receipts[-1].receipt.episode_id]) if receipts else ""
    try:
        shown = json.loads(printed)
    except ValueError:
        shown = None
    if shown != visible:
        problems.append(f"the repaired program printed {printed!r}, not {json.dumps(visible)}")
    rows = [row for settled in receipts for row in settled.allocations]
    roles = sorted(str(row.role) for row in rows)
    if roles != ["policy", "policy", "verifier", "verifier"]:
        problems.append(f"sandboxes were {roles}, not two policies and two verifiers")
    ids = {row.sandbox_id for row in rows}
    if len(ids) != len(rows) or None in ids:
        problems.append(f"sandbox ids are not all different: {sorted(map(str, ids))}")
    problems += [f"{row.allocation_id} is {row.state}, not confirmed absent" for row in rows if row.absent_at is None]
    for settled in receipts:
        receipt = settled.receipt
        by_role = {str(row.role): row for row in settled.allocations}
        policy, verifier = by_role.get("policy"), by_role.get("verifier")
        if policy and verifier and (policy.absent_at or 0.0) > (verifier.created_at or 0.0):
            problems.append(f"{receipt.episode_id}: the policy sandbox was there when its verifier was created")
        missing = {str(phase) for phase in Phase} - set(receipt.phases)
        if missing:
            problems.append(f"{receipt.episode_id}: no duration for {sorted(missing)}")
        if not receipt.sizes.get("artifact"):
            problems.append(f"{receipt.episode_id}: no artifact size")
    return problems
