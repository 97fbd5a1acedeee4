"""TRL's GRPOTrainer with the episodes of a batch in parallel; everything else of it stays TRL's.

TRL calls tools, and collects rewards, one row after another: with 8 episodes a generation step takes 8 times as long
as one episode. Two ways lead out. `rollout_func` is public, but it is called with prompts alone, and has to do again
what TRL does well: sampling with the trainer's own settings, parsing, templates that preserve prefixes, truncation,
masks, logprobs, vLLM. The other is one override of the private `_tool_call_loop`, which this is: it starts the pending
calls of all rows when TRL asks for the first, and collects all rewards when TRL's loop has ended, so that TRL's serial
`get_reward` calls find them there. Ids, masks, rewards and logs are TRL's own, token by token. The price is one
private seam: two names of TRL's, and three where it keeps its stop tokens, in `seam_problem`, looked at when a trainer
is made and pinned by a test.

What always holds: a batch has its places reserved before it starts, over all processes in one reservation; what was
aborted is never a zero: it ends the run, or it is masked out and counted; all processes decide the same; when `train`
returns or raises, every episode is closed.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import trl
from transformers.trainer_utils import has_length
from trl import GRPOTrainer
from trl.trainer.utils import create_model_from_path, get_callable_name, is_async_callable

from orchestrator.errors import EpisodeAborted, FarmError
from orchestrator.farm import open_farm
from orchestrator.pool import Reservation
from orchestrator.vocabulary import Outcome
from trainer.answers import accept_any_answer
from trainer.environment import RemoteEpisode, RemoteEpisodes, aborted_outcome
from trainer.evaluation.call_reading import refuse_misread_calls
from trainer.evaluation.chat_template import ChatTemplate
from trainer.evaluation.pretrained import generate_plainly, load_whole
from trainer.groups import SURVIVORS, judge
from trainer.processes import gathered, the_first_does
from trainer.task_order import TaskOrder
from trainer.tool_calls import ToolCalls

logger = logging.getLogger(__name__)

_LOOP = "_tool_call_loop"
_TOOLS = "_sync_tool_dicts"
_STOPS = ("eos_token_ids", "generation_config", "generation_kwargs")
_LOGPS = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps")
_EMPTY_BATCHES = 3
"""Generation batches in a row without any score: no longer an episode's bad luck."""
_ROWS_LOOKED_AT = 16
"""Of a dataset, before training; the rows of one dataset are of one type."""


def seam_problem(base: type[Any] = GRPOTrainer) -> str | None:
    """What is no longer so in TRL that this trainer builds on; None when it is all there."""
    moved = f"TRL {trl.__version__} has moved what parallel rollouts build on"
    advice = "install trl>=1.16,<1.17, or use trl.GRPOTrainer (episodes one after another)"
    loop = getattr(base, _LOOP, None)
    if loop is None:
        return f"{moved}: GRPOTrainer.{_LOOP} is gone; {advice}"
    missing = {"completions"} - set(inspect.signature(loop).parameters)
    if missing:
        return f"{moved}: GRPOTrainer.{_LOOP} has no parameter {sorted(missing)}; {advice}"
    if _TOOLS not in inspect.getsource(loop):
        return f"{moved}: GRPOTrainer.{_LOOP} does not take its tools from {_TOOLS}; {advice}"
    made = inspect.getsource(base.__init__)
    if gone := [name for name in _STOPS if f"self.{name} = " not in made]:
        return f"{moved}: GRPOTrainer does not keep its stop tokens in {gone}; {advice}"
    return None


