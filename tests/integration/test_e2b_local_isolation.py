"""What a local sandbox must not see, reach, or use up."""

import os
import socket
from pathlib import Path

import pytest
from e2b import CommandExitException, Sandbox, TimeoutException
from e2b.exceptions import SandboxNotFoundException

from tests.support.e2b_local import LocalService
from tests.support.processes import children
from tests.support.waiting import wait_until

pytest_plugins = ["tests.support.e2b_local"]


def test_the_hosts_environment_is_invisible(sandbox: Sandbox) -> None:
    script = "env; for f in /proc/[0-9]*/environ /proc/[0-9]*/cmdline; do tr '\\0' '\\n' < $f; done 2>/dev/null; true"
    seen = sandbox.commands.run(script).stdout
    assert "PATH=" in seen
    for secret in ("hunter2", "SECRET_OF_THE_HOST", "PYTHONPATH", "LD_LIBRARY_PATH", str(Path(__file__).parents[2])):
        assert secret not in seen


def test_the_hosts_files_are_unreadable_and_the_root_is_read_only(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "host").write_text("host")
    for path in ("/etc/shadow", "/etc/ssh", "/var/log", str(tmp_path / "host"), "/proc/1/root/etc/shadow", "/sys"):
        with pytest.raises(CommandExitException):
            sandbox.commands.run(f"ls {path}")
    assert "root" not in sandbox.commands.run("cat /proc/self/status | grep -E '^(Uid|Gid)'").stdout
    for place in ("/x", "/etc/x", "/usr/x", "/dev/x", "/opt/farm/lib/agent/x", "/proc/sys/kernel/hostname"):
        with pytest.raises(CommandExitException):
            sandbox.commands.run(f"echo x > {place}")


def test_no_inherited_descriptor_leads_to_the_host(sandbox: Sandbox) -> None:
    targets = sandbox.commands.run("for f in /proc/[0-9]*/fd/*; do readlink $f; done; true").stdout.split()
    assert targets
    allowed = ("/dev/null", "pipe:", "socket:", "anon_inode:", "/dev/pts", "/proc/")
    assert [target for target in targets if not target.startswith(allowed)] == []


def test_uid_1000_inside_is_not_root_outside(service: LocalService, sandbox: Sandbox) -> None:
    assert sandbox.is_running()
    jails = children(service.process.pid)
    owners = {Path(f"/proc/{inner}").stat().st_uid for jail in jails for inner in children(jail)}
    assert owners
    assert 0 not in owners


def test_no_capability_and_no_further_user_namespace(sandbox: Sandbox) -> None:
    status = sandbox.commands.run("grep -E '^(CapEff|CapBnd|NoNewPrivs)' /proc/self/status").stdout.split()
    assert status == ["CapEff:", "0" * 16, "CapBnd:", "0" * 16, "NoNewPrivs:", "1"]
    with pytest.raises(CommandExitException):
        sandbox.commands.run("unshare --user true")


