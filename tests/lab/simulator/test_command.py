"""The command, as a process."""

import asyncio
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import ClientError, ClientSession

from extproc.predict.step import DEFAULT_PROFILE, hardware_profile
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


async def problem(process: asyncio.subprocess.Process) -> str:
    _, errors = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    return errors.decode()


async def test_it_serves_until_sigterm_even_while_streaming() -> None:
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


async def test_clients_that_hang_up_in_the_middle_of_a_stream_are_not_in_the_log() -> None:
    body = {"prompt": "a", "max_tokens": 5000, "ignore_eos": True, "stream": True}
    async with replica("--port", "0", "--speed", "100") as process:
        async with ClientSession(await ready(process)) as session:

            async def hang_up() -> None:
                stream = await session.post("/v1/completions", json=body)
                assert await stream.content.readline()
                stream.close()

            async def nobody_left() -> bool:
                async with session.get("/simulate/requests") as requests:
                    return not await requests.json()

            await asyncio.gather(*(hang_up() for _ in range(20)))
            await until(nobody_left)
        process.send_signal(signal.SIGTERM)
        assert await problem(process) == ""


@pytest.mark.parametrize(
    ("flags", "status", "answer"),
    [
        (["--enable-prompt-tokens-details"], 200, '"prompt_tokens_details": {"cached_tokens": 0}'),
        (["--max-num-queued-reqs", "0"], 503, "The engine is currently busy"),
        (["--max-num-queued-tokens", "0"], 503, "its prefill token backlog limit"),
    ],
)
async def test_flags_of_vllm_change_answers(flags: list[str], status: int, answer: str) -> None:
    async with (
        replica("--port", "0", *flags) as process,
        ClientSession(await ready(process)) as session,
        session.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}) as response,
    ):
        assert response.status == status
        assert answer in await response.text()


async def test_old_counters_and_a_cold_start_are_flags() -> None:
    async with (
        replica("--port", "0", "--old-counters", "--cold-steps", "1000") as process,
        ClientSession(await ready(process)) as session,
        session.post("/v1/completions", json={"prompt": "a", "max_tokens": 50, "ignore_eos": True}),
        session.get("/metrics") as response,
    ):
        page = await response.text()
        assert "prefix_cache_hits_total" in page
        assert "prompt_tokens_cached_total" not in page
        step = hardware_profile(DEFAULT_PROFILE).step
        (took,) = re.findall(r"e2e_request_latency_seconds_sum{.*} (.*)", page)
        assert float(took) > 1.9 * 50 * step.step_time(prefill=0, batch=1, kv=1)


async def test_it_ends_when_its_engine_fails() -> None:
    async with replica("--port", "0", python=("-c", BROKEN)) as process:
        async with ClientSession(await ready(process)) as session:
            with pytest.raises(ClientError):
                await asyncio.wait_for(
                    session.post("/v1/completions", json={"prompt": "a"}), PATIENCE_S
                )
        errors = await problem(process)
        assert process.returncode == 1
        assert errors.startswith("engine failed")
        assert errors.count("RuntimeError: out of blocks") == 1


async def test_an_address_that_is_taken() -> None:
    async with replica("--port", "0") as first:
        port = (await ready(first)).rsplit(":", 1)[1]
        async with replica("--port", port) as second:
            errors = await problem(second)
            assert second.returncode == 1
            assert f"cannot listen on 127.0.0.1:{port}" in errors
            assert len(errors.splitlines()) == 1
