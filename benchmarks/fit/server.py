"""A real vLLM server on one CPU core, which nothing else uses."""

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.fit.recording import Limits
from benchmarks.real_vllm import vllm_command
from extproc.demo.processes import Process, answers, free_port
from extproc.poll.scrape import open_session, scrape

MODEL = "model"
"""What the server calls it."""
_TOKEN_BUDGET = 2048
_START_S = 300.0
_STOP_S = 30.0
_SCRAPE_S = 30.0
_CORE = 0


@asynccontextmanager
async def vllm_server(model: Path, max_num_seqs: int, log: Path) -> AsyncIterator[str]:
    """Runs vLLM and yields its ``ip:port``.

    The model has a core to itself, as it would have a GPU. vLLM's other processes, and this one,
    share the other cores.

    Raises:
        ProcessError: it could not be started, or did not get ready.
    """
    port = free_port()
    argv, env = vllm_command(model, port, _CORE, max_num_seqs)
    argv += ["--max-num-batched-tokens", str(_TOKEN_BUDGET)]
    ready = answers(f"http://127.0.0.1:{port}/health")
    process = await Process.start("vllm", argv, log=log, ready=ready, ready_s=_START_S, env=env)
    try:
        _leave_core(process.pid)
        yield f"127.0.0.1:{port}"
    finally:
        await process.stop(_STOP_S)


async def read_limits(server: str, max_num_seqs: int) -> Limits:
    """What the scheduler goes by; the KV cache as the server's metrics have it.

    Raises:
        ScrapeError: the server does not say.
    """
    async with open_session(_SCRAPE_S) as session:
        figures = await scrape(session, server, health=False)
    return Limits(max_num_seqs, _TOKEN_BUDGET, figures.block_size, figures.kv_tokens)


async def read_version(server: str) -> str:
    """The server's version of vLLM."""
    async with open_session(_SCRAPE_S) as session, session.get(f"http://{server}/version") as page:
        return str((await page.json())["version"])


def _leave_core(server: int) -> None:
    """Move everything but the process that runs the model to the other cores."""
    others = os.sched_getaffinity(0) - {_CORE}
    os.sched_setaffinity(0, others)
    for pid in _family(server):
        if not Path(f"/proc/{pid}/comm").read_text().startswith("VLLM::Worker"):
            for thread in os.listdir(f"/proc/{pid}/task"):
                os.sched_setaffinity(int(thread), others)


def _family(pid: int) -> Iterator[int]:
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            yield from _family(int(child))