@pytest.mark.parametrize("allow", [None, True, False])
def test_there_is_no_network_whatever_is_asked_for(service: LocalService, allow: bool | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        box = service.create(**({} if allow is None else {"allow_internet_access": allow}))
        assert box.commands.run("cut -d: -f1 /proc/net/dev | tail -n +3").stdout.split() == ["lo"]
        for address in (listener.getsockname(), ("127.0.0.1", int(service.url.rpartition(":")[2])), ("1.1.1.1", 53)):
            script = f'python3 -c "import socket; socket.create_connection({address!r}, 2)"'
            with pytest.raises(CommandExitException):
                box.commands.run(script)
        box.kill()


def test_sandboxes_do_not_see_one_another(service: LocalService, sandbox: Sandbox) -> None:
    other = service.create()
    other.files.write("/tmp/mine", "x")
    other.commands.run("sleep 987", background=True)
    assert not sandbox.files.exists("/tmp/mine")
    assert "987" not in sandbox.commands.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '").stdout
    assert "987" in other.commands.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '").stdout
    other.kill()


def test_a_gigabyte_written_is_bounded_and_harms_only_its_sandbox(service: LocalService, sandbox: Sandbox) -> None:
    fill = "for i in 1 2 3 4 5 6 7 8; do head -c 128M /dev/zero > {place}/big$i; done 2>&1; true"
    for place, limit_mb in (("/home/user", 96), ("/tmp", 32), ("/dev/shm", 16), ("/root", 16)):
        sandbox.commands.run(fill.format(place=place), timeout=30)
        used = int(sandbox.commands.run(f"du -sm {place} | cut -f1").stdout)
        assert used <= limit_mb
    with pytest.raises(CommandExitException):
        sandbox.commands.run("cp /dev/zero /home/user/more")
    assert sandbox.is_running()
    sandbox.commands.run("rm /home/user/big*")
    assert sandbox.files.write("again", "works")
    other = service.create()
    assert other.files.write("fine", "works")
    other.kill()


def test_memory_of_a_process_is_bounded(sandbox: Sandbox) -> None:
    with pytest.raises(CommandExitException) as caught:
        sandbox.commands.run("python3 -c 'bytearray(600_000_000)'")
    assert "MemoryError" in caught.value.stderr


def test_a_fork_bomb_is_its_own_sandboxs_trouble_only(service: LocalService) -> None:
    bomber, neighbour = service.create(), service.create()
    bomb = "python3 -c 'import os, time\nwhile True:\n  try: os.fork()\n  except OSError: time.sleep(0.01)'"
    bomber.commands.run(f"({bomb}) > /dev/null 2>&1 &")
    wait_until(lambda: len(bomber.files.list("/proc")) > 90, description="the bomb went off")
    assert neighbour.commands.run("for i in 1 2 3 4 5 6 7 8; do sleep 0.01 & done; wait; echo fine").stdout == "fine\n"
    fresh = service.create()
    assert fresh.commands.run("echo fine").stdout == "fine\n"
    assert bomber.files.write("x", "y")
    for box in (bomber, neighbour, fresh):
        assert box.kill()


def test_every_process_dies_with_its_sandbox(service: LocalService) -> None:
    before = set(children(service.process.pid))
    box = service.create()
    box.commands.run("setsid nohup sh -c 'trap \"\" TERM; sleep 1000' > /dev/null 2>&1 & echo ok")
    (jail,) = set(children(service.process.pid)) - before
    (init,) = children(jail)
    inner = [init, *children(init)]
    assert len(inner) > 1
    box.kill()
    # Not "soon": the answer to the kill is the confirmation.
    assert [pid for pid in (jail, *inner) if Path("/proc", str(pid)).exists()] == []


def test_the_agent_cannot_be_signalled_by_commands(sandbox: Sandbox) -> None:
    sandbox.commands.run("kill -KILL 1; kill -STOP 1; kill -INT 1; kill -TERM 1; kill -CHLD 1; true")
    assert sandbox.commands.run("echo fine").stdout == "fine\n"


def test_a_sandbox_whose_agent_dies_is_gone_and_no_other(service: LocalService, sandbox: Sandbox) -> None:
    before = set(children(service.process.pid))
    victim = service.create()
    handle = victim.commands.run("sleep 1000", background=True)
    (jail,) = set(children(service.process.pid)) - before
    os.kill(children(jail)[0], 9)
    with pytest.raises(TimeoutException):
        handle.wait()
    assert not victim.is_running()
    with pytest.raises(SandboxNotFoundException):
        victim.get_info()
    assert service.events_of(victim.sandbox_id) == ["created", "lost"]
    assert sandbox.is_running()


def test_an_idle_sandbox_takes_little_memory(service: LocalService) -> None:
    before = set(children(service.process.pid))
    box = service.create()
    (jail,) = set(children(service.process.pid)) - before
    pss_kb = 0
    for pid in (jail, *children(jail)):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        pss_kb += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    assert pss_kb < 15_000
    box.kill()
