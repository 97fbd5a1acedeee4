"""Where the farm's Redis is: what REDIS_URL says, read without a request.

    redis://[user:password@]host[:6379][/db]                        one server
    rediss://...                                                    the same over TLS
    unix://[user:password@]/path[?db=N]                             one on this host
    redis+sentinel://[user:password@]host[:26379],.../master[/db]   the primary that these Sentinels name
    rediss+sentinel://...                                           the same, servers and Sentinels over TLS

The first three are redis-py's. It has no URL for Sentinel; RQ and Celery name the Sentinels in settings of their own.
The form above is the one that docket, Prefect, RedisVL and LangChain read. User and password are the servers'; the
Sentinels' own, where they ask for one, are the options sentinel_username and sentinel_password. The TLS options are
redis-py's: ssl_ca_certs, ssl_certfile, ssl_keyfile, ssl_check_hostname, ssl_cert_reqs.

What always holds: no error and no `repr` shows a value that may be a secret. A password that is not percent-encoded
moves into what looks like host, port or path, so those are not quoted either.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

_REDIS_PORT = 6379
_SENTINEL_PORT = 26379

_TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname", "ssl_cert_reqs")
_CREDENTIALS = ("username", "password")
_SENTINEL_OPTIONS = ("sentinel_username", "sentinel_password")
_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")


@dataclass(frozen=True)
class RedisAddress:
    """One Redis, or the primary that Sentinels know by `master`."""

    tls: bool = False
    path: str = ""
    """The Unix socket; '' for a server on the network."""
    nodes: tuple[tuple[str, int], ...] = ()
    """(host, port) of the server, or of each Sentinel."""
    master: str = ""
    """The name by which Sentinels know the primary; '' without Sentinels."""
    db: int = 0
    credentials: Mapping[str, str] = field(default_factory=dict, repr=False)
    """username and password of the servers, as far as given."""
    sentinel_credentials: Mapping[str, str] = field(default_factory=dict, repr=False)
    tls_options: Mapping[str, Any] = field(default_factory=dict)


def parse_address(url: str) -> RedisAddress:
    """Read REDIS_URL; raises ValueError, whose text says what to correct and holds no part of the URL."""
    scheme = url.partition("://")[0]
    if "://" not in url or scheme not in _SCHEMES:
        raise ValueError(f"it must begin with one of {', '.join(f'{known}://' for known in _SCHEMES)}")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError("host and port cannot be read") from None
    userinfo, at, authority = parts.netloc.rpartition("@")
    if not at and "@" in url:
        raise ValueError("user and password must be percent-encoded: / is %2F, # is %23, ? is %3F, @ is %40")
    sentinel, tls = scheme.endswith("+sentinel"), scheme.startswith("rediss")
    options = _options(
        parts, ("db", *_CREDENTIALS, *(_TLS_OPTIONS if tls else ()), *(_SENTINEL_OPTIONS if sentinel else ()))
    )
    user, _, password = userinfo.partition(":")
    given = {
        "username": unquote(user) or options.get("username"),
        "password": unquote(password) or options.get("password"),
    }
    credentials = {name: value for name, value in given.items() if value}
    if scheme == "unix":
        if not parts.path:
            raise ValueError("it names no socket; write it like unix:///run/redis/redis.sock?db=0")
        return RedisAddress(path=unquote(parts.path), db=_db(options.get("db", "")), credentials=credentials)
    master, path = "", parts.path.strip("/")
    if sentinel:
        master, _, path = path.partition("/")
        if not master:
            raise ValueError("it names no primary; write it like redis+sentinel://host1:26379,host2:26379/mymaster/0")
    return RedisAddress(
        tls=tls,
        nodes=tuple(_node(node, _SENTINEL_PORT if sentinel else _REDIS_PORT) for node in authority.split(",")),
        master=unquote(master),
        db=_db(options.get("db", path)),
        credentials=credentials,
        sentinel_credentials={
            name.removeprefix("sentinel_"): options[name] for name in _SENTINEL_OPTIONS if options.get(name)
        },
        tls_options=_tls_options(options),
    )


def without_password(text: str) -> str:
    """`text` with the secrets of every URL in it hidden."""
    hidden = re.sub(r"(://[^:/@\s]*:)\S*@", r"\1***@", text)
    hidden = re.sub(r"://[^:/@\s]+@", "://***@", hidden)  # a password where the user belongs
    return re.sub(r"([?&]\w*password=)[^&\s]*", r"\1***", hidden)


def _options(parts: SplitResult, known: tuple[str, ...]) -> dict[str, str]:
    if parts.fragment:
        raise ValueError("it has a #; in user or password write %23")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name in options:
        if name not in known:  # a name is shown only where it cannot be the tail of a password
            what = f"the option {name}" if re.fullmatch(r"[a-z_]{1,30}", name) else "an option"
            raise ValueError(f"it has {what}, which is none of: {', '.join(known)}")
    return options


def _node(text: str, port: int) -> tuple[str, int]:
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:]*)(?::(\d{1,5}))?", text)
    if found is None or not 0 < int(found[2] or port) < 65536:
        raise ValueError("host and port cannot be read: write host:port, an IPv6 address in brackets")
    return unquote(found[1].strip("[]")) or "localhost", int(found[2] or port)


def _db(text: str) -> int:
    if text and not re.fullmatch(r"\d{1,6}", text):
        raise ValueError("its database is no number; write it like redis://host:6379/0")
    return int(text or 0)


def _tls_options(options: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {name: options[name] for name in _TLS_OPTIONS if name in options}
    if "ssl_check_hostname" in found:
        if found["ssl_check_hostname"].lower() not in ("true", "false", "1", "0", "yes", "no"):
            raise ValueError("ssl_check_hostname is neither true nor false")
        found["ssl_check_hostname"] = found["ssl_check_hostname"].lower() in ("true", "1", "yes")
    if found.get("ssl_cert_reqs", "required") not in ("required", "optional", "none"):
        raise ValueError("ssl_cert_reqs is none of required, optional, none")
    return found