class FarmGRPOTrainer(GRPOTrainer):  # type: ignore[misc, unused-ignore] # TRL is not checked
    """GRPOTrainer whose `environment_factory` is a RemoteEpisodes.

    Functions in `reward_funcs` add to the episode's own reward; what is excluded has none of either.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *more: Any,
        environment_factory: RemoteEpisodes,
        **options: Any,
    ) -> None:
        if problem := seam_problem():
            raise FarmError(problem)
        if not isinstance(environment_factory, RemoteEpisodes):
            raise FarmError("environment_factory has to be a RemoteEpisodes(pool); other environments: trl.GRPOTrainer")
        for name, dataset in _datasets(train_dataset, eval_dataset):
            _refuse_other_prompts(name, dataset)
        self._episodes = environment_factory
        self._tally: dict[str, Counter[str]] = {"train": Counter(), "eval": Counter()}
        self._empty_batches = 0
        rewards = _without_excluded(reward_funcs, environment_factory)
        given = (_loaded(model, args, options), rewards, args, train_dataset, eval_dataset, *more)
        super().__init__(*given, environment_factory=environment_factory, **options)
        refuse_misread_calls(self._tokenizer, "processing_class")
        accept_any_answer(self._tokenizer)
        self.add_callback(TaskOrder())
        stops = generate_plainly(self.model, self._tokenizer)
        self._stop_at(stops)
        _warn_of_a_stop_said_twice(self._tokenizer, stops)
        logging.getLogger(GRPOTrainer.__module__).addFilter(_not_the_whole_task)

    def train(self, *args: Any, **options: Any) -> Any:
        """TRL's `train`; closes every episode on the way out.

        Raises NeverFits at once for an evaluation whose batches can never be live, not when its turn comes.
        """
        try:
            if (count := self._evaluated_at_once()) > 0:
                the_first_does(lambda: self._episodes.refuse_too_many(count))
            return super().train(*args, **options)
        finally:
            self._episodes.close()

    def _stop_at(self, stops: list[int]) -> None:
        """Have TRL's own sampling and masks end a turn at these tokens; vLLM reads its own from the checkpoint."""
        self.eos_token_ids = stops
        if not self.use_vllm and "eos_token_id" not in (self.args.generation_kwargs or {}):
            self.generation_config.eos_token_id = self.generation_kwargs["eos_token_id"] = stops

    def _evaluated_at_once(self) -> int:
        """The episodes of the largest evaluation batch of all processes; 0 when training evaluates nothing."""
        if self.eval_dataset is None or (self.args.eval_strategy == "no" and not self.args.eval_on_start):
            return 0
        count: int = self.args.eval_batch_size * self.accelerator.num_processes
        sets = list(self.eval_dataset.values()) if isinstance(self.eval_dataset, dict) else [self.eval_dataset]
        if self.accelerator.num_processes > 1 or not all(has_length(it) for it in sets):
            return count  # several processes fill up their last batch
        most: int = max(len(it) for it in sets) * self.num_generations_eval
        return min(count, most)

    def training_step(self, model: Any, inputs: Sequence[Any], num_items_in_batch: Any = None) -> Any:
        """TRL's step; what it generates is one batch of the farm."""
        with self._batch(len(inputs), self.num_generations):
            return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **options: Any) -> Any:
        """TRL's loss without attention to a completion of which nothing counts.

        No loss of its tokens is taken anyway; but a mixture of experts has one of its router's over all that is read.
        """
        if "tool_mask" in inputs:
            mask = inputs["completion_mask"]
            counts = (mask * inputs["tool_mask"]).any(dim=1, keepdim=True)
            inputs = {**inputs, "completion_mask": mask * counts}
            for name in _LOGPS:  # of what was attended to: the ratio of the new ones, of nothing, could be inf
                if inputs.get(name) is not None:
                    inputs[name] = inputs[name].masked_fill(~counts, 0.0)
        return super().compute_loss(model, inputs, *args, **options)

    def prediction_step(self, model: Any, inputs: Sequence[Any], *args: Any, **options: Any) -> Any:
        """TRL's step; what it generates is one batch of the farm."""
        with self._batch(len(inputs), self.num_generations_eval):
            return super().prediction_step(model, inputs, *args, **options)

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """TRL's logs with the farm's counts since the last ones."""
        mode = self._mode()
        prefix = "eval_" if mode == "eval" else ""
        logs.update({prefix + name: value for name, value in self._tally[mode].items()})
        self._tally[mode].clear()
        super().log(logs, *args, **options)

    def _tool_call_loop(self, *args: Any, **options: Any) -> Any:
        loop = super()._tool_call_loop
        completions = inspect.signature(loop).bind(*args, **options).arguments["completions"]
        serial: list[dict[str, Any]] = getattr(self, _TOOLS)
        with self._threads(len(serial)) as executor:
            setattr(self, _TOOLS, ToolCalls(completions, serial, executor).tools)
            try:
                tool_mask, *rest = loop(*args, **options)
            finally:
                setattr(self, _TOOLS, serial)
            list(executor.map(RemoteEpisode._collect, self.environments))
        return self._without_aborted(tool_mask), *rest

    def _without_aborted(self, tool_mask: list[list[int]]) -> list[list[int]]:
        """The masks with those of excluded rows zeroed; raises in all processes alike."""
        environments: list[RemoteEpisode] = self.environments
        mine = [_collected(environment) for environment in environments]
        rows = gathered(mine)
        for _, outcome, problem in rows:
            if problem is not None and outcome is None:
                raise next(filter(_is_fatal, (it._failure for it in environments)), None) or FarmError(problem)
            if problem is not None and outcome is not None and self._episodes.on_abort == "raise":
                raise EpisodeAborted(outcome, f"{problem}; on_abort='exclude' goes on without such episodes")
        mode = self._mode()
        judgement = judge(
            [reward for reward, _, _ in rows],
            [outcome for _, outcome, _ in rows],
            group_size=self.num_generations if mode == "train" else self.num_generations_eval,
            survivors=SURVIVORS if mode == "train" else 1,
        )
        self._tally[mode].update(judgement.counts)
        self._empty_batches = self._empty_batches + 1 if all(judgement.excluded) else 0
        if self._empty_batches == _EMPTY_BATCHES:
            outcome, problem = next((outcome, problem) for _, outcome, problem in rows if outcome is not None)
            raise EpisodeAborted(outcome, f"{problem}; {_EMPTY_BATCHES} batches in a row gave nothing to train on")
        first = self.accelerator.process_index * len(environments)
        excluded = judgement.excluded[first : first + len(environments)]
        for environment, out in zip(environments, excluded, strict=True):
            environment._excluded = out
        return [[0] * len(mask) if out else mask for mask, out in zip(tool_mask, excluded, strict=True)]

    @contextmanager
    def _batch(self, rows: int, group_size: int) -> Iterator[None]:
        first = self.accelerator.process_index * rows
        with self._episodes.batch(rows, group_size=group_size or 1, first_row=first, reserve=self._reserve):
            yield

    def _reserve(self, count: int) -> Reservation:
        """One reservation for the batch of all processes: made by the first, known to all, or refused to all."""
        total = sum(gathered([count]))
        mine: list[Reservation] = []

        def reserve() -> str:
            mine.append(self._episodes.reserve(total))
            return mine[0].reservation_id

        shared = the_first_does(reserve)
        if mine:
            return mine[0]
        return _Shared(shared, total, open_farm(self._episodes.pool.settings).limiter)

    @contextmanager
    def _threads(self, count: int) -> Iterator[ThreadPoolExecutor]:
        """One thread an episode; when the block fails their episodes are cancelled, or they would be waited for."""
        with ExitStack() as ending, ExitStack() as undo:
            executor = ThreadPoolExecutor(max(1, count), thread_name_prefix="episode")
            ending.callback(executor.shutdown, cancel_futures=True)
            undo.callback(self._episodes.cancel)
            yield executor
            undo.pop_all()

    def _mode(self) -> str:
        return "train" if self.model.training else "eval"


