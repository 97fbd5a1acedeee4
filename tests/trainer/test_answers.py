"""Whatever a model writes is a call, a wrong call or no call: read as TRL reads it, and in a whole training step."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
from trl.chat_template_utils import parse_response

from orchestrator.pool import Pool
from tests.support.policies import weekly_sales
from tests.support.timed_pool import TimedPool
from tests.support.tiny_policy import (
    SUBMIT,
    grpo_config,
    make_model,
    make_tokenizer,
    rows,
    scripted,
    shell,
    turn_ids,
)
from trainer import FarmGRPOTrainer, RemoteEpisodes
from trainer.answers import accept_any_answer
from trainer.environment import RemoteEpisode
from trainer.evaluation.chat_model import ChatModel
from trainer.evaluation.collection import _wrong
from trainer.evaluation.identity import Sampling
from trainer.evaluation.policies import ToolCall
from trainer.evaluation.tools import TOOLS
from trainer.session_tools import wrong_call
from trainer.tool_calls import ToolCalls


def written(arguments: str) -> str:
    """A call of terminal with these arguments, as text."""
    return '{"name":"terminal","arguments":' + arguments + "}"


LS = {"command": "ls"}
DEEP = written('{"command":' + "[" * 5000 + "]" * 5000 + "}")
DEEP_TEXT = written(json.dumps('{"a":' * 3000))
AS_TEXT = written(json.dumps(json.dumps(LS, separators=(",", ":"))))
ANSWERS: list[tuple[str, Any]] = [
    (written('{"command":"ls"}'), LS),
    (AS_TEXT, LS),
    (written('"ls"'), "ls"),
    (written('["ls"]'), ["ls"]),
    (written('"[1]"'), "[1]"),
    (written("7"), 7),
    (written("null"), {}),
    (DEEP, None),
    (DEEP_TEXT, None),
    ('{"name":["terminal"],"arguments":{}}', None),
    ('{"name":"\\ud800"}', None),
    ('{"name":"\\ud800","arguments":{}}', None),  # half a character: no template could show it to the model again
]


def respond(tokenizer: Any, word: str) -> list[ToolCall]:
    """What an evaluation makes of a model that writes this."""
    chat = ChatModel(make_model(tokenizer), tokenizer, Sampling(), tools=TOOLS)
    return chat._take(chat.begin(weekly_sales(prompt="fix"), 0), turn_ids(tokenizer, [word]))


@pytest.mark.parametrize(("word", "arguments"), ANSWERS, ids=[word[:48] for word, _ in ANSWERS])
def test_an_answer_is_a_call_or_none(word: str, arguments: Any) -> None:
    expected = [] if arguments is None else [ToolCall("terminal", arguments)]
    assert respond(make_tokenizer([word]), word) == expected


@pytest.mark.parametrize("arguments", ['"ls"', '["ls"]', "7", "null", '"[1]"'])
def test_a_harness_session_is_given_an_object_whatever_was_written(arguments: str) -> None:
    """OpenEnv's adapter makes a dict of it before the session sees it; what it cannot, it loses with the rollout."""
    word = written(arguments)
    tokenizer = make_tokenizer([word])
    accept_any_answer(tokenizer, objects_only=True)
    (call,) = parse_response(tokenizer, turn_ids(tokenizer, [word]), prefix=[], tools=list(TOOLS))["tool_calls"]
    given = call["function"]["arguments"]
    assert isinstance(given, dict)
    assert wrong_call("terminal", given) is not None


def test_the_tokenizer_can_still_be_saved_and_sent_to_another_process(tmp_path: Path) -> None:
    tokenizer = make_tokenizer([AS_TEXT])
    accept_any_answer(tokenizer)
    accept_any_answer(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    sent = pickle.loads(pickle.dumps(tokenizer))
    (call,) = parse_response(sent, turn_ids(sent, [AS_TEXT]), prefix=[], tools=list(TOOLS))["tool_calls"]
    assert call["function"]["arguments"] == LS


def test_a_training_goes_on_whatever_the_model_writes(tmp_path: Path) -> None:
    words = [*(word for word, _ in ANSWERS), SUBMIT, shell("true")]
    tokenizer = make_tokenizer(words)
    pool = TimedPool()
    trainer = scripted(FarmGRPOTrainer, [[[word], [SUBMIT], []] for word in words])(
        model=make_model(tokenizer),
        args=grpo_config(tmp_path, batch=len(words)),
        train_dataset=rows(weekly_sales()),
        processing_class=tokenizer,
        environment_factory=RemoteEpisodes(cast(Pool, pool), batch_size=len(words)),
    )
    trainer.train()
    ran = [[entry for entry in episode.log if "ls" in str(entry)] for episode in pool.episodes]
    assert [bool(commands) for commands in ran] == [arguments == LS for _, arguments in ANSWERS] + [False, False]


@pytest.mark.parametrize("name", ["terminal", "submit"])
@pytest.mark.parametrize("arguments", [{}, {"cmd": "ls"}, {"command": 7}, {"command": "ls", "b": 1}, "ls", ["ls"], 7])
def test_a_wrong_call_is_answered_as_in_training(name: str, arguments: Any) -> None:
    """TRL shows the model what calling the tool raises; RemoteEpisode refuses before it acts."""
    if (name, arguments) == ("submit", {}):
        assert _wrong(ToolCall(name, arguments)) is None
        return
    environment = RemoteEpisode(cast(Any, None))
    raw: dict[str, Callable[..., str]] = {"terminal": environment.terminal, "submit": environment.submit}
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    completion = [{"role": "assistant", "tool_calls": [call]}]
    with ThreadPoolExecutor(1) as executor, pytest.raises(TypeError) as refused:
        ToolCalls([completion], [raw], executor).tools[0][name](**arguments)
    assert _wrong(ToolCall(name, arguments)) == str(refused.value)


def test_a_call_of_no_tool_is_wrong_and_a_right_one_is_not() -> None:
    assert _wrong(ToolCall("reset", {})) == "Tool reset not found."
    assert _wrong(ToolCall("terminal", {"command": "ls"})) is None
