"""One training run, from a plan to a checkpoint: GRPO on the farm's episodes with TRL.

What always holds: what is wrong with the plan is said before an episode starts; a run never mixes its files with an
earlier one's unless it resumes it; however the run ends, its episodes are closed and what it had written is there.

Under `accelerate launch` or `torchrun` every process calls `train`: the run is one, each process drives its own
episodes, and the first one writes the files.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
from datasets import Dataset
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedTokenizerBase, PrinterCallback, TrainerCallback, set_seed
from transformers.utils.logging import disable_progress_bar
from trl import GRPOConfig

from orchestrator.errors import SettingsError
from orchestrator.pool import Pool
from orchestrator.records import SettledReceipt
from orchestrator.settings import Settings
from orchestrator.tasks import Task
from trainer.divergence import Divergence
from trainer.environment import OnAbort, RemoteEpisodes
from trainer.evaluation.chat_template import ChatTemplate, cannot_load, load_tokenizer
from trainer.evaluation.context import context_of, refuse_long_prompts
from trainer.evaluation.tools import TOOLS
from trainer.grpo import FarmGRPOTrainer
from trainer.kept_plan import PLAN, KeptPlan, Options, identities, keep_plan, kept_plan, lasting_names
from trainer.output_directory import OutputDirectory
from trainer.processes import the_first_does
from trainer.run_log import MetricsLog, ReceiptLog, lines_until, take_back
from trainer.saved_states import damage, refuse_another_model, saved_states, step_of
from trainer.schedule import Schedule

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
RECEIPTS = "receipts.jsonl"
MODEL = "checkpoint"


@dataclass(frozen=True)
class TrainingPlan:
    """What to train on what, and how; the defaults show the wiring in one step."""

    model: str
    """A directory with a Transformers checkpoint, or a model id."""
    tasks: Sequence[Task]
    max_steps: int = 1
    completions: int = 2
    """Of one prompt: a group."""
    batch_size: int = 2
    """Completions of one step in one process."""
    max_completion_length: int = 512
    """Tokens, tool results included."""
    learning_rate: float = 1e-6
    on_abort: OnAbort = "raise"
    cpu: bool = False
    output_dir: Path = Path("training-output")
    save_steps: int = 50
    """Steps between two states that can be resumed; the last one is always kept."""
    seed: int = 42
    resume: bool = False
    task_names: Sequence[str] = ()
    """Files and built-in names that the tasks were read from: where `--resume` looks for them."""


@dataclass(frozen=True)
class TrainingResult:
    """What came of it; metrics and receipts in the first process only."""

    run_id: str
    main: bool
    """Whether this is the first process."""
    steps: int
    checkpoint: Path
    metrics: dict[str, float | None]
    """Counts of the whole run, of every other number the newest."""
    receipts: list[SettledReceipt]


class _Check(TrainerCallback):  # type: ignore[misc, unused-ignore] # transformers is not checked
    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A step is about to need the farm."""
        self._check()