_Row = tuple[float | None, Outcome | None, str | None]
"""Reward, how it was aborted, what went wrong: what a process tells the others of one of its rows."""


def _collected(environment: RemoteEpisode) -> _Row:
    failure = environment._failure
    if failure is None:
        return environment._reward, None, None
    episode = environment._episode.episode_id if environment._episode is not None else "no episode"
    detail = failure.detail if isinstance(failure, EpisodeAborted) else str(failure)
    return None, aborted_outcome(environment), f"{detail} ({episode})"


def _loaded(model: Any, args: Any, options: Mapping[str, Any]) -> Any:
    """A model that is given by its name, loaded as TRL does it, and whole; with options of its own TRL loads it."""
    if not isinstance(model, str) or args is None or args.model_init_kwargs or options.get("quantization_config"):
        return model
    several = args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED")
    place = {"device_map": None} if several else {}
    return load_whole(create_model_from_path, model, trust_remote_code=args.trust_remote_code, **place)


def _warn_of_a_stop_said_twice(tokenizer: Any, stops: Sequence[int]) -> None:
    """A template may begin a tool's result with what ends the call; TRL appends it whichever token ended the turn."""
    suffix = ChatTemplate(tokenizer).tool_suffix([("terminal", "")]) if tokenizer.chat_template else []
    if suffix[:1] and suffix[0] in stops:
        logger.warning(
            "%s ends a call of this model and begins its result: in training it stands there twice, never counted in "
            "the loss; in evaluation once",
            tokenizer.convert_ids_to_tokens(suffix[0]),
        )


