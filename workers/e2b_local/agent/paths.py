"""Names to places: who a call speaks for, and which path inside the sandbox it means."""

from __future__ import annotations

import binascii
import os
import pwd

from .http import Failure


def user_named(name: str) -> pwd.struct_passwd:
    try:
        return pwd.getpwnam(name)
    except KeyError:
        raise Failure(401, "unauthenticated", f"invalid username: '{name}'") from None


def user_of(headers: dict[str, str]) -> pwd.struct_passwd:
    kind, _, credentials = headers.get("authorization", "").partition(" ")
    if kind.lower() != "basic":
        return user_named("user")
    return user_named(binascii.a2b_base64(credentials).decode().partition(":")[0])


def resolve(path: str, user: pwd.struct_passwd) -> str:
    """An absolute path: `~` and relative paths start at the user's home."""
    if path.startswith("~"):
        if len(path) > 1 and path[1] != "/":
            raise Failure(400, "invalid_argument", "cannot expand user-specific home dir")
        path = user.pw_dir + path[1:]
    return path if path.startswith("/") else os.path.normpath(f"{user.pw_dir}/{path}")