class _Begun(TrainerCallback):  # type: ignore[misc, unused-ignore] # transformers is not checked
    """Whether the trainer is past loading the state."""

    def __init__(self) -> None:
        self.yet = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The state is loaded."""
        self.yet = True


class Watcher(Protocol):
    """Who is told how far it is."""

    def started(self, *, step: int, steps: int, episodes: int) -> None:
        """Before the first step: the step it starts from, the last one, and how many episodes are to come."""

    def stepped(self, step: int) -> None:
        """The optimizer made a step."""

    def ended(self, settled: SettledReceipt) -> None:
        """An episode ended. Called from another thread."""


def train(
    plan: TrainingPlan, settings: Settings, watcher: Watcher, *, check: Callable[[], None] | None = None
) -> TrainingResult:
    """Run the plan on the farm of these settings; `check` is called before each step, and ends the run by raising.

    Raises SettingsError for a plan that cannot be, CapacityError for a batch that can never be live, EpisodeAborted
    when an episode ended without a score and the plan says `raise`.
    """
    disable_progress_bar()  # bars are the watcher's
    args = _config(plan)
    main = args.process_index == 0
    with _held(plan.output_dir):
        state = checkpoint_of(plan)
        tokenizer = tokenizer_of(plan, warn=main)
        with (
            Pool(settings, run_id=the_first_does(lambda: f"run-{secrets.token_hex(5)}")) as pool,
            RemoteEpisodes(pool, on_abort=plan.on_abort) as episodes,
        ):
            the_first_does(
                lambda: episodes.reserve(args.generation_batch_size).release()
            )  # refused before a model is loaded
            set_seed(plan.seed)
            metrics = MetricsLog(plan.output_dir / METRICS, watcher.stepped)
            trainer = _trainer(plan, args, tokenizer, episodes, metrics)
            if check is not None:
                trainer.add_callback(_Check(check))
            return _trained(plan, trainer, pool, metrics, watcher, state)


def _trained(
    plan: TrainingPlan,
    trainer: FarmGRPOTrainer,
    pool: Pool,
    metrics: MetricsLog,
    watcher: Watcher,
    state: str | None,
) -> TrainingResult:
    """Train from this state, or from the beginning, with the run's files in the first process."""
    args, begun, model = trainer.args, step_of(state), plan.output_dir / MODEL
    main = args.process_index == 0
    if main:
        _keep(plan, args.world_size)
    watcher.started(step=begun, steps=plan.max_steps, episodes=(plan.max_steps - begun) * args.generation_batch_size)
    if not main:
        _train_from(state, trainer)
        trainer.save_model(str(model))
        return TrainingResult(pool.run_id, main, trainer.state.global_step, model, {}, [])
    take_back(plan.output_dir / METRICS, after_step=begun)
    metrics.read_back()
    take_back(plan.output_dir / RECEIPTS)
    with ReceiptLog(pool, plan.output_dir / RECEIPTS, watcher.ended) as log:
        _train_from(state, trainer)
        trainer.save_model(str(model))  # the model outlives a receipt that cannot be written
    return TrainingResult(pool.run_id, main, trainer.state.global_step, model, metrics.summary, log.receipts())


@contextmanager
def _held(directory: Path) -> Iterator[None]:
    """The output directory is this run's: taken by the first process, or refused to all."""
    held = OutputDirectory(directory)

    def hold() -> None:
        held.__enter__()

    the_first_does(hold)
    try:
        yield
    finally:
        held.close()


def checkpoint_of(plan: TrainingPlan) -> str | None:
    """The newest state that is whole, None for a fresh run.

    Raises SettingsError when the output directory holds another run, or nothing that this plan could go on with.
    """
    directory = plan.output_dir
    if directory.exists() and not directory.is_dir():
        raise SettingsError(f"{directory} is not a directory; choose another --output-dir")
    states = saved_states(directory)
    if not plan.resume:
        if states:
            raise SettingsError(
                f"{directory} holds a run of {step_of(states[-1])} steps: go on with --resume, or choose another "
                "--output-dir"
            )
        if any((directory / name).exists() for name in (METRICS, RECEIPTS)):
            raise SettingsError(
                f"{directory} holds what a run wrote that ended before it saved a state: remove it, or choose another "
                "--output-dir (a smaller --save-steps saves sooner)"
            )
        return None
    damaged: list[str] = []
    for state in reversed(states):
        if (what := damage(state)) is None:
            break
        damaged.append(f"{state.name}: {what}")
    else:
        why = f" ({'; '.join(damaged)})" if damaged else ""
        raise SettingsError(
            f"nothing to resume in {directory}: no state there is whole{why}; choose another --output-dir"
        )
    if step_of(state) >= plan.max_steps:
        raise SettingsError(f"the run in {directory} has made {step_of(state)} steps: give a larger --max-steps")
    if (kept := kept_plan(directory)) is not None:
        kept.refuse_other(Options.of(vars(plan)), plan.tasks)
    refuse_another_model(state, plan.model)
    lines_until(directory / METRICS, step_of(state))
    if damaged:
        logger.warning("going on from %s; later states are not whole: %s", state, "; ".join(damaged))
    return str(state)