def _datasets(train: Any, evaluated: Any) -> Iterator[tuple[str, Any]]:
    """Each dataset with its name."""
    yield "train_dataset", train
    if isinstance(evaluated, Mapping):
        yield from ((f"eval_dataset[{name!r}]", dataset) for name, dataset in evaluated.items())
    else:
        yield "eval_dataset", evaluated


def _refuse_other_prompts(name: str, dataset: Any) -> None:
    """Raise FarmError for a prompt that is no chat: TRL would fail over it in mid-batch. A row may have none at all."""
    for place, row in enumerate(itertools.islice(dataset or (), _ROWS_LOOKED_AT)):
        prompt = row.get("prompt", [])
        chat = isinstance(prompt, list) and all(isinstance(it, Mapping) and it.get("role") for it in prompt)
        if not chat or ("prompt" in row and not prompt):
            raise FarmError(
                f"{name}: the prompt of row {place} is no chat ({str(prompt)[:40]!r}); give messages, such as "
                '[{"role": "user", "content": "..."}]'
            )


def _without_excluded(reward_funcs: Any, episodes: RemoteEpisodes) -> list[Any]:
    """The user's reward functions, saying None for a row that is excluded.

    TRL leaves out a row only when all its reward functions say None: any number of theirs would make the missing reward
    of the episode a zero. A reward model cannot say None.
    """
    given = reward_funcs if isinstance(reward_funcs, list) else [] if reward_funcs is None else [reward_funcs]
    if episodes.on_abort == "raise":
        return list(given)
    for func in given:
        if isinstance(func, (str, torch.nn.Module)):
            raise FarmError(
                "reward_funcs: a reward model also scores completions whose episode was lost, so they would count as "
                "zeros; call it from a function, or use on_abort='raise'"
            )
    return [_none_where_excluded(func) for func in given]


def _none_where_excluded(func: Callable[..., Any]) -> Callable[..., Any]:
    def without(environments: Sequence[RemoteEpisode], rewards: Sequence[float | None]) -> list[float | None]:
        out = [environment._excluded or environment._failure is not None for environment in environments]
        if len(rewards) != len(out):
            return list(rewards)  # TRL says what is wrong
        return [None if it_is else reward for it_is, reward in zip(out, rewards, strict=True)]

    if is_async_callable(func):

        @functools.wraps(func)
        async def rewarded(*, environments: Sequence[RemoteEpisode], **given: Any) -> list[float | None]:
            return without(environments, await func(environments=environments, **given))

    else:

        @functools.wraps(func)
        def rewarded(*, environments: Sequence[RemoteEpisode], **given: Any) -> list[float | None]:
            return without(environments, func(environments=environments, **given))

    rewarded.__name__ = get_callable_name(func)  # what TRL's logs call it
    return rewarded


def _not_the_whole_task(record: logging.LogRecord) -> bool:
    """Keep out TRL's warning for a row without reward, which shows the task with what is held out; we count them."""
    return not (isinstance(record.msg, str) and "All reward functions returned None" in record.msg)  # after "[RANK 0]"


def _is_fatal(failure: FarmError | None) -> bool:
    return failure is not None and not isinstance(failure, EpisodeAborted)


class _Shared(Reservation):
    """A reservation that another process made and gives back."""

    def release(self) -> None:
        """Nothing: it is the other process's."""
