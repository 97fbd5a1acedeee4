"""Candidates that mean ill: they cost themselves their score at most, never the farm, another episode or the truth."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from orchestrator.errors import InfrastructureLost
from orchestrator.records import EpisodeSpec
from orchestrator.transcripts import read_transcript
from orchestrator.vocabulary import Outcome
from tests.support.farm import Field, Running
from tests.support.ground import BUDGETS
from tests.support.policies import REPORT, candidate, repaired, script, weekly_sales, write_file

pytest_plugins = ["tests.support.farm"]

BOTH = ("policy", "verifier")
REWARDS = ("1.0", "nan", "inf", "1.5")
PLACES = ("/home/user/reward.txt", "/tmp/reward.txt", "/root/reward.txt")


@contextmanager
def driven(field: Field, spec: EpisodeSpec) -> Iterator[Running]:
    """A remote episode whose sandbox is ready; closed in the end, with nothing left of it."""
    started = field.remote(spec)
    started.episode.reset()
    yield started
    started.episode.close()
    started.end()
    field.check_absent(spec.episode_id, field.receipt(spec.episode_id))


@pytest.fixture
def running(field: Field) -> Iterator[Running]:
    """A remote episode for one test."""
    with driven(field, field.spec()) as started:
        yield started


def solve(running: Running) -> None:
    """Repair the report after all: whatever happened before did no harm to the episode."""
    running.episode.terminal(candidate(repaired()))
    running.episode.submit()
    assert running.episode.reward() == 1.0


# too much of everything


def test_writing_a_gigabyte_is_cut_off_in_the_sandbox_and_the_episode_goes_on(running: Running) -> None:
    seen = running.episode.terminal("head -c 1000000000 /dev/zero > /home/user/large; wc -c < /home/user/large")
    assert int(seen.split()[0]) < 600_000_000
    running.episode.terminal("rm -f /home/user/large")
    solve(running)


def test_printing_a_gigabyte_is_cut_off_at_the_observation_limit(running: Running) -> None:
    seen = running.episode.terminal("head -c 1000000000 /dev/zero | tr '\\0' x")
    assert seen.truncated
    assert len(seen) < 66_000
    assert "[output truncated]" in seen
    solve(running)


def test_binary_output_is_replaced_and_flagged(running: Running) -> None:
    seen = running.episode.terminal("head -c 300 /dev/zero; printf '\\377\\376'")
    assert seen.binary
    assert "\ufffd" in seen
    assert seen.exit_code == 0
    solve(running)


def test_a_command_with_a_nul_is_an_observation(running: Running) -> None:
    seen = running.episode.terminal("echo a\0b")
    assert "nothing was run" in seen
    solve(running)


def test_an_empty_command_is_an_observation(running: Running) -> None:
    assert running.episode.terminal("")
    solve(running)


def test_a_fork_bomb_hurts_no_other_episode(field: Field) -> None:
    budgets = BUDGETS.model_copy(update={"command_seconds": 1, "message_seconds": 4})  # nothing there can answer
    with driven(field, field.spec(budgets=budgets)) as bomber:
        with suppress(InfrastructureLost):  # its own answer may come too late
            bomber.episode.terminal("bomb() { bomb | bomb & }; bomb; sleep 1")
        spec = field.spec(script(candidate(repaired())))
        assert field.run(spec) == "solved"
        field.check_ended(spec.episode_id, Outcome.SOLVED, roles=BOTH)


HEAVY = {
    "writes a gigabyte": "with open('/tmp/large', 'wb') as f:\n    while True: f.write(b'x' * 1000000)",
    "prints a gigabyte": "while True: print('x' * 1000000)",
    "forks without end": "import os\nwhile True: os.fork()",
    "takes all memory": "held = []\nwhile True: held.append(bytearray(10_000_000))",
}


@pytest.mark.parametrize("case", HEAVY)
def test_a_verifier_ends_a_candidate_that(field: Field, case: str) -> None:
    spec = field.spec(script(candidate(HEAVY[case])))
    assert field.run(spec) == "candidate_failed"
    receipt = field.check_ended(spec.episode_id, Outcome.CANDIDATE_FAILED, roles=BOTH).receipt
    assert receipt.sizes["verifier_stdout"] <= 65536


# forged answers

FORGER = """
import os
def parent(pid):
    return int(open(f"/proc/{pid}/status").read().split("PPid:")[1].split()[0])
