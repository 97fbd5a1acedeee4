"""A batch's tool calls, started together: TRL asks for them one row after another and finds them on their way.

What always holds: nothing starts before TRL itself asks for the first call of a round; one episode's calls stay in
order; each call that is started is one that TRL makes, and TRL gets its result or its exception.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any

Tool = Callable[..., Any]


class ToolCalls:
    """Wraps the tools of a batch; give TRL `tools` in place of its own."""

    def __init__(
        self, completions: Sequence[Sequence[Any]], tools: Sequence[Mapping[str, Tool]], executor: Executor
    ) -> None:
        self._completions = completions
        """TRL's own lists, which it goes on appending to: a row's pending calls are in its last message."""
        self._raw = tools
        self._executor = executor
        self._started: list[object] = [None] * len(tools)
        """The last message of each row whose calls were started."""
        self._results: list[list[Future[Any]]] = [[] for _ in tools]
        self.tools = [
            {name: self._wrapped(row, name, tool) for name, tool in by_name.items()}
            for row, by_name in enumerate(tools)
        ]

    def _wrapped(self, row: int, name: str, tool: Tool) -> Tool:
        @functools.wraps(tool)
        def call(**arguments: Any) -> Any:
            if not _fits(tool, arguments):
                return tool(**arguments)  # it was not started: let it fail as TRL's own call does
            self._start_round()
            if not self._results[row]:  # never so with the TRL that this is pinned to; late is better than wrong
                return tool(**arguments)
            return self._results[row].pop(0).result()

        call.__name__ = name
        return call

    def _start_round(self) -> None:
        for row, completion in enumerate(self._completions):
            message = completion[-1]
            if message is self._started[row]:
                continue
            if calls := [made for call in _calls(message) if (made := self._made(row, call)) is not None]:
                self._started[row] = message
                results: list[Future[Any]] = [Future() for _ in calls]
                self._results[row] = list(results)  # which is emptied while the thread goes through its own
                self._executor.submit(_run, calls, results)

    def _made(self, row: int, call: Any) -> tuple[Tool, Mapping[str, Any]] | None:
        """The tool and arguments of a call that TRL is going to make; None for one that it answers with an error."""
        function = call.get("function") if isinstance(call, Mapping) and call.get("type") == "function" else None
        if not isinstance(function, Mapping):
            return None
        tool, arguments = self._raw[row].get(str(function.get("name"))), function.get("arguments")
        if tool is None or not isinstance(arguments, Mapping) or not _fits(tool, arguments):
            return None
        return tool, arguments


def _calls(message: Any) -> Sequence[Any]:
    if isinstance(message, Mapping) and message.get("role") == "assistant":
        return message.get("tool_calls") or ()
    return ()


def _fits(tool: Tool, arguments: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(tool).bind(**arguments)
    except TypeError:
        return False
    return True


def _run(calls: Sequence[tuple[Tool, Mapping[str, Any]]], results: Sequence[Future[Any]]) -> None:
    for (tool, arguments), result in zip(calls, results, strict=True):
        try:
            result.set_result(tool(**arguments))
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
            result.set_exception(error)
