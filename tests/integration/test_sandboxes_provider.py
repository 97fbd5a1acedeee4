"""The provider over the real SDK against the local service: creating, finding, deleting, files."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from contextlib import suppress

import pytest

from orchestrator.errors import ArtifactMissing, ArtifactTooLarge, AuthenticationFailed, CreateRejected, SandboxGone
from orchestrator.provider import Provider, Sandbox
from tests.support.e2b_local import API_KEY, LocalService, sandbox_request
from workers.sandboxes.provider import E2BProvider
from workers.sandboxes.shell import copying, parse

pytest_plugins = ["tests.support.e2b_local"]


@pytest.fixture(scope="module")
def sandbox(provider: Provider) -> Iterator[Sandbox]:
    created = provider.create(sandbox_request())
    yield created
    provider.delete(created.sandbox_id)


def shell(sandbox: Sandbox, command: str) -> str:
    result = sandbox.run(command, timeout_seconds=10, output_limit_bytes=65536, response_seconds=20)
    return result.stdout.decode()


def test_a_created_sandbox_carries_its_request_and_is_found_by_metadata(provider: Provider) -> None:
    farm = uuid.uuid4().hex
    made = provider.create(sandbox_request(metadata={"farm": farm, "role": "policy"}))
    other = provider.create(sandbox_request(metadata={"farm": farm, "role": "verifier"}))
    try:
        row = provider.describe(made.sandbox_id)
        assert row is not None
        assert row.metadata == {"farm": farm, "role": "policy"}
        assert row.vcpus >= 1
        assert row.memory_mb >= 1
        assert {found.sandbox_id for found in provider.list({"farm": farm})} == {made.sandbox_id, other.sandbox_id}
        assert [found.sandbox_id for found in provider.list({"farm": farm, "role": "policy"})] == [made.sandbox_id]
        assert provider.list({"farm": "another"}) == []
        assert shell(made, "echo $COLOUR; whoami; pwd").split() == ["blue", "user", "/home/user"]
    finally:
        provider.delete(made.sandbox_id)
        provider.delete(other.sandbox_id)


def test_the_same_allocation_names_the_same_sandbox(provider: Provider) -> None:
    wanted = sandbox_request()
    first, second = provider.create(wanted), provider.create(wanted)
    try:
        assert first.sandbox_id == second.sandbox_id
    finally:
        provider.delete(first.sandbox_id)


def test_a_deleted_sandbox_is_absent_and_deleting_it_again_succeeds(provider: Provider) -> None:
    made = provider.create(sandbox_request())
    provider.delete(made.sandbox_id)
    assert provider.describe(made.sandbox_id) is None
    provider.delete(made.sandbox_id)
    with pytest.raises(SandboxGone):
        provider.attach(made.sandbox_id, lifetime_seconds=60)
    with pytest.raises(SandboxGone):
        made.probe()
    with pytest.raises(SandboxGone):
        shell(made, "true")
    with pytest.raises(SandboxGone):
        made.write("a", b"a", timeout_seconds=5)
    with pytest.raises(SandboxGone):
        made.read("a", limit_bytes=10, timeout_seconds=5)


def test_attaching_reaches_the_same_sandbox(provider: Provider, sandbox: Sandbox) -> None:
    attached = provider.attach(sandbox.sandbox_id, lifetime_seconds=300)
    attached.probe()
    attached.write("/home/user/shared", b"one", timeout_seconds=5)
    assert sandbox.read("/home/user/shared", limit_bytes=10, timeout_seconds=5).data == b"one"


def test_a_wrong_key_is_an_authentication_failure(service: LocalService) -> None:
    with pytest.raises(AuthenticationFailed):
        E2BProvider("e2b_wrong", api_url=service.url).create(sandbox_request())


def test_an_unknown_template_is_rejected(provider: Provider) -> None:
    with pytest.raises(CreateRejected):
        provider.create(sandbox_request(template="no-such-template"))


def test_an_impossible_allocation_id_is_rejected_before_anything_is_sent(provider: Provider) -> None:
    with pytest.raises(CreateRejected):
        provider.create(sandbox_request(allocation_id="Not An Id"))


@pytest.mark.parametrize(
    "make",
    [
        "ln -s /etc/passwd {path}",
        "mkdir {path}",
        "mkfifo {path}",
        "ln -s {path}.gone {path}",
        "true",
    ],
    ids=["symlink", "directory", "fifo", "broken symlink", "missing"],
)
def test_what_is_no_regular_file_is_a_missing_artifact(sandbox: Sandbox, make: str) -> None:
    path = f"/home/user/{uuid.uuid4().hex}"
    shell(sandbox, make.format(path=path))
    with pytest.raises(ArtifactMissing):
        sandbox.read(path, limit_bytes=65536, timeout_seconds=5)


def test_a_device_is_a_missing_artifact(sandbox: Sandbox) -> None:
    with pytest.raises(ArtifactMissing):
        sandbox.read("/dev/zero", limit_bytes=65536, timeout_seconds=5)


def test_a_file_is_read_up_to_the_limit_and_refused_past_it(sandbox: Sandbox) -> None:
    data = bytes(range(256)) * 4
    sandbox.write("/home/user/exact", data, timeout_seconds=5)
    assert sandbox.read("/home/user/exact", limit_bytes=len(data), timeout_seconds=5).data == data
    with pytest.raises(ArtifactTooLarge):
        sandbox.read("/home/user/exact", limit_bytes=len(data) - 1, timeout_seconds=5)
    sandbox.write("/home/user/empty", b"", timeout_seconds=5)
    assert sandbox.read("/home/user/empty", limit_bytes=10, timeout_seconds=5).data == b""


_FORKING = """
import os, sys
from workers.sandboxes.provider import E2BProvider
from orchestrator.provider import CreateRequest

