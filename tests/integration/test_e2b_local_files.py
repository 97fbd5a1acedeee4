"""Files in a local sandbox, through the real SDK."""

import os
import time

import httpx
import pytest
from e2b import FileNotFoundException, FileType, InvalidArgumentException, Sandbox
from e2b.exceptions import NotEnoughSpaceException, SandboxException
from e2b.sandbox.filesystem.filesystem import WriteEntry

from tests.support.e2b_local import LocalService

pytest_plugins = ["tests.support.e2b_local"]


def test_text_and_bytes_come_back_as_they_were_written(sandbox: Sandbox) -> None:
    content = bytes(range(256)) * 40_000
    assert sandbox.files.write("deep/er/text.txt", "grüße ☃\n").path == "/home/user/deep/er/text.txt"
    sandbox.files.write("~/bytes", content)
    assert sandbox.files.read("/home/user/deep/er/text.txt") == "grüße ☃\n"
    assert bytes(sandbox.files.read("bytes", format="bytes")) == content
    sandbox.files.write("bytes", b"")
    assert sandbox.files.read("bytes") == ""


def test_several_files_are_written_in_one_call(sandbox: Sandbox) -> None:
    names = ["one.txt", "a folder/zwei ü.txt", 'three "quoted"; \\ 100%25.txt']
    sandbox.files.write_files([WriteEntry(path=name, data=f"--{name}\r\n--") for name in names])
    assert [sandbox.files.read(name) for name in names] == [f"--{name}\r\n--" for name in names]


def test_packed_transfers_are_unpacked(sandbox: Sandbox) -> None:
    content = "pack me " * 100_000
    sandbox.files.write("packed", content, gzip=True)
    assert sandbox.commands.run("wc -c < packed").stdout.strip() == str(len(content))
    assert sandbox.files.read("packed", gzip=True) == content


def test_info_list_and_exists_agree(sandbox: Sandbox) -> None:
    sandbox.files.write("d/f.txt", "12345")
    sandbox.commands.run("chmod 640 d/f.txt; ln -s f.txt d/link; ln -s nowhere d/broken; mkdir d/sub; echo > d/sub/x")
    info = sandbox.files.get_info("d/f.txt")
    assert (info.type, info.size, info.permissions, info.owner) == (FileType.FILE, 5, "-rw-r-----", "user")
    assert abs(info.modified_time.timestamp() - time.time()) < 60
    names = [entry.name for entry in sandbox.files.list("d")]
    assert names == ["f.txt", "link", "sub"]  # the SDK leaves out what is neither file nor directory
    deep = {entry.path for entry in sandbox.files.list("d", depth=2)}
    assert "/home/user/d/sub/x" in deep
    assert sandbox.files.get_info("d/link").symlink_target == "/home/user/d/f.txt"
    assert sandbox.files.exists("d/f.txt")
    assert not sandbox.files.exists("d/none")
    with pytest.raises(InvalidArgumentException):
        sandbox.files.list("d/f.txt")


def test_directories_are_made_renamed_and_removed_with_their_content(sandbox: Sandbox) -> None:
    assert sandbox.files.make_dir("tree/a/b")
    assert not sandbox.files.make_dir("tree/a/b")
    sandbox.files.write("tree/a/b/f", "x")
    sandbox.commands.run("ln -s /usr tree/usr; ln -s /etc/passwd tree/passwd")
    assert sandbox.files.rename("tree", "moved").path == "/home/user/moved"
    assert sandbox.files.read("moved/a/b/f") == "x"
    sandbox.files.remove("moved")
    assert not sandbox.files.exists("moved")
    assert sandbox.files.exists("/usr/bin/env")
    sandbox.files.remove("never-there")
    with pytest.raises(FileNotFoundException):
        sandbox.files.rename("never-there", "x")


def test_a_missing_file_is_not_found_and_a_directory_is_invalid(sandbox: Sandbox) -> None:
    with pytest.raises(FileNotFoundException):
        sandbox.files.read("never-there")
    with pytest.raises(FileNotFoundException):
        sandbox.files.get_info("never-there")
    with pytest.raises(InvalidArgumentException):
        sandbox.files.read("/home")
    with pytest.raises(InvalidArgumentException):
        sandbox.files.write("/home/user", "x")


