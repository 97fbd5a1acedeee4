"""What a failure of Redis means, in words: what is wrong, and what to do about it. Shows no secret."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from redis.exceptions import AuthenticationError, NoPermissionError, ReadOnlyError
from redis.sentinel import MasterNotFoundError

from orchestrator.redis_address import without_password

_WANTS_OURS = (
    "TLSV13_ALERT_CERTIFICATE_REQUIRED",
    "SSLV3_ALERT_HANDSHAKE_FAILURE",
    "SSLV3_ALERT_BAD_CERTIFICATE",
    "TLSV1_ALERT_UNKNOWN_CA",
)
"""What a server says to a client whose certificate is missing or not its authority's."""

_OTHER_HOST = (62, 64)
"""OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH."""

_HUNG_UP = ("Connection closed by server", "Connection reset by peer", "Broken pipe")
"""redis-py's words for a server that did not like the first bytes, or that misses our certificate."""


@dataclass(frozen=True)
class Trouble:
    """What is wrong, and what to do; as text, one after the other."""

    wrong: str
    mend: str

    def __str__(self) -> str:
        return f"{self.wrong}; {self.mend}"


def diagnose(error: BaseException, url: str = "") -> Trouble:
    """What this failure of Redis, at `url` where that is known, is about."""
    text, where = without_password(str(error)), f" at {without_password(url)}" if url else ""
    causes = list(_causes(error))
    secured = next((cause for cause in causes if isinstance(cause, ssl.SSLError)), None)
    if secured is not None:
        return _no_tls(secured, where)
    if isinstance(error, MasterNotFoundError):
        return _no_primary(error, causes[1:], where)
    if isinstance(error, NoPermissionError):
        return Trouble(
            f"the user of REDIS_URL lacks a right{where} ({text})",
            "give it the rules of deploy/redis/users.acl, and +select for a database other than 0",
        )
    if isinstance(error, AuthenticationError):
        return Trouble(
            f"Redis{where} refuses user or password ({text})",
            "correct them in REDIS_URL, percent-encoded: redis://user:password@host:6379/0",
        )
    if any(isinstance(cause, ReadOnlyError) for cause in causes):
        return Trouble(
            f"Redis{where} is a replica and takes no writes",
            "point REDIS_URL at the primary, or at Sentinels: redis+sentinel://host:26379/mymaster",
        )
    if url and any(sign in text for sign in _HUNG_UP):
        return Trouble(f"Redis{where} hung up at once ({text})", _other_tls(url))
    if url.startswith("rediss") and text.startswith("Timeout"):
        return Trouble(
            f"no Redis with TLS{where} ({text})", "start one, or begin REDIS_URL with redis:// if it has no TLS"
        )
    if not where:
        return Trouble(text, "see that Redis runs and can be reached")
    return Trouble(
        f"no Redis{where} ({text})", "start one, or correct REDIS_URL, or unset it to use the embedded server"
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what led to it: redis-py's own errors tell some of it in text only."""
    found: BaseException | None = error
    seen = set()
    while found is not None and id(found) not in seen:  # raised again while it is handled, errors can form a ring
        seen.add(id(found))
        yield found
        found = found.__cause__ or found.__context__


def _no_primary(error: BaseException, causes: Sequence[BaseException], where: str) -> Trouble:
    text = without_password(str(error))
    if any(isinstance(cause, AuthenticationError) for cause in causes):
        return Trouble(
            f"the Sentinels{where} refuse us ({text})",
            "add ?sentinel_password=... to REDIS_URL, and sentinel_username=... where they have users",
        )
    if " : " in text:  # after it redis-py lists the Sentinels that did not answer
        return Trouble(
            f"no Sentinel{where} answers ({text})",
            "see that the Sentinels run, and that REDIS_URL has their hosts, their ports and their TLS",
        )
    return Trouble(
        f"the Sentinels{where} know no healthy primary of that name ({text})",
        "correct the name in REDIS_URL, or wait for the failover: redis-cli -p 26379 sentinel masters",
    )


def _other_tls(url: str) -> str:
    if url.startswith("rediss"):
        return "set FARM_REDIS_CERTIFICATE_FILE and FARM_REDIS_KEY_FILE if it asks for a certificate of ours"
    scheme = "rediss+sentinel" if url.startswith("redis+sentinel") else "rediss"
    return f"begin REDIS_URL with {scheme}:// if this is its TLS port"


def _no_tls(error: ssl.SSLError, where: str) -> Trouble:
    reason = error.reason or str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _OTHER_HOST:
            return Trouble(
                f"the certificate of Redis{where} is not for this host ({error.verify_message})",
                "write the host into REDIS_URL as the certificate has it, or have one issued for that name",
            )
        return Trouble(
            f"the certificate of Redis{where} is not trusted ({error.verify_message})",
            "set FARM_REDIS_CA_FILE to the PEM file of the authority that signed it",
        )
    if reason == "WRONG_VERSION_NUMBER":
        return Trouble(f"Redis{where} does not speak TLS", "begin REDIS_URL with redis://, or name its TLS port")
    if reason in _WANTS_OURS or isinstance(error, ssl.SSLEOFError):
        return Trouble(
            f"Redis{where} does not accept our certificate, or asks for one ({reason})",
            "set FARM_REDIS_CERTIFICATE_FILE and FARM_REDIS_KEY_FILE to what its authority signed",
        )
    return Trouble(
        f"TLS with Redis{where} failed ({reason})",
        "see that FARM_REDIS_CA_FILE, FARM_REDIS_CERTIFICATE_FILE and FARM_REDIS_KEY_FILE are PEM files, and that "
        "key and certificate belong together",
    )
