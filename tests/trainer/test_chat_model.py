"""A model as a policy: sampled as told, each episode by its own seed, within its budgets, or refused with a reason."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.errors import FarmError, SettingsError
from tests.learning.policy import TinyPolicy, tiny_policy, warm_start
from tests.learning.tasks import BUGS, LOOK, PATCHED, seen, task
from trainer.evaluation.chat_model import ChatModel, Conversation, _fingerprint, load_chat_model
from trainer.evaluation.identity import Sampling
from trainer.evaluation.policies import ToolCall
from trainer.evaluation.seeded_sampling import processors
from trainer.evaluation.tools import TOOLS

TASK = task(BUGS[0])


@pytest.fixture(scope="module")
def taught() -> TinyPolicy:
    policy = tiny_policy(0)
    warm_start(policy, seed=0)
    return policy


def chat(policy: TinyPolicy, *, batch: int = 16, **sampling: Any) -> ChatModel:
    return ChatModel(policy.model, policy.tokenizer, Sampling(**sampling), tools=TOOLS, batch=batch)


def played(model: ChatModel, seeds: Sequence[int], turns: int = 4) -> list[Conversation]:
    """Conversations in which every call is answered with the same words."""
    conversations = [model.begin(TASK, seed) for seed in seeds]
    going = list(conversations)
    for _ in range(turns):
        calls = model.respond(going)
        said = [it for it, made in zip(going, calls, strict=True) if made]
        going = [it for it in said if model.observe(it, [("terminal", PATCHED)])]
    return conversations


# sampling


def sampled(logits: list[float], sampling: Sampling, count: int = 4000) -> list[float]:
    """How often each token is the arg max."""
    scores = torch.tensor([logits] * count)
    ids = torch.zeros(count, 1, dtype=torch.long)
    chosen = processors(sampling, range(count))(ids, scores).argmax(-1)
    return (torch.bincount(chosen, minlength=len(logits)) / count).tolist()  # type: ignore[no-any-return, unused-ignore]


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_tokens_come_with_the_probabilities_of_the_model(temperature: float) -> None:
    logits = [2.0, 1.0, 0.0, -1.0]
    expected = torch.softmax(torch.tensor(logits) / temperature, 0).tolist()
    assert sampled(logits, Sampling(temperature=temperature)) == pytest.approx(expected, abs=0.03)  # 4 sigma


def test_top_k_and_top_p_leave_out_the_unlikely() -> None:
    logits = [2.0, 1.0, 0.0, -1.0]
    assert sampled(logits, Sampling(top_k=2))[2:] == [0, 0]
    assert sampled(logits, Sampling(top_p=0.6))[1:] == [0, 0, 0]
    assert sampled([0.0, float("-inf")], Sampling(temperature=100)) == [1, 0]


def test_a_large_vocabulary_is_sampled_alike_whatever_rounding_does() -> None:
    """As another batch's shape rounds: rare tokens too are those of the seed, and come as often as they should."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(32, 150_000, generator=generator) * 3
    rounded = scores + torch.randn(scores.shape, generator=generator) * 1e-6
    ids = torch.zeros(32, 1, dtype=torch.long)
    chosen, again = (processors(Sampling(), range(32))(ids, given).argmax(-1) for given in (scores, rounded))
    assert chosen.tolist() == again.tolist()
    rare = scores < scores.topk(1000).values[:, -1:]
    expected = float((scores.softmax(-1) * rare).sum(-1).mean())
    assert 0.2 < expected < 0.8
    assert float(rare[range(32), chosen].float().mean()) == pytest.approx(expected, abs=0.3)  # 3.4 sigma


def test_a_row_goes_on_drawing_and_never_takes_what_has_no_probability() -> None:
    draws = processors(Sampling(), [1, 2])
    ids, scores = torch.zeros(2, 1, dtype=torch.long), torch.zeros(2, 1000)
    scores[:, ::2] = float("-inf")
    taken = [draws(ids, scores).argmax(-1).tolist() for _ in range(50)]
    assert all(token % 2 for row in taken for token in row)
    assert len({tuple(row) for row in taken}) == 50
    assert [row[0] for row in taken] != [row[1] for row in taken]