def test_a_place_that_is_read_only_is_an_error_with_a_reason(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxException, match="Read-only"):
        sandbox.files.write("/usr/new", "x")
    with pytest.raises(SandboxException, match="Read-only"):
        sandbox.files.write("/new", "x")


def test_a_pipe_or_a_device_in_place_of_a_file_is_refused_at_once(sandbox: Sandbox) -> None:
    sandbox.commands.run("mkfifo pipe; ln -s /dev/zero zero; ln -s pipe link")
    for name in ("pipe", "zero", "link"):
        with pytest.raises(SandboxException):
            sandbox.files.read(name, request_timeout=5)
    with pytest.raises(SandboxException):
        sandbox.files.write("pipe", "x", request_timeout=5)
    assert sandbox.files.exists("pipe")


def test_a_link_leads_to_the_sandboxs_own_file_not_the_hosts(sandbox: Sandbox) -> None:
    sandbox.commands.run(
        "rm -f report.py; ln -s /etc/hostname report.py; ln -s /etc/passwd users; ln -s /proc/1/root/etc/passwd up"
    )
    with pytest.raises(FileNotFoundException):
        sandbox.files.read("report.py")
    inside = "root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000::/home/user:/bin/bash\n"
    assert sandbox.files.read("users") == inside
    assert sandbox.files.read("up") == inside


def test_an_upload_beyond_the_limit_is_not_enough_space(sandbox: Sandbox) -> None:
    with pytest.raises(NotEnoughSpaceException):
        sandbox.files.write("/tmp/big", os.urandom(1_000_000) * 60, request_timeout=20)
    assert sandbox.files.write("small", "still works")


def test_files_of_proc_which_claim_to_be_empty_are_read_whole(sandbox: Sandbox) -> None:
    assert "Name:" in sandbox.files.read("/proc/self/status")


def test_metadata_stays_with_its_file(sandbox: Sandbox) -> None:
    sandbox.files.write("tagged", "x", metadata={"author": "me"})
    assert sandbox.files.get_info("tagged").metadata == {"author": "me"}
    sandbox.files.write("tagged", "x")
    assert not sandbox.files.get_info("tagged").metadata


def test_access_needs_the_sandboxs_token_or_a_signature(service: LocalService, sandbox: Sandbox) -> None:
    sandbox.files.write("secret", "s")
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "49983"}
    url = f"{service.url}/files?path=secret&username=user"
    assert httpx.get(url, headers=headers).status_code == 401
    assert httpx.get(url, headers={**headers, "X-Access-Token": "wrong"}).status_code == 401
    assert httpx.get(f"{url}&signature=v1_wrong", headers=headers).status_code == 401
    listing = f"{service.url}/process.Process/List"
    assert httpx.post(listing, headers=headers, json={}).status_code == 401
    assert httpx.get(sandbox.download_url("secret", "user")).text == "s"
    expired = httpx.get(sandbox.download_url("secret", "user", use_signature_expiration=-60))
    assert (expired.status_code, expired.json()["message"]) == (401, "signature is already expired")


def test_a_half_sent_upload_harms_nothing(service: LocalService, sandbox: Sandbox) -> None:
    def half() -> object:
        yield b"x" * 1000
        raise RuntimeError("the client dies")

    token = sandbox._envd_access_token or ""
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "X-Access-Token": token}
    kind = {"Content-Type": "application/octet-stream"}
    with pytest.raises(RuntimeError, match="the client dies"):
        httpx.post(f"{service.url}/files?path=half", headers={**headers, **kind}, content=half())  # type: ignore[arg-type]
    assert sandbox.files.write("whole", "w")
    assert sandbox.files.read("whole") == "w"


_ATTACH = """\
import os
for number in range(20):
    os.setxattr(b"tagged", b"user.e2b.k%d" % number, bytes([255]) * 30_000)
"""


def test_metadata_without_end_is_told_as_far_as_it_fits(sandbox: Sandbox) -> None:
    sandbox.files.write("attach.py", _ATTACH)
    sandbox.files.write("tagged", "x")
    attached = sandbox.commands.run("python3 attach.py; true")
    if "Error" in attached.stderr:
        pytest.skip(f"this file system does not hold it: {attached.stderr[-100:]}")
    told = sandbox.files.get_info("tagged").metadata
    assert told
    assert sum(map(len, told.values())) <= 64 * 1024
    sandbox.files.write("tagged", "y")
    assert not sandbox.files.get_info("tagged").metadata, "all of it went with the old content"
