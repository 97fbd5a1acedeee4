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

ENVIRONMENT = {"POSIXLY_CORRECT": "1"}
"""For the agent's own login shell: in POSIX mode bash reads no profile and no BASH_ENV and takes no SHELLOPTS, so that
neither the image's nor the candidate's start-up files print into, change or run beside this program. The command's own
shell, within the limits, reads them all."""

_GRACE_SECONDS = 1.0
"""How long output is waited for after the leader's end: EOF ends the wait at once, a background process never does.
On a busy host the readers need it too: what they have not read by then is lost."""

NOT_STARTED = 126
"""What a shell answers for a command that cannot be executed."""

_TICK_SECONDS = 0.01
"""What times are counted in: of the system's uptime, which unlike its clock is never set."""

KILLED = 128 + 9
"""What a shell calls the exit of a process that SIGKILL ended."""

# Goes ahead of the bytes of each stream, through the same od, so that it costs no message of its own. What is before it
# is not ours: bash warns there of a locale that the image does not have, say.
_MARK = b"\2farm\3"
_PRINTED_MARK = r"\2farm\3"
_SPELLED_MARK = _MARK.hex(" ")

# fd 3, 4: the agent's stdout and stderr. 5: where readers report; `<> <(:)` is bash's way to an anonymous pipe.
# 7, 9: the command's stdout and stderr, each into a reader. A reader waits for the first byte itself, so that a stream
# without output costs no process; it then copies with cat (which writes what it read at once, so that killing it loses
# nothing) into od (which encodes and cuts), reports when od has delivered, and drains the rest without holding the
# agent's descriptors. TERM tells it that the wait for a background process is over.
# The environment is the task's, and the command gets it as it was given: our variables have a prefix that no task's may
# have, each `read` has a time of its own beside TMOUT's, the tools are found whatever PATH is, and an exported function
# stands for no builtin (`unset -f` while POSIX mode still puts it before functions).
_PROGRAM = """\
unset -f command exec exit hash kill printf read trap wait; unset POSIXLY_CORRECT
exec 3>&1 4>&2 2>/dev/null </dev/null
_farm_command=$COMMAND_VARIABLE; unset COMMAND_VARIABLE
exec 5<> <(:)
take() {
  PATH=$PATH:/usr/bin:/bin LC_ALL=C
  exec 8<&0
  trap 'echo >&5; exec cat <&8 >/dev/null 3>&- 4>&- 5>&-' TERM
  IFS= read -r -d '' -n1 -t LONG _farm_first <&8 || { echo >&5; exit; }
  exec > >(exec od -An -v -tx1 -w4096 -N LIMIT >&$1 3>&- 4>&- 5>&- 8>&-) 3>&- 4>&-
  _farm_od=$!
  trap 'kill $_farm_cat' TERM
  { [[ $_farm_first ]] && printf 'MARK%s' "$_farm_first" || printf 'MARK\\0'; exec cat; } <&8 5>&- & _farm_cat=$!
  wait $_farm_cat
  exec >/dev/null
  wait $_farm_od
  echo >&5
  IFS= read -r -N1 -t 0.01 <&8 || (($? > 128)) || exit
  exec cat <&8 5>&-
}
exec 7> >(take 3); _farm_out=$!
exec 9> >(exec 7>&-; take 4); _farm_err=$!
read -r -t 9 _farm_began _ </proc/uptime || _farm_began=0
hash timeout || hash -p /usr/bin/timeout timeout
command timeout --signal=KILL SECONDS /bin/bash -lc -- "$_farm_command" >&7 2>&9 3>&- 4>&- 5>&- 7>&- 9>&-
_farm_code=$?
read -r -t 9 _farm_over _ </proc/uptime || _farm_over=0
_farm_took=$((10#${_farm_over/./} - 10#${_farm_began/./}))
exec 7>&- 9>&-
_farm_ended=0 LC_ALL=C
while ((_farm_ended < 2)) && read -r -t GRACE <&5; do ((++_farm_ended)); done
((_farm_ended == 2)) || kill $_farm_out $_farm_err
while ((_farm_ended < 2)) && read -r -t 2 <&5; do ((++_farm_ended)); done
printf ':%d:%d' $_farm_code $_farm_took >&3
"""

