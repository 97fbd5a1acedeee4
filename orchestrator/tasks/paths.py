"""Where a task's files may lie: regular paths under the sandbox user's home, in one spelling each."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable

HOME = "/home/user"
PATH_CHARACTERS = 512
"""Well under the 4096 of PATH_MAX, whatever the encoding."""
NAME_BYTES = 255
"""NAME_MAX of the usual file systems."""


def home_path(path: str) -> str:
    """`path` as an absolute path under /home/user; raises ValueError when it names nothing there."""
    if not path.strip() or path.endswith("/"):
        raise ValueError("must name a file")
    if not path.isprintable():
        raise ValueError("must not contain control characters")
    if len(path) > PATH_CHARACTERS or any(len(part.encode()) > NAME_BYTES for part in path.split("/")):
        raise ValueError("is too long for a path")
    if ".." in path.split("/"):
        raise ValueError("must not contain '..'")
    if path.startswith("~"):
        raise ValueError(f"must be relative to {HOME}, without '~'")
    full = posixpath.normpath(posixpath.join(HOME, re.sub("/+", "/", path)))
    if not full.startswith(f"{HOME}/"):
        raise ValueError(f"must lie under {HOME}")
    return full


def clash(paths: Iterable[str]) -> str | None:
    """Why `paths` (any spelling) cannot all be files at once; None when they can."""
    seen: dict[str, str] = {}
    for path in paths:
        try:
            full = home_path(path)
        except ValueError:
            continue  # reported on its own
        if full in seen:
            return f"{seen[full]!r} and {path!r} are the same file"
        seen[full] = path
    for full in seen:
        parent = next((seen[other] for other in seen if full.startswith(f"{other}/")), None)
        if parent is not None:
            return f"{parent!r} cannot be a file and the directory of {seen[full]!r}"
    return None
