"""The shell program that runs one command inside a sandbox, and the reading of its reply. Pure text and bytes.

What always holds: the command is killed in the sandbox after its time; each of its two streams is cut there, and what
is past the cut is drained, so that the program never gets SIGPIPE; a background process that still holds a stream
when the command's leader has ended is waited for at most `_GRACE_SECONDS`, and its later output drained; bytes arrive
as written, since hexadecimal digits carry them through an SDK that decodes text. Needs bash and coreutils, writes
no file.

What this does not stop: the command runs under the same uid as this program, so it can kill it, or write into its
pipes. All it forges that way is its own observation. It can also stop every process it sees, and so make an answer
late.
"""

from __future__ import annotations

import re
import shlex

from orchestrator.provider import CommandResult

COMMAND_VARIABLE = "FARM_COMMAND"
"""Carries the command's text past the agent's own quoting; gone before the command's shell starts."""

ENVIRONMENT = {"HOME": "/"}
"""For the agent's own login shell: the candidate's ~/.bash_profile must not run before, and outside of, the limits."""

_GRACE_SECONDS = 1.0
"""How long output is waited for after the leader's end: EOF ends the wait at once, a background process never does.
On a busy host the readers need it too: what they have not read by then is lost."""

NOT_STARTED = 126
"""What a shell answers for a command that cannot be executed."""

_TICK_SECONDS = 0.01
"""What times are counted in: of the system's uptime, which unlike its clock is never set."""

KILLED = 128 + 9
"""What a shell calls the exit of a process that SIGKILL ended."""

# fd 3, 4: the agent's stdout and stderr. 5: where readers report; `<> <(:)` is bash's way to an anonymous pipe.
# 7, 9: the command's stdout and stderr, each into a reader. A reader waits for the first byte itself, so that a stream
# without output costs no process; it then copies with cat (which writes what it read at once, so that killing it loses
# nothing) into od (which encodes and cuts), reports when od has delivered, and drains the rest without holding the
# agent's descriptors. TERM tells it that the wait for a background process is over.
_PROGRAM = """\
exec 3>&1 4>&2 2>/dev/null </dev/null
c=$COMMAND_VARIABLE; unset COMMAND_VARIABLE HOME; export HOME=~
exec 5<> <(:)
take() {
  exec 8<&0
  trap 'echo >&5; exec cat <&8 >/dev/null 3>&- 4>&- 5>&-' TERM
  LC_ALL=C IFS= read -r -d '' -n1 first <&8 || { echo >&5; exit; }
  exec > >(exec od -An -v -tx1 -w4096 -N LIMIT >&$1 3>&- 4>&- 5>&- 8>&-) 3>&- 4>&-
  od=$!
  trap 'kill $cat' TERM
  { [ "$first" ] && printf %s "$first" || printf '\\0'; exec cat; } <&8 5>&- & cat=$!
  wait $cat
  exec >/dev/null
  wait $od
  echo >&5
  IFS= read -r -N1 -t 0.01 <&8 || [ $? -gt 128 ] || exit
  exec cat <&8 5>&-
}
exec 7> >(take 3); out=$!
exec 9> >(exec 7>&-; take 4); err=$!
read -r began _ </proc/uptime || began=0
timeout --signal=KILL SECONDS bash -lc -- "$c" >&7 2>&9 3>&- 4>&- 5>&- 7>&- 9>&-
code=$?
read -r over _ </proc/uptime || over=0
took=$((10#${over/./} - 10#${began/./}))
exec 7>&- 9>&-
ended=0
while [ $ended -lt 2 ] && read -r -t GRACE <&5; do ended=$((ended + 1)); done
[ $ended -eq 2 ] || kill $out $err
while [ $ended -lt 2 ] && read -r -t 2 <&5; do ended=$((ended + 1)); done
printf ':%d:%d' $code $took >&3
"""

_COPY = "head -c LIMIT -- PATH 2>/dev/null | od -An -v -tx1 -w4096; printf ':%d:0' ${PIPESTATUS[0]}"

# A forger may send any text: what matches here has to be what int() and bytes.fromhex() read, and both know ASCII only.
_TRAILER = re.compile(r":([0-9]{1,3}):([0-9]{1,18})\Z")
_HEX = re.compile(r"(?:[ \n]*[0-9a-f]{2})*")


def program(*, timeout_seconds: float, limit_bytes: int) -> str:
    """The program that runs the command in COMMAND_VARIABLE; each stream is cut one byte past `limit_bytes`."""
    return (
        _PROGRAM.replace("COMMAND_VARIABLE", COMMAND_VARIABLE)
        .replace("LIMIT", str(limit_bytes + 1))
        .replace("SECONDS", f"{timeout_seconds:.3f}")
        .replace("GRACE", str(_GRACE_SECONDS))
    )


def copying(path: str, *, limit_bytes: int) -> str:
    """The program whose reply holds a file, cut one byte past `limit_bytes`."""
    return _COPY.replace("LIMIT", str(limit_bytes + 1)).replace("PATH", shlex.quote(path))


def reply_bytes(limit_bytes: int) -> int:
    """The longest honest reply on one channel, in characters: three a byte, line ends, and the trailer."""
    return 3 * (limit_bytes + 1) + limit_bytes // 4096 + 64


def parse(stdout: str, stderr: str, *, timeout_seconds: float, limit_bytes: int) -> CommandResult:
    """Read the reply. Without its trailer the command killed this program: reported as killed."""
    trailer = _TRAILER.search(stdout)
    out, err, truncated = _share(
        _decode(stdout[: trailer.start()] if trailer else stdout), _decode(stderr), limit_bytes
    )
    code = int(trailer[1]) if trailer else KILLED
    took_seconds = int(trailer[2]) / 100 if trailer else 0.0
    timed_out = code == KILLED and took_seconds + _TICK_SECONDS > timeout_seconds
    return CommandResult(
        exit_code=None if timed_out else code,
        stdout=out,
        stderr=err,
        timed_out=timed_out,
        truncated=truncated,
    )


def _share(out: bytes, err: bytes, limit: int) -> tuple[bytes, bytes, bool]:
    """Cut both streams to `limit` in total: a quarter is stderr's, the rest stdout's, unused room is passed on."""
    if len(out) + len(err) <= limit:
        return out, err, False
    err_share = max(limit // 4, limit - len(out))
    err = err[:err_share]
    return out[: limit - len(err)], err, True


def _decode(text: str) -> bytes:
    """The bytes that `text` spells; a reply that was cut yields its whole bytes, a forged one what it can."""
    digits = _HEX.match(text)
    return bytes.fromhex(digits[0]) if digits else b""
