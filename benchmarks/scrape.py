"""What scraping costs: CPU time per metrics page, and of a whole poller.

    python -m benchmarks.scrape --replicas 100 --interval 0.2

First a page of a real vLLM is read again and again. Then a poller, a process of its own with a
Redis of its own, scrapes a server that answers on as many loopback addresses as there are replicas
(Linux), with a page of 60 kB whose counters move.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time

from benchmarks import arguments
from benchmarks.pages import get_text
from extproc.demo.processes import Process, answers, free_port, listening, start_redis
from extproc.poll.metrics_text import read_metrics

PAGE = Path(__file__).parent.parent / "tests" / "data" / "vllm" / "metrics-busy.txt"
_MOVING = {
    b"iteration_tokens_total_count": 50,
    b"prompt_tokens_total": 2000,
    b"generation_tokens_total": 200,
}
"""Counters, and what a second adds to them."""
_ACCOUNT = (
    "process_cpu_seconds_total",
    'extproc_poll_scrapes_total{result="ok"}',
    'extproc_poll_replicas_healthy{pool="default"}',
)
_READS = 2000
_WARM_UP_S = 3.0
_MODELS = b'{"data":[{"id":"tiny","max_model_len":4096}]}'


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.command("scrape", __doc__)
    parser.add_argument("--replicas", type=int, default=100, help="250 at most")
    parser.add_argument("--interval", type=float, default=0.2, help="seconds between two scrapes")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to measure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve:
        asyncio.run(_serve(args.serve))
        return 0
    cost = asyncio.run(measure(args.replicas, args.interval, args.seconds))
    print("a page of {page_bytes} bytes: {page_us:.0f} µs of CPU to read".format(**cost))
    print(
        "{replicas} replicas, {scrapes_per_s:.0f} scrapes/s: {core:.1%} of a core, "
        "{scrape_us:.0f} µs a scrape".format(**cost)
    )
    if args.json:
        args.json.write_text(json.dumps(cost, indent=2) + "\n")
    return 0


async def measure(replicas: int, interval_s: float, seconds: float) -> dict[str, float]:
    """Runs the poller against the server and reads its own account of CPU time.

    ``page_us``: CPU to read one page; ``core``: CPU seconds a second of the whole poller, and
    ``scrape_us`` the same for each scrape: HTTP, page, calibration, JSON and Redis.
    """
    page = PAGE.read_bytes()
    port, admin = free_port(), free_port()
    with TemporaryDirectory() as directory:
        work = Path(directory)
        redis_port = free_port()
        argv = [sys.executable, "-m", "benchmarks.scrape", "--serve", str(port)]
        config = {
            "replicas": [f"127.0.0.{number}:{port}" for number in range(1, replicas + 1)],
            "redis": {"url": f"redis://127.0.0.1:{redis_port}/0"},
            "poll": {"interval_s": interval_s, "admin": f"127.0.0.1:{admin}"},
        }
        (work / "extproc.yaml").write_text(json.dumps(config))
        poll = [sys.executable, "-m", "extproc", "poll", "--config", str(work / "extproc.yaml")]
        ready = answers(f"http://127.0.0.1:{admin}/healthz")
        async with (
            await start_redis(work / "redis", redis_port),
            await Process.start("server", argv, log=work / "server.log", ready=listening(port)),
            await Process.start("poller", poll, log=work / "poller.log", ready=ready),
        ):
            await asyncio.sleep(_WARM_UP_S)
            before, began = await _account(admin), perf_counter()
            await asyncio.sleep(seconds)
            after, took = await _account(admin), perf_counter() - began
    cpu, scrapes = after[0] - before[0], after[1] - before[1]
    if after[2] < replicas:
        raise SystemExit(f"only {after[2]:.0f} of {replicas} replicas were scraped well")
    return {
        "page_bytes": len(page),
        "page_us": _page_us(page),
        "replicas": replicas,
        "scrapes_per_s": scrapes / took,
        "core": cpu / took,
        "scrape_us": cpu / scrapes * 1e6,
    }


async def _account(admin: int) -> list[float]:
    """CPU seconds, scrapes and healthy replicas of the poller."""
    page = await get_text(f"http://127.0.0.1:{admin}/metrics")
    values = dict(line.rsplit(maxsplit=1) for line in page.splitlines() if line[0] != "#")
    return [float(values[name]) for name in _ACCOUNT]


def _page_us(page: bytes) -> float:
    """The median of some batches: other processes of the machine disturb single ones."""
    batches = []
    for _ in range(10):
        began = process_time()
        for _ in range(_READS // 10):
            read_metrics(page)
        batches.append((process_time() - began) / (_READS // 10))
    return median(batches) * 1e6


class _Pages:
    """The sample page, its counters moving on."""

    def __init__(self, page: bytes) -> None:
        for name in _MOVING:
            begin = page.index(b"\nvllm:" + name + b"{")
            value = page.index(b"} ", begin) + 2
            end = page.index(b"\n", value)
            page = page[:value] + b"\0" + name + b"\0" + page[end:]
        self._parts = page.split(b"\0")
        self._began = perf_counter()

    def next(self) -> bytes:
        seconds = perf_counter() - self._began
        return b"".join(
            b"%d.0" % (_MOVING[part] * seconds) if part in _MOVING else part for part in self._parts
        )


async def _serve(port: int) -> None:
    """A replica on whatever address it is asked."""
    pages = _Pages(PAGE.read_bytes())

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                path = (await reader.readuntil(b"\r\n\r\n")).split(maxsplit=2)[1]
                if path == b"/metrics":  # in one chunk, as vLLM's server sends it
                    page = pages.next()
                    head = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(page)
                    writer.write(b"HTTP/1.1 200 OK\r\n" + head + page + b"\r\n0\r\n\r\n")
                else:
                    body = _MODELS if path == b"/v1/models" else b""
                    head = b"Content-Length: %d\r\n\r\n" % len(body)
                    writer.write(b"HTTP/1.1 200 OK\r\n" + head + body)

    async with await asyncio.start_server(answer, "0.0.0.0", port) as server:
        await server.serve_forever()


if __name__ == "__main__":
    raise SystemExit(main())
