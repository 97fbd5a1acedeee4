"""The local sandbox service through the SDK's asynchronous client."""

import asyncio

import pytest
from e2b import AsyncSandbox, CommandExitException, SandboxQuery, TimeoutException
from e2b.exceptions import SandboxNotFoundException

from tests.support.e2b_local import API_KEY, LocalService

pytest_plugins = ["tests.support.e2b_local"]


async def _create(service: LocalService, **options: object) -> AsyncSandbox:
    where = {"api_url": service.url, "sandbox_url": service.url, "api_key": API_KEY}
    return await AsyncSandbox.create(**{"timeout": 60, "request_timeout": 10, **where, **options})  # type: ignore[arg-type]


def test_commands_and_files_work(service: LocalService) -> None:
    async def scenario() -> None:
        box = await _create(service)
        await box.files.write("a/b.txt", "héllo")
        assert await box.files.read("a/b.txt") == "héllo"
        assert (await box.commands.run("cat a/b.txt")).stdout == "héllo"
        with pytest.raises(CommandExitException):
            await box.commands.run("exit 7")
        handle = await box.commands.run("cat", background=True, stdin=True)
        await handle.send_stdin("in and out")
        await handle.close_stdin()
        assert (await handle.wait()).stdout == "in and out"
        await box.kill()

    asyncio.run(scenario())


def test_many_commands_at_once_share_a_sandbox(service: LocalService) -> None:
    async def scenario() -> None:
        box = await _create(service)
        results = await asyncio.gather(*(box.commands.run(f"sleep 0.1; echo {n}") for n in range(12)))
        assert [result.stdout for result in results] == [f"{n}\n" for n in range(12)]
        await box.kill()

    asyncio.run(scenario())


def test_many_sandboxes_at_once_are_listed_and_killed(service: LocalService) -> None:
    async def scenario() -> None:
        boxes = await asyncio.gather(*(_create(service, metadata={"async": "many"}) for _ in range(12)))
        where = {"api_url": service.url, "api_key": API_KEY}
        rows = await AsyncSandbox.list(query=SandboxQuery(metadata={"async": "many"}), **where).next_items()  # type: ignore[arg-type]
        assert {row.sandbox_id for row in rows} == {box.sandbox_id for box in boxes}
        assert all(await asyncio.gather(*(box.kill() for box in boxes)))
        assert not any(await asyncio.gather(*(box.kill() for box in boxes)))
        with pytest.raises(SandboxNotFoundException):
            await boxes[0].get_info()

    asyncio.run(scenario())


def test_a_killed_sandbox_ends_its_streams(service: LocalService) -> None:
    async def scenario() -> None:
        box = await _create(service)
        handle = await box.commands.run("sleep 1000", background=True)
        await box.kill()
        with pytest.raises(TimeoutException):
            await handle.wait()
        assert not await box.is_running()

    asyncio.run(scenario())
