"""The command's log: plain lines on standard error that show what a record carries beside its message."""

from __future__ import annotations

import logging

from deploy.terminal import safe
from orchestrator.settings import Settings

_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""What every record has; the rest came with `extra=`."""


class Lines(logging.Formatter):
    """A line a record, its extra fields as `name=value` after the message; nothing in it can steer a terminal."""

    def __init__(self) -> None:
        super().__init__(_FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """The line, without a traceback."""
        fields = [f"{name}={value}" for name, value in vars(record).items() if name not in _OWN]
        return safe(" ".join([super().formatMessage(record), *fields]), multiline=False)


def start_logging(settings: Settings) -> None:
    """Log to standard error from here on, at the level of `settings`."""
    handler = logging.StreamHandler()
    handler.setFormatter(Lines())
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)
