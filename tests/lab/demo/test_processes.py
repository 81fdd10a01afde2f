"""Child processes start, fail and stop as documented, and leave nothing running."""

import sys
from pathlib import Path

import pytest
from redis.asyncio import Redis

from extproc.lab.harness.processes import (
    Process,
    ProcessError,
    envoy_binary,
    free_port,
    listening,
    start_redis,
)
from tests.waiting import until

pytestmark = pytest.mark.process

IGNORES_SIGTERM = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
signal.pause()
"""

STARTS_REDIS_AND_IS_KILLED = """
import asyncio, os, pathlib, signal, sys
from extproc.lab.harness.processes import start_redis

async def main():
    await start_redis(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def test_redis_starts_and_stops(tmp_path: Path) -> None:
    port = free_port()
    async with await start_redis(tmp_path, port) as process, Redis(port=port) as redis:
        assert (await redis.info("server"))["process_id"] == process.pid
        with pytest.raises(ProcessError, match=f"port {port} is taken"):
            await start_redis(tmp_path, port)
    assert process.returncode == 0
    assert not await listening(port)()


async def test_error_of_a_dead_process_has_its_last_lines(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "print('first'); raise SystemExit('out of paper')"]
    with pytest.raises(ProcessError, match=r"(?s)printer ended with status 1.*out of paper"):
        await Process.start(
            "printer", argv, log=tmp_path / "printer.log", ready=listening(free_port())
        )


async def test_process_that_is_not_ready_in_time_is_killed(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", IGNORES_SIGTERM]
    log = tmp_path / "deaf.log"
    with pytest.raises(ProcessError, match=r"deaf was not ready after 0\.05 s"):
        await Process.start("deaf", argv, log=log, ready=listening(free_port()), ready_s=0.05)


async def test_missing_program_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ProcessError, match="cannot start ghost"):
        await Process.start("ghost", [tmp_path / "ghost"], log=tmp_path / "ghost.log")


async def test_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "deaf.log"

    async def deaf() -> bool:
        return "deaf" in log.read_text()

    argv = [sys.executable, "-c", IGNORES_SIGTERM]
    process = await Process.start("deaf", argv, log=log, ready=deaf)
    await process.stop(timeout_s=0.05)
    assert process.returncode == -9


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
async def test_child_ends_with_its_killed_parent(tmp_path: Path) -> None:
    port = free_port()
    argv: list[str | Path] = [sys.executable, "-c", STARTS_REDIS_AND_IS_KILLED, tmp_path, str(port)]
    parent = await Process.start("parent", argv, log=tmp_path / "parent.log")
    assert await parent.wait() == -9, parent.last_lines()

    async def ended() -> bool:
        return not await listening(port)()

    await until(ended)


def test_folder_envoy_does_not_hide_the_module_of_the_wheel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3])
    assert envoy_binary().is_file()