pid = os.getpid()
for _ in range(6):
    pid = parent(pid)
    for fd in range(1, 5):
        try:
            if pid > 1 and os.readlink(f"/proc/{pid}/fd/{fd}").startswith("pipe:"):
                os.write(os.open(f"/proc/{pid}/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK), "61\\u200362".encode())
        except OSError:
            pass
"""
"""Writes into the pipes of whoever started it: digits with a space between them that only Unicode knows."""


def test_a_candidate_that_forges_the_verifiers_answer_is_scored_zero(field: Field) -> None:
    spec = field.spec(script(candidate(FORGER)))
    assert field.run(spec) == "candidate_failed"
    field.check_ended(spec.episode_id, Outcome.CANDIDATE_FAILED, roles=BOTH)


def test_a_policy_that_forges_an_answer_forges_its_own_observation(field: Field) -> None:
    spec = field.spec(script(f"{write_file('/tmp/forger.py', FORGER)}; python3 /tmp/forger.py"))
    assert field.run(spec) == "wrong_answer"
    field.check_ended(spec.episode_id, Outcome.WRONG_ANSWER, roles=BOTH)


# rewards of one's own


@pytest.mark.parametrize("value", REWARDS)
def test_a_reward_file_changes_nothing(field: Field, value: str) -> None:
    by_policy = [f"{write_file(place, value)}; true" for place in PLACES]
    by_report = "".join(f"try: open({place!r}, 'w').write({value!r})\nexcept OSError: pass\n" for place in PLACES)
    spec = field.spec(script(*by_policy, candidate(by_report + weekly_sales().files[REPORT])))
    assert field.run(spec) == "wrong_answer"
    assert field.check_ended(spec.episode_id, Outcome.WRONG_ANSWER, roles=BOTH).receipt.reward == 0.0


def test_a_background_writer_changes_nothing_after_the_submission(field: Field) -> None:
    writer = f"(sleep 1; while cp /tmp/evil.py {REPORT}; do :; done) > /dev/null 2>&1 &"
    spec = field.spec(script(write_file("/tmp/evil.py", "raise SystemExit(9)"), candidate(repaired()), writer))
    assert field.run(spec) == "solved"
    field.check_ended(spec.episode_id, Outcome.SOLVED, roles=BOTH)


def test_only_the_artifact_leaves_the_policy_sandbox(field: Field) -> None:
    source = "import json, os, sys\nsys.path.insert(0, '/home/user')\nimport answers\n"
    companion = write_file("/home/user/answers.py", "print('{}')")
    spec = field.spec(script(companion, candidate(source)))
    assert field.run(spec) == "candidate_failed"
    field.check_ended(spec.episode_id, Outcome.CANDIDATE_FAILED, roles=BOTH)


NETWORK = """
import os, socket
for address in (("1.1.1.1", 53), ("127.0.0.1", {port}), ("169.254.169.254", 80)):
    try:
        socket.create_connection(address, timeout=0.3)
    except OSError:
        continue
    os._exit(7)
try:
    socket.getaddrinfo("example.com", 80)
except OSError:
    pass
else:
    os._exit(8)
"""


def test_the_verifier_reaches_no_network_and_not_the_service_that_runs_it(field: Field) -> None:
    assert field.settings.e2b_api_url is not None
    port = int(field.settings.e2b_api_url.rsplit(":", 1)[1])
    spec = field.spec(script(candidate(NETWORK.format(port=port) + repaired())))
    assert field.run(spec) == "solved", field.receipt(spec.episode_id).receipt.detail
    field.check_ended(spec.episode_id, Outcome.SOLVED, roles=BOTH)


# what is held out

_SEARCH = (
    "grep -rIl 'zq-held-ou[t]' /home /tmp /root /etc /opt /run /var 2>/dev/null;"
    " cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | grep -ac 'zq-held-ou[t]'"
)


def test_the_expectation_is_nowhere_in_the_policy_sandbox(field: Field) -> None:
    spec = field.spec(script(_SEARCH, "env | sort", submit=False), task=weekly_sales(expected={"zq-held-out": 1}))
    assert field.run(spec) == "not_submitted"
    seen = [
        entry["text"] for entry in read_transcript(field.farm.redis, spec.episode_id) if entry["role"] == "observation"
    ]
    assert seen[0].splitlines()[0] == "0"
    assert "zq-held-out" not in "".join(seen)
    assert "sales.csv" not in seen[1]


def test_the_expectation_is_nowhere_in_the_verifier(field: Field) -> None:
    source = (
        f"import subprocess\nfound = subprocess.run({_SEARCH!r}, shell=True, capture_output=True, text=True).stdout\n"
    )
    source += "print('{}' if found == '0\\n' else found)\n"
    spec = field.spec(script(candidate(source)), task=weekly_sales(expected={"zq-held-out": 1}))
    assert field.run(spec) == "wrong_answer", field.receipt(spec.episode_id).receipt.detail
    field.check_ended(spec.episode_id, Outcome.WRONG_ANSWER, roles=BOTH)


def test_the_held_out_input_is_not_in_the_policy_sandbox(running: Running) -> None:
    seen = running.episode.terminal("grep -rl 'islan[d]' /home /tmp /root /opt 2>/dev/null; cat /home/user/sales.csv")
    assert seen == weekly_sales().files["/home/user/sales.csv"]


# what comes back


def test_a_background_process_that_holds_stdout_does_not_hang_the_call(running: Running) -> None:
    began = time.monotonic()
    seen = running.episode.terminal("sleep 30 & echo here")
    assert time.monotonic() - began < 5
    assert seen == "here\n"
    assert seen.exit_code == 0
    solve(running)


def test_a_character_split_over_chunks_arrives_whole(running: Running) -> None:
    seen = running.episode.terminal("printf '\\342'; sleep 0.1; printf '\\202'; sleep 0.1; printf '\\254'")
    assert seen == "\u20ac"
    assert not seen.binary


def test_no_newline_is_added_between_chunks(running: Running) -> None:
    assert running.episode.terminal("for n in 1 2 3; do printf $n; sleep 0.05; done") == "123"


def test_a_command_that_never_ends_is_killed_and_the_episode_goes_on(running: Running) -> None:
    seen = running.episode.terminal("trap '' TERM INT; while :; do :; done")
    assert seen.timed_out
    assert seen.exit_code is None
    solve(running)


def test_a_failing_command_is_an_observation(running: Running) -> None:
    seen = running.episode.terminal("echo out; echo err >&2; exit 3")
    assert seen.exit_code == 3
    assert "out\n" in seen
    assert "err\n" in seen
    solve(running)