def tokenizer_of(plan: TrainingPlan, *, warn: bool = False) -> PreTrainedTokenizerBase:
    """The model's tokenizer. Nothing of the farm is needed for it.

    Raises SettingsError for a model that cannot be trained here, FarmError for prompts that leave no room to answer;
    can warn of those whose completions may not fit.
    """
    tokenizer = load_tokenizer(plan.model)
    try:
        context = context_of(AutoConfig.from_pretrained(plan.model))
    except (OSError, ValueError, KeyError) as error:
        raise cannot_load(plan.model, error) from None
    template = ChatTemplate(tokenizer)
    sizes = {task.id: len(template.prompt([{"role": "user", "content": task.prompt}], TOOLS)) for task in plan.tasks}
    refuse_long_prompts(sizes, context)
    if warn and (tight := sum(size + plan.max_completion_length > context for size in sizes.values())):
        logger.warning(
            "the prompts of %s tasks, of up to %s tokens, and --max-completion-length %s are more than the %s tokens "
            "that the model takes: what goes beyond is of no worth, or ends the run; give at most %s",
            tight,
            max(sizes.values()),
            plan.max_completion_length,
            context,
            context - max(sizes.values()),
        )
    return tokenizer


def _keep(plan: TrainingPlan, processes: int) -> None:
    """Write the plan down for the next --resume; say what is no longer as the run's last one said."""
    options, kept = Options.of(vars(plan)), kept_plan(plan.output_dir) if plan.resume else None
    if plan.resume and kept is None:
        logger.warning("%s has no %s: what is not given now is not as it was, but the default", plan.output_dir, PLAN)
    for change in kept.changes(options, processes) if kept else []:
        logger.warning("%s", change)
    names = lasting_names(plan.task_names) or (kept.task_names if kept else ())
    keep_plan(
        plan.output_dir,
        KeptPlan(options=options, processes=processes, tasks=identities(plan.tasks), task_names=names),
    )


def _train_from(state: str | None, trainer: FarmGRPOTrainer) -> None:
    """Train; raises SettingsError for a state that cannot be loaded, whose files looked whole."""
    begun = _Begun()
    trainer.add_callback(begun)
    try:
        trainer.train(resume_from_checkpoint=state)
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError, UnpicklingError) as error:
        if state is None or begun.yet:
            raise
        raise SettingsError(
            f"{state}: cannot be loaded ({str(error).splitlines()[0]}); move it away to go on from an earlier one, or "
            "choose another --output-dir"
        ) from error


def dataset_of(tasks: Sequence[Task], *, at_least: int = 1) -> Any:
    """The dataset that TRL trains on, one row a task: `prompt` (chat messages) and `task` (JSON text).

    Repeated until it has `at_least` rows: TRL drops a batch that it cannot fill.
    """
    rows = [
        {"prompt": [{"role": "user", "content": task.prompt}], "task": task.model_dump_json()}
        for task in list(tasks) * math.ceil(at_least / len(tasks))
    ]
    return Dataset.from_list(rows)


def _config(plan: TrainingPlan) -> Any:
    if not plan.cpu and not torch.accelerator.is_available():
        raise SettingsError("torch sees no GPU; add --cpu to train on the processor")
    try:
        return GRPOConfig(
            output_dir=str(plan.output_dir),
            per_device_train_batch_size=plan.batch_size,
            num_generations=plan.completions,
            max_completion_length=plan.max_completion_length,
            max_steps=plan.max_steps,
            learning_rate=plan.learning_rate,
            use_cpu=plan.cpu,
            bf16=not plan.cpu,
            save_strategy="steps",
            save_steps=plan.save_steps,
            save_total_limit=2,
            logging_steps=1,
            logging_nan_inf_filter=False,  # it shows a loss that is no number as 0
            report_to="none",
            disable_tqdm=True,
            seed=plan.seed,
        )
    except ValueError as error:
        raise SettingsError(f"these options do not fit each other: {error}") from None


def _trainer(
    plan: TrainingPlan, args: Any, tokenizer: Any, episodes: RemoteEpisodes, metrics: MetricsLog
) -> FarmGRPOTrainer:
    try:
        trainer = FarmGRPOTrainer(
            model=plan.model,
            args=args,
            train_dataset=dataset_of(plan.tasks, at_least=args.generation_batch_size // plan.completions),
            processing_class=tokenizer,
            environment_factory=episodes,
            callbacks=[metrics, Schedule(), Divergence()],
        )
    except (OSError, ValueError) as error:
        raise SettingsError(f"--model {plan.model}: cannot be trained ({str(error).splitlines()[0]})") from error
    trainer.remove_callback(PrinterCallback)  # it prints to standard output
    return trainer
