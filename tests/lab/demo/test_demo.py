"""``extproc demo`` as a process."""

import asyncio
import json
import os
import re
import shutil
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="finds child processes in /proc"),
]

ROOT = Path(__file__).parents[3]


@asynccontextmanager
async def demo(
    *arguments: str | Path, installed: Path | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run the demo of this clone, or of the package in the folder ``installed``."""
    where = {} if installed is None else {"PYTHONPATH": str(installed)}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "extproc", "demo", *map(str, arguments)),
        stdout=PIPE,
        stderr=PIPE,
        cwd=installed,
        env=os.environ | where,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def children(pid: int) -> set[int]:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return {int(child) for thread in threads for child in (thread / "children").read_text().split()}


def running(pids: set[int]) -> set[int]:
    return {pid for pid in pids if Path(f"/proc/{pid}").exists()}


async def line_with(process: asyncio.subprocess.Process, words: str) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        async for line in process.stdout:
            if words in line.decode():
                return line.decode()
    raise AssertionError(f"the demo ended without {words!r}")


async def test_demo_once_compares_two_policies_and_writes_figures(
    tmp_path: Path, installed: Path
) -> None:
    file = tmp_path / "figures.json"
    options = ("--once", "--requests", "16", "--rate", "20", "--json", file)
    async with demo(*options, installed=installed) as process:
        await line_with(process, "Ready after")
        started = children(process.pid)
        stdout, stderr = await process.communicate()
    assert len(started) == 8  # Redis, four replicas, poller, router, Envoy
    assert not running(started)
    lines = r"default-\d+ +→ (fast|slow)-\d +predicted +[\d.]+ s  actual +[\d.]+ s  \w"
    assert re.search(lines, stdout.decode())
    explained = (
        r"\n16 requests, 20/s, under round_robin\nPredictions do not choose here, and may be"
    )
    assert re.search(explained, stdout.decode())
    figures = json.loads(file.read_text())
    assert figures["requests"] == 16
    runs = (figures, turns := figures["round_robin"])
    for run in runs:
        assert (run["ok"], run["routed"] + run["fallback"]) == (16, 16)
        assert sum(run["per_replica"].values()) == 16
    assert all(abs(count - 4) <= turns["fallback"] for count in turns["per_replica"].values())
    # On a busy machine the router may miss its 2 s, after which Envoy chooses the replica.
    all_routed = not any(run["fallback"] for run in runs)
    assert (process.returncode == 0, stderr == b"") == (all_routed, all_routed)
    assert 0 < figures["added_ms_p50"] <= figures["added_ms_p99"]
    assert 0 < figures["ttft_s"]["p50"] <= figures["completion_s"]["p99"]
    assert figures["predicted_error_median"] > 0
    p99 = [run["completion_s"]["p99"] for run in runs]
    assert figures["p99_ratio"] == pytest.approx(p99[1] / p99[0])


async def test_signal_stops_every_process_without_errors() -> None:
    async with demo() as process:
        await line_with(process, "sample-001")
        started = children(process.pid)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        stdout, stderr = await process.communicate()
    assert (process.returncode, stderr) == (0, b"")
    assert stdout.decode().endswith("stopped\n")
    assert len(started) == 8
    assert not running(started)


async def test_reader_that_leaves_ends_the_demo_without_an_error() -> None:
    """As in ``extproc demo | head``."""
    read, write = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "extproc", "demo"), stdout=write, stderr=PIPE
    )
    os.close(write)
    assert await asyncio.to_thread(os.read, read, 1)
    os.close(read)
    _, stderr = await process.communicate()
    assert (process.returncode, stderr) == (141, b"")


@pytest.fixture
async def installed(tmp_path: Path) -> Path:
    """Package installed by pip into a folder, away from the clone."""
    source, installed = tmp_path / "source", tmp_path / "installed"
    source.mkdir()
    for name in ("extproc", "envoy"):
        shutil.copytree(ROOT / name, source / name, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ("--no-deps", "--no-build-isolation", "--target", installed)
    pip = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pip", "install", *options, source), stdout=PIPE, stderr=STDOUT
    )
    output, _ = await pip.communicate()
    assert pip.returncode == 0, output.decode()
    shutil.rmtree(source)
    return installed
