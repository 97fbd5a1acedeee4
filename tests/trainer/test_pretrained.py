"""A checkpoint as it is taken: whole, of numbers, stopping where its template ends a turn, and without a taste."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import trl.chat_template_utils
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from deploy.training_report import NoBars
from orchestrator.errors import FarmError, SettingsError
from orchestrator.pool import Pool
from tests.support.farm import Field
from tests.support.policies import weekly_sales
from tests.support.timed_pool import TimedPool
from tests.support.tiny_policy import SUBMIT, call, grpo_config, make_model, make_tokenizer
from trainer import FarmGRPOTrainer, RemoteEpisodes
from trainer.evaluation.chat_model import ChatModel, load_chat_model
from trainer.evaluation.chat_template import ChatTemplate, load_tokenizer
from trainer.evaluation.identity import Sampling
from trainer.evaluation.policies import ToolCall
from trainer.evaluation.pretrained import generate_plainly, load_whole
from trainer.evaluation.tools import TOOLS
from trainer.training import TrainingPlan, dataset_of, train

LOOK = call("terminal", command="ls")
END, TEXT_END = "<|im_end|>", "<|endoftext|>"
INVENTED = ["<tool_call>", LOOK, "</tool_call>", END, "<|im_start|>user", "<tool_response>", "done", "</tool_response>"]


def save(directory: Path, *, eos: str = END) -> Path:
    tokenizer = make_tokenizer([LOOK, SUBMIT, TEXT_END])
    tokenizer.eos_token = eos
    make_model(tokenizer).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(tmp_path / "model")


def change_weights(directory: Path, change: Any) -> None:
    weights = load_file(directory / "model.safetensors")
    save_file(change(weights), directory / "model.safetensors", metadata={"format": "pt"})


def chat(directory: Path, **sampling: Any) -> ChatModel:
    model, tokenizer, _ = load_chat_model(str(directory), device="cpu")
    return ChatModel(model, tokenizer, Sampling(max_completion_tokens=24, **sampling), tools=TOOLS)


# weights


def test_a_checkpoint_without_some_of_its_tensors_is_refused(farm: Field, model: Path, tmp_path: Path) -> None:
    change_weights(model, lambda weights: {name: it for name, it in weights.items() if "mlp" not in name})
    with pytest.raises(SettingsError, match=r"4 of its tensors are missing, transformer\.h\.0\.mlp"):
        load_chat_model(str(model), device="cpu")
    plan = TrainingPlan(str(model), [weekly_sales()], cpu=True, output_dir=tmp_path / "out")
    with pytest.raises(SettingsError, match="tensors are missing"):
        train(plan, farm.settings, NoBars())
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_tied_weights_are_not_missing(model: Path) -> None:
    assert "lm_head.weight" not in load_file(model / "model.safetensors")
    assert load_whole(AutoModelForCausalLM.from_pretrained, str(model)).lm_head.weight.isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(model: Path, value: float) -> None:
    change_weights(model, lambda weights: {**weights, "transformer.ln_f.bias": torch.full((32,), value)})
    with pytest.raises(SettingsError, match=r"transformer\.ln_f\.bias holds NaN"):
        load_chat_model(str(model), device="cpu")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scores_that_are_no_numbers_end_an_evaluation(model: Path, temperature: float) -> None:
    change_weights(model, lambda weights: {**weights, "transformer.wte.weight": torch.full((9, 32), 3e38)})
    overflowing = chat(model, temperature=temperature)
    with pytest.raises(FarmError, match="scores hold NaN or infinity"):
        overflowing.respond([overflowing.begin(weekly_sales(), 0)])


# generation settings


TASTES: list[dict[str, Any]] = [
    {"no_repeat_ngram_size": 1},
    {"min_new_tokens": 20},
    {"bad_words_ids": [[4], [5], [6], [7]]},
    {"sequence_bias": [[[4], -100.0], [[5], 100.0]]},
    {"max_time": 0.001},
    {"num_beams": 3},
    {"stop_strings": ["done"]},
    {"prompt_lookup_num_tokens": 3},
]


def prefer(directory: Path, taste: dict[str, Any]) -> None:
    file = directory / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **taste}))


@pytest.mark.parametrize("taste", TASTES, ids=lambda taste: next(iter(taste)))
def test_how_a_checkpoint_likes_to_generate_changes_nothing(model: Path, taste: dict[str, Any]) -> None:
    def said() -> list[list[int]]:
        asked = chat(model)
        conversations = [asked.begin(weekly_sales(), seed) for seed in range(3)]
        asked.respond(conversations)
        return [it.ids for it in conversations]

    before = said()
    prefer(model, taste)
    assert said() == before


def test_what_ends_pads_and_is_never_said_stays(model: Path) -> None:
    prefer(model, {"eos_token_id": [1, 6], "suppress_tokens": [2], "temperature": 0.3})
    loaded, tokenizer, _ = load_chat_model(str(model), device="cpu")
    assert generate_plainly(loaded, tokenizer) == [1, 6]
    kept = loaded.generation_config
    assert (kept.eos_token_id, kept.pad_token_id, kept.bos_token_id, kept.suppress_tokens) == ([1, 6], 0, 1, [2])
    assert kept.temperature is None


# the end of a turn


def test_the_templates_end_of_a_turn_becomes_a_stop_token(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = save(tmp_path, eos=TEXT_END)
    loaded, tokenizer, _ = load_chat_model(str(directory), device="cpu")
    end, text_end = tokenizer.convert_tokens_to_ids([END, TEXT_END])
    assert generate_plainly(loaded, tokenizer) == [end, text_end]
    assert loaded.generation_config.eos_token_id == [end, text_end]
    assert "ends a turn with <|im_end|>" in caplog.text
    caplog.clear()
    assert generate_plainly(loaded, tokenizer) == [end, text_end]
    assert not caplog.text


def test_a_turn_is_cut_at_its_templates_end_where_only_the_model_stops_there(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = load_tokenizer(str(model))
    tokenizer.add_special_tokens({"additional_special_tokens": [TEXT_END]})
    tokenizer.chat_template = f"{{% for m in messages %}}{{{{ m.content }}}} {END} {TEXT_END} {{% endfor %}}"
    cut = ChatTemplate(tokenizer).tool_suffix([("terminal", "done")])
    end, text_end = tokenizer.convert_tokens_to_ids([END, TEXT_END])
    assert cut[0] == text_end, "the template writes it after the turn, and no model samples it"
    tokenizer.eos_token = "<unk>"
    loaded = make_model(tokenizer)
    loaded.generation_config.eos_token_id = [tokenizer.eos_token_id, end]
    assert generate_plainly(loaded, tokenizer) == [tokenizer.convert_tokens_to_ids("<unk>"), end]
    assert tokenizer.eos_token == END
    assert ChatTemplate(tokenizer).tool_suffix([("terminal", "done")]) == cut
    assert "taken as its stop token" not in caplog.text


def glm(directory: Path) -> tuple[Any, Any]:
    """A model and a tokenizer whose template begins a result with what ends a call."""
    tokenizer = make_tokenizer([TEXT_END])
    template = Path(trl.chat_template_utils.__file__).with_name("chat_templates") / "glm4moe.jinja"
    tokenizer.chat_template = template.read_text()
    tokenizer.response_template = None
    trl.chat_template_utils.add_response_schema(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|observation|>", "<|assistant|>"]})
    tokenizer.eos_token = TEXT_END
    made = make_model(tokenizer)
    made.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids([TEXT_END, "<|user|>", "<|observation|>"])
    return made, tokenizer


def test_a_stop_that_begins_the_result_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made, tokenizer = glm(tmp_path)
    asked = ChatModel(made, tokenizer, Sampling(max_completion_tokens=64), tools=TOOLS)
    stop, other = tokenizer.convert_tokens_to_ids(["<|observation|>", TEXT_END])
    for last, count in ((stop, 1), (other, 1)):
        conversation = asked.begin(weekly_sales(), 0)
        conversation.ids.append(last)
        assert asked.observe(conversation, [("terminal", "done")])
        assert conversation.ids[conversation.prompt_tokens :].count(stop) == count
    assert not caplog.text
    FarmGRPOTrainer(
        model=made,
        args=grpo_config(tmp_path, batch=2),
        train_dataset=dataset_of([weekly_sales()]),
        processing_class=tokenizer,
        environment_factory=RemoteEpisodes(cast(Pool, TimedPool())),
    )
    assert "<|observation|> ends a call of this model and begins its result" in caplog.text


def test_a_turn_ends_before_the_model_invents_a_result(tmp_path: Path) -> None:
    loaded, tokenizer = inventing(tmp_path)
    asked = ChatModel(loaded, tokenizer, Sampling(temperature=0, max_completion_tokens=64), tools=TOOLS)
    conversation = asked.begin(weekly_sales(), 0)
    assert asked.respond([conversation]) == [[ToolCall("terminal", {"command": "ls"})]]
    assert tokenizer.decode(conversation.ids[conversation.prompt_tokens :]).endswith(END)


def inventing(directory: Path) -> tuple[Any, Any]:
    """A model that goes on after its call, as a base model would, and its tokenizer."""
    model, tokenizer, _ = load_chat_model(str(save(directory, eos=TEXT_END)), device="cpu")
    tokenizer.add_tokens([word for word in INVENTED if word not in tokenizer.get_vocab()])
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    words = [*INVENTED, "<tool_call>", SUBMIT, "</tool_call>", END, TEXT_END]
    prefix = ChatTemplate(tokenizer).prompt([{"role": "user", "content": weekly_sales().prompt}], TOOLS)
    answer = tokenizer.convert_tokens_to_ids(words)
    ids, labels = torch.tensor([[*prefix, *answer]]), torch.tensor([[-100] * len(prefix) + answer])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(150):
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, tokenizer


# training


def sampled(episodes: RemoteEpisodes, model: Any, tokenizer: Any, directory: Path) -> Any:
    """Prompts, completions and masks of one step."""
    trainer = keeping(FarmGRPOTrainer)(
        model=model,
        args=grpo_config(directory, batch=2, max_completion_length=64),
        train_dataset=dataset_of([weekly_sales()]),
        processing_class=tokenizer,
        environment_factory=episodes,
    )
    trainer.train()
    return trainer.generated[:3]


def keeping(base: Any) -> Any:
    def generate(self: Any, prompts: Any) -> Any:
        self.generated = base._generate(self, prompts)
        return self.generated

    return type("Keeping", (base,), {"_generate": generate})


def test_no_made_up_result_is_trained_on(episodes: RemoteEpisodes, tmp_path: Path) -> None:
    loaded, tokenizer = inventing(tmp_path)
    _, completions, masks = sampled(episodes, loaded, tokenizer, tmp_path)
    end = tokenizer.convert_tokens_to_ids(END)
    for ids, mask in zip(completions, masks, strict=True):
        after = [mask[place + 1] for place, token in enumerate(ids[:-1]) if token == end and mask[place]]
        assert after
        assert not any(after)


def test_a_checkpoints_taste_does_not_reach_training(episodes: RemoteEpisodes, model: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(model))
    plain = sampled(episodes, str(model), tokenizer, tmp_path)
    prefer(model, {"num_beams": 2, "min_new_tokens": 30, "stop_strings": ["done"], "bad_words_ids": [[4]]})
    assert sampled(episodes, str(model), tokenizer, tmp_path) == plain


# templates


@pytest.mark.parametrize(
    ("after", "ends"),
    [
        ("<|im_end|>\n", [END]),
        ("<|im_end|><|endoftext|>", [END]),
        ("{{ '<call_end>' if m.tool_calls else '<|im_end|>' }}", [END, "<call_end>"]),
        ("<plain_end>", ["<plain_end>"]),
        ("\n\nHuman:", []),
    ],
)
def test_the_end_of_a_turn_is_read_from_the_template(model: Path, after: str, ends: list[str]) -> None:
    tokenizer = load_tokenizer(str(model))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<call_end>", TEXT_END]})
    tokenizer.add_tokens(["<plain_end>"])
    said = "{{ m.content }}{{ m.tool_calls }}"
    tokenizer.chat_template = f"{{% for m in messages %}}{said}{after}{{% endfor %}}"
    assert ChatTemplate(tokenizer).turn_ends() == ends


def test_a_template_that_takes_arguments_for_text_is_refused_before_an_episode(model: Path) -> None:
    tokenizer = load_tokenizer(str(model))
    tokenizer.chat_template = "{% for m in messages %}{% for it in m.tool_calls %}{{ 'call ' + it.function.arguments }}"
    tokenizer.chat_template += "{% endfor %}{{ m.content }}{% endfor %}"
    with pytest.raises(FarmError, match="cannot render a tool call"):
        ChatTemplate(tokenizer).turn_ends()