def test_temperature_zero_takes_the_likeliest(taught: TinyPolicy) -> None:
    model = chat(taught, temperature=0)
    assert len({tuple(it.ids) for it in played(model, range(5))}) == 1


def test_the_same_seed_says_the_same_in_whatever_batch(taught: TinyPolicy) -> None:
    together = [it.ids for it in played(chat(taught), range(12))]
    assert [it.ids for it in played(chat(taught, batch=1), range(12))] == together
    assert [it.ids for it in reversed(played(chat(taught, batch=5), range(11, -1, -1)))] == together
    assert len({tuple(ids) for ids in together}) > 3


# conversations


def test_calls_are_read_with_their_arguments(taught: TinyPolicy) -> None:
    first = chat(taught, temperature=0).respond([chat(taught).begin(TASK, 0)])
    assert first == [[ToolCall("terminal", {"command": LOOK})]]


def test_what_follows_a_call_is_what_training_puts_there(taught: TinyPolicy) -> None:
    """The whole conversation is what the template renders of it at once."""
    model = chat(taught, temperature=0)
    conversation = model.begin(TASK, 0)
    messages: list[dict[str, Any]] = [{"role": "user", "content": TASK.prompt}]
    for text in (seen(BUGS[0]), PATCHED):
        (call,) = model.respond([conversation])[0]
        assert model.observe(conversation, [(call.name, text)])
        made = {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [made]},
            {"role": "tool", "name": call.name, "content": text},
        ]
    whole = taught.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, add_generation_prompt=True)
    assert conversation.ids == whole


def test_a_system_prompt_comes_first(taught: TinyPolicy) -> None:
    model = ChatModel(taught.model, taught.tokenizer, Sampling(), tools=TOOLS, system_prompt="it fix")
    words = taught.tokenizer.convert_ids_to_tokens(model.begin(TASK, 0).ids)
    assert words == ["<user>", "it", "fix", "<user>", "fix", "it", "<act>"]


def test_the_descriptions_of_the_tools_are_part_of_what_is_compared(taught: TinyPolicy) -> None:
    def submit() -> str:
        """Something else."""
        raise NotImplementedError

    other = ChatModel(taught.model, taught.tokenizer, Sampling(), tools=[submit, TOOLS[1]])
    assert chat(taught).tools_digest == chat(taught).tools_digest != other.tools_digest


# budgets


def test_turns_are_bounded(taught: TinyPolicy) -> None:
    assert max(it.turns for it in played(chat(taught, max_turns=2), range(16))) == 2


def test_tokens_are_bounded_observations_included(taught: TinyPolicy) -> None:
    model = chat(taught, max_completion_tokens=5)
    conversations = played(model, range(16))
    assert max(it.spent() for it in conversations) == 5
    assert not model.observe(conversations[0], [("terminal", PATCHED)])
    untaught = tiny_policy(1)
    untaught.model.generation_config.eos_token_id = untaught.tokenizer.eos_token_id  # it goes on and on
    endless = played(chat(untaught, max_completion_tokens=7), range(16))
    assert all(it.completion_tokens <= 7 for it in endless)
    assert max(it.completion_tokens for it in endless) == 7


def test_a_prompt_that_the_model_cannot_take_is_refused(taught: TinyPolicy) -> None:
    with pytest.raises(FarmError, match="has 302 tokens and the model takes 256"):
        chat(taught).begin(TASK.model_copy(update={"prompt": "fix " * 300}), 0)