_COPY = """\
unset -f command printf; unset POSIXLY_CORRECT; PATH=$PATH:/usr/bin:/bin
{ printf 'MARK'; exec head -c LIMIT -- FILE 2>/dev/null; } | command od -An -v -tx1 -w4096
printf ':%d:0' ${PIPESTATUS[0]}
"""

_LONG_SECONDS = 86_400
"""The longest that any sandbox lives: a reader without a time of its own would have TMOUT's."""

_WARNINGS = 4096
"""Room for what bash prints ahead of the mark."""

# A forger may send any text: what matches here has to be what int() and bytes.fromhex() read, and both know ASCII only.
_TRAILER = re.compile(r":([0-9]{1,3}):([0-9]{1,18})\Z")
_HEX = re.compile(r"(?: *[0-9a-f]{2})*+")
"""Possessive, since what could be tried again would cost 175 bytes of memory for every byte that is read."""


def program(*, timeout_seconds: float, limit_bytes: int) -> str:
    """The program that runs the command in COMMAND_VARIABLE; each stream is cut one byte past `limit_bytes`."""
    return (
        _PROGRAM.replace("COMMAND_VARIABLE", COMMAND_VARIABLE)
        .replace("MARK", _PRINTED_MARK)
        .replace("LONG", str(_LONG_SECONDS))
        .replace("LIMIT", str(limit_bytes + 1 + len(_MARK)))
        .replace("SECONDS", f"{timeout_seconds:.3f}")
        .replace("GRACE", str(_GRACE_SECONDS))
    )


def copying(path: str, *, limit_bytes: int) -> str:
    """The program whose reply holds a file, cut one byte past `limit_bytes`."""
    program = _COPY.replace("MARK", _PRINTED_MARK).replace("LIMIT", str(limit_bytes + 1))
    return program.replace("FILE", shlex.quote(path))


def reply_bytes(limit_bytes: int) -> int:
    """The longest honest reply on one channel, in characters: warnings, three a byte, line ends, and the trailer."""
    return _WARNINGS + 3 * (limit_bytes + 1 + len(_MARK)) + limit_bytes // 4096 + 64


def parse(stdout: str, stderr: str, *, timeout_seconds: float, limit_bytes: int) -> CommandResult:
    """Read the reply. Without its trailer the command killed this program: reported as killed."""
    trailer = _TRAILER.search(stdout)
    out, err = (_decode(text) for text in (stdout[: trailer.start()] if trailer else stdout, stderr))
    code = int(trailer[1]) if trailer else KILLED
    took_seconds = int(trailer[2]) / 100 if trailer else 0.0
    timed_out = code == KILLED and took_seconds + _TICK_SECONDS > timeout_seconds
    return CommandResult(
        exit_code=None if timed_out else code,
        stdout=out[:limit_bytes],
        stderr=err[:limit_bytes],
        timed_out=timed_out,
        stdout_cut=len(out) > limit_bytes,
        stderr_cut=len(err) > limit_bytes,
    )


def _decode(text: str) -> bytes:
    """The bytes that `text` spells; a reply that was cut yields its whole bytes, a forged one what it can.

    Line by line, so that other threads run meanwhile: each is one of od's, of 4096 bytes.
    """
    spelled = bytearray()
    if (begins := text.find(_SPELLED_MARK)) < 0:
        return b""
    begins += len(_SPELLED_MARK)
    while begins < len(text):
        if (ends := text.find("\n", begins)) < 0:
            ends = len(text)
        line = text[begins:ends]
        try:
            spelled += bytes.fromhex(line)
        except ValueError:
            digits = _HEX.match(line)
            return bytes(spelled + bytes.fromhex(digits[0] if digits else ""))
        begins = ends + 1
    return bytes(spelled)
