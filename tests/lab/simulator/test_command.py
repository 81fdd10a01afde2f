"""``extproc simulate`` as a process: its flags, its end and its errors."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import ClientError, ClientSession

from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.process


@asynccontextmanager
async def replica(
    *flags: str, python: tuple[str, ...] = ("-m", "extproc")
) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *python,
        "simulate",
        *flags,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


BROKEN = """
from extproc.lab.simulator.engine import Engine

def fail(engine):
    raise RuntimeError("out of blocks")

Engine.complete = fail
from extproc import __main__
"""


async def ready(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    line = (await asyncio.wait_for(process.stdout.readline(), PATIENCE_S)).decode()
    assert line.startswith("replica ready on http://127.0.0.1:")
    return line.split()[-1]


async def error_output(process: asyncio.subprocess.Process) -> str:
    _, errors = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    return errors.decode()


async def test_sigterm_ends_the_process_during_a_stream() -> None:
    async with replica("--port", "0", "--model", "mine", "--speed", "2") as process:
        url = await ready(process)
        body = {"prompt": "a", "max_tokens": 5000, "ignore_eos": True, "stream": True}
        async with (
            ClientSession(url) as session,
            session.get("/v1/models") as models,
            session.post("/v1/completions", json=body) as stream,
        ):
            assert (await models.json())["data"][0]["id"] == "mine"
            assert await stream.content.readline()
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0


async def test_disconnected_clients_are_not_logged() -> None:
    body = {"prompt": "a", "max_tokens": 5000, "ignore_eos": True, "stream": True}
    async with replica("--port", "0", "--speed", "100") as process:
        async with ClientSession(await ready(process)) as session:

            async def hang_up() -> None:
                stream = await session.post("/v1/completions", json=body)
                assert await stream.content.readline()
                stream.close()

            async def all_left() -> bool:
                async with session.get("/simulate/requests") as requests:
                    return not await requests.json()

            await asyncio.gather(*(hang_up() for _ in range(20)))
            await until(all_left)
        process.send_signal(signal.SIGTERM)
        assert await error_output(process) == ""


async def test_failed_engine_ends_the_process() -> None:
    async with replica("--port", "0", python=("-c", BROKEN)) as process:
        async with ClientSession(await ready(process)) as session:
            with pytest.raises(ClientError):
                await asyncio.wait_for(
                    session.post("/v1/completions", json={"prompt": "a"}), PATIENCE_S
                )
        errors = await error_output(process)
        assert process.returncode == 1
        assert errors.startswith("engine failed")
        assert errors.count("RuntimeError: out of blocks") == 1


async def test_taken_address_is_an_error() -> None:
    async with replica("--port", "0") as first:
        port = (await ready(first)).rsplit(":", 1)[1]
        async with replica("--port", port) as second:
            errors = await error_output(second)
            assert second.returncode == 1
            assert f"cannot listen on 127.0.0.1:{port}" in errors
            assert len(errors.splitlines()) == 1