provider = E2BProvider(sys.argv[1], api_url=sys.argv[2])
with open("/proc/self/status") as status:
    threads = next(line.split()[1] for line in status if line.startswith("Threads:"))
assert threads == "1", f"importing or constructing started a thread: {threads}"
child = os.fork()
if child == 0:
    made = provider.create(CreateRequest(sys.argv[3], "base", 60, False))
    out = made.run("echo from-child", timeout_seconds=5, output_limit_bytes=100, response_seconds=10).stdout
    provider.delete(made.sandbox_id)
    os._exit(0 if out == b"from-child\\n" else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_nothing_starts_before_a_fork_and_the_child_can_make_requests(service: LocalService) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_FORKING), API_KEY, service.url, f"t-{uuid.uuid4().hex}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


_FLIPPER = """\
import os, time
path = "/home/user/flipping"
with open(path, "wb") as file:
    file.write(bytes(100))
    file.flush()
    print("it flips", flush=True)
    length, due = 50, time.monotonic()
    while True:
        os.ftruncate(file.fileno(), length)
        os.utime(path, ns=(1_700_000_000 * 10**9,) * 2)
        length, due = 150 - length, due + 0.0015
        time.sleep(max(0, due - time.monotonic()))
"""


def test_a_file_whose_writer_hides_his_work_is_read_or_missing(sandbox: Sandbox) -> None:
    """Its entry is the same again and again, and never that of the bytes: no failure of ours comes of it."""
    sandbox.write("/home/user/flipper.py", _FLIPPER.encode(), timeout_seconds=10)
    flipper = shell(sandbox, "python3 flipper.py > log & while [ ! -s log ]; do sleep 0.02; done; echo $!").strip()
    try:
        for _ in range(40):
            with suppress(ArtifactMissing):
                assert len(sandbox.read("/home/user/flipping", limit_bytes=1000, timeout_seconds=10).data) <= 100
    finally:
        shell(sandbox, f"kill {flipper}")


@pytest.mark.parametrize("size", [0, 10, 5000])
def test_a_copy_by_way_of_a_command_is_the_file(sandbox: Sandbox, size: int) -> None:
    """It is the last way to an artifact for which pages come."""
    data = bytes(number % 251 for number in range(size))
    sandbox.write("/home/user/it's a file", data, timeout_seconds=10)
    for limit, held in ((size, data), (size + 1, data), (max(0, size - 1), data[: max(0, size - 1)])):
        reply = shell(sandbox, copying("/home/user/it's a file", limit_bytes=limit))
        copy = parse(reply, "", timeout_seconds=1, limit_bytes=limit)
        assert (copy.stdout, copy.exit_code, copy.stdout_cut) == (held, 0, limit < size)
    gone = parse(shell(sandbox, copying("/nowhere", limit_bytes=9)), "", timeout_seconds=1, limit_bytes=9)
    assert (gone.stdout, gone.exit_code) == (b"", 1)
