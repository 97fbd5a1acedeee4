"""What the processes of one run say to each other; with one process, nothing but calls.

What always holds: all of them call these in the same order; an error of the first is raised in all of them. Nothing
here waits for a process that has gone: its connection breaks, and that is said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from orchestrator.errors import FarmError

T = TypeVar("T")


def the_first_does(call: Callable[[], T]) -> T:
    """Call it in the first process; every process gets its result, or raises its FarmError. Both have to pickle.

    Any other error of the first is a FarmError in the others: they would wait for an answer while it cleans up.
    """
    if PartialState().num_processes == 1:
        return call()
    answer: list[Any] = [None, None]
    if PartialState().is_main_process:
        try:
            answer[0] = call()
        except FarmError as error:
            answer[1] = error
        except BaseException as error:
            answer[1] = FarmError(f"the first process of this run failed ({type(error).__name__}: {error}): see there")
            with suppress(FarmError):  # of another that has gone; ours is what counts
                _alive(broadcast_object_list, answer)
            raise
    _alive(broadcast_object_list, answer)
    if answer[1] is not None:
        raise answer[1]
    result: T = answer[0]
    return result


def gathered(rows: Sequence[T]) -> list[T]:
    """The rows of all processes, the first's first."""
    found: list[T] = _alive(gather_object, list(rows))
    return found


def _alive(call: Callable[[list[Any]], Any], rows: list[Any]) -> Any:
    try:
        return call(rows)
    except RuntimeError as error:  # torch.distributed has no narrower one for all its backends
        if PartialState().num_processes == 1:
            raise
        raise FarmError(
            f"another process of this run has gone ({str(error).splitlines()[0]}); its episodes end as trainer_lost, "
            "ours are closed: look at its output, then go on with --resume"
        ) from error