def test_every_prompt_that_is_too_long_is_named_before_an_episode_begins(taught: TinyPolicy) -> None:
    tasks = [TASK.model_copy(update={"id": f"t{size}", "prompt": "fix " * size}) for size in (9, 300, 240, 254)]
    with pytest.raises(FarmError, match=r"the 256 tokens that the model takes: t300 has 302, t254 has 256; leave"):
        chat(taught).check(tasks)
    chat(taught).check([tasks[0], tasks[2]])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_conversation_near_the_context_and_a_short_one_are_answered_together(temperature: float) -> None:
    untaught = tiny_policy(1)
    untaught.model.generation_config.eos_token_id = untaught.tokenizer.eos_token_id  # it goes on and on
    untaught.model.generation_config.suppress_tokens = [untaught.tokenizer.eos_token_id]
    model = chat(untaught, max_completion_tokens=60, temperature=temperature)
    tasks = [TASK.model_copy(update={"prompt": "fix " * size}) for size in (9, 240, 30, 245)]
    alone = [model.begin(task, seed) for seed, task in enumerate(tasks)]
    for conversation in alone:
        model.respond([conversation])
    assert [it.completion_tokens for it in alone] == [60, 14, 60, 9]
    together = [model.begin(task, seed) for seed, task in enumerate(tasks)]
    model.respond(together)
    assert [it.ids for it in together] == [it.ids for it in alone]


# loading


def save(policy: TinyPolicy, directory: Path) -> str:
    policy.model.save_pretrained(directory)
    policy.tokenizer.save_pretrained(directory)
    return str(directory)


def test_a_saved_model_is_the_same_policy(taught: TinyPolicy, tmp_path: Path) -> None:
    model, tokenizer, subject = load_chat_model(save(taught, tmp_path), device="cpu")
    loaded = ChatModel(model, tokenizer, Sampling(), tools=TOOLS)
    assert [it.ids for it in played(loaded, range(6))] == [it.ids for it in played(chat(taught), range(6))]
    assert (subject.kind, subject.name, subject.dtype) == ("model", str(tmp_path), "float32")


def test_a_model_is_identified_by_its_contents_and_not_by_what_training_left_beside_them(
    taught: TinyPolicy, tmp_path: Path
) -> None:
    first = load_chat_model(save(taught, tmp_path / "a"), device="cpu")[2]
    (tmp_path / "a" / "optimizer.pt").write_bytes(b"state")
    (tmp_path / "a" / "trainer_state.json").write_text("{}")
    (tmp_path / "a" / "training_args.bin").write_bytes(b"arguments")
    assert load_chat_model(str(tmp_path / "a"), device="cpu")[2] == first
    moved = load_chat_model(save(taught, tmp_path / "b"), device="cpu")[2]
    assert moved.fingerprint == first.fingerprint
    other = load_chat_model(save(tiny_policy(1), tmp_path / "c"), device="cpu")[2]
    assert other.fingerprint != first.fingerprint


@pytest.mark.parametrize(
    "name", ["merges.txt", "special_tokens_map.json", "added_tokens.json", "adapter_config.json", "spiece.model"]
)
def test_each_file_that_decides_how_a_model_answers_identifies_it(
    taught: TinyPolicy, tmp_path: Path, name: str
) -> None:
    place = save(taught, tmp_path)
    first = _fingerprint(place, taught.model)
    (tmp_path / name).write_text("{}")
    second = _fingerprint(place, taught.model)
    (tmp_path / name).write_text("{ }")
    assert len({first, second, _fingerprint(place, taught.model)}) == 3


@pytest.mark.parametrize(
    ("attribute", "value", "said"),
    [
        ("chat_template", None, "cannot show tool calls"),
        ("chat_template", "{% for m in messages %} {{ m.content }}{% endfor %}", "cannot show tool calls"),
        ("response_template", None, "can read tool calls"),
    ],
)
def test_a_model_that_cannot_call_tools_is_refused(tmp_path: Path, attribute: str, value: object, said: str) -> None:
    policy = tiny_policy(0)
    setattr(policy.tokenizer, attribute, value)
    with pytest.raises(SettingsError, match=said):
        load_chat_model(save(policy, tmp_path), device="cpu")


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="give the directory of a Transformers checkpoint"):
        load_chat_model(str(tmp_path), device="cpu")
