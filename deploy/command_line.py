"""The whole `rollout-farm` command: puts the groups together and turns an error into one red line and an exit code.

Each group is a module of deploy/commands with a `register(app)`; what is heavy is imported inside the commands, so that
`--help` answers at once.
"""

from __future__ import annotations

import errno
import os
import sys
from importlib import metadata
from typing import Annotated, NoReturn

import typer
from redis.exceptions import RedisError

from deploy.commands import (
    budget,
    cancel,
    compare,
    cost,
    demo,
    doctor,
    evaluate,
    limits,
    orchestrator,
    receipts,
    run,
    sandboxes,
    status,
    tasks,
    terminus,
    train,
    up,
    worker,
)
from deploy.exit_codes import ExitCode, exit_code
from deploy.proxies import exceptions_of
from deploy.terminal import errors, print_error, safe
from orchestrator.errors import FarmError
from orchestrator.redis_trouble import diagnose
from orchestrator.settings import unknown_variables

GROUPS = (
    demo,
    run,
    train,
    evaluate,
    compare,
    up,
    worker,
    orchestrator,
    status,
    limits,
    receipts,
    cost,
    budget,
    cancel,
    doctor,
    tasks,
    sandboxes,
    terminus,
)


_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def build() -> typer.Typer:
    """The whole command."""
    app = typer.Typer(
        name="rollout-farm",
        no_args_is_help=True,
        pretty_exceptions_enable=False,  # its tracebacks show local variables, keys among them
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for group in GROUPS:
        group.register(app)
    return app


def main() -> None:
    """Run the command that this process was started with, and exit with its code."""
    for problem in unknown_variables(os.environ):
        errors().print(f"warning: {safe(problem)}", markup=False)
    os.environ.update(exceptions_of(os.environ))
    try:
        try:
            build()()
        finally:
            if sys.stdout:  # none when it was closed from the start
                sys.stdout.flush()  # here, where a failure still finds its handler
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # the libraries that print turn it into exit code 1
            _leave_the_output(ExitCode.OUTPUT_CLOSED)
        raise
    except FarmError as error:
        print_error(str(error))
        sys.exit(exit_code(error))
    except RedisError as error:
        print_error(f"Redis failed on the way: {diagnose(error)}; then look at: rollout-farm status")
        sys.exit(ExitCode.REDIS)
    except BrokenPipeError:
        _leave_the_output(ExitCode.OUTPUT_CLOSED)
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise
        print_error(f"cannot write {error.filename or 'the output'}: {error.strerror}; make room, or write elsewhere")
        _leave_the_output(ExitCode.FAILED)
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)


def _leave_the_output(code: ExitCode) -> NoReturn:
    """Exit without a second failure: the interpreter writes what is still buffered when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _show_version(wanted: bool) -> None:  # noqa: FBT001 - typer's calling convention
    if wanted:
        try:
            typer.echo(f"rollout-farm {metadata.version('rollout-farm')}")
        except metadata.PackageNotFoundError:
            typer.echo("rollout-farm (not installed)")
        raise typer.Exit


def _root(
    *,
    _version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Runs reinforcement-learning episodes in sandboxes, on any number of workers, one receipt each.

    Settings come from the environment and .env; .env.example lists the usual ones.

    Exit codes: 0 ok, 1 failed, 2 usage, 3 settings, 4 Redis, 5 sandbox provider, 6 capacity, 7 task, 8 episode
    aborted, 130 interrupted, 141 output closed early.
    """
