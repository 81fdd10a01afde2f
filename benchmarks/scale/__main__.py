"""What sharing costs as the fleet grows: CPU of routers and Redis, operations, bytes, memory.

    python -m benchmarks.scale --replicas 10,100,1000 --routers 1,8

A real Redis, one process for the pollers (it writes as they do, and scrapes nothing) and one a
router, which has everything but Envoy. All of it on one machine: a line on which the cores were not
enough says so by the age of what routers know, half an interval where nothing is late.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from redis.asyncio import Redis

from benchmarks.scale.router import RouterFigures
from extproc.demo.processes import Process, free_port, start_redis
from extproc.store.connection import connect

_POOL = "scale"
_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class RedisFigures:
    """What Redis did, each second, and what it holds."""

    cpu: float
    """Cores."""
    commands: int
    bytes_in: int
    bytes_out: int
    memory: int
    """Bytes beyond those of an empty one."""


@dataclass(frozen=True, slots=True)
class Run:
    """One line of the table."""

    replicas: int
    routers: int
    interval_s: float
    rate: float
    """Requests a second, all routers together."""
    writer_cpu: float
    redis: RedisFigures
    each: list[RouterFigures]


async def measure(
    replicas: int, routers: int, interval_s: float, rate: float, seconds: float, directory: Path
) -> Run:
    """Run the parts for a while, and return what they took."""
    port = free_port()
    url = f"redis://127.0.0.1:{port}/0"
    async with await start_redis(directory, port) as server, connect(url, _POOL) as redis:
        empty = (await redis.info("memory"))["used_memory"]
        arguments = [url, _POOL, str(replicas), str(interval_s)]
        writing = await _start("writer", arguments, directory)
        async with writing:
            arguments = [url, _POOL, str(replicas), str(rate / routers), str(seconds)]
            following = [
                await _start("router", arguments, directory, number) for number in range(routers)
            ]
            try:
                await _connected(redis, routers, following)
                redis_figures, writer_cpu = await _watch(
                    redis, server.pid, writing.pid, empty, seconds
                )
                for router in following:
                    await router.wait()
            finally:
                for router in following:
                    await router.kill()
    each = [RouterFigures(**json.loads(router.last_lines(1))) for router in following]
    return Run(replicas, routers, interval_s, rate, writer_cpu, redis_figures, each)


async def _start(part: str, arguments: Sequence[str], directory: Path, number: int = 0) -> Process:
    argv = [sys.executable, "-m", f"benchmarks.scale.{part}", *arguments]
    log = directory / f"{part}-{number}.log"
    log.unlink(missing_ok=True)
    return await Process.start(part, argv, log=log)


async def _connected(redis: Redis, routers: int, following: Sequence[Process]) -> None:
    """Return when every router hears of changes, and has had a moment to get going."""
    channel = f"{{{_POOL}}}:changes"
    while dict(await redis.pubsub_numsub(channel)).get(channel.encode(), 0) < routers:
        if ended := [router for router in following if not router.running]:
            raise SystemExit(f"a router ended: {ended[0].last_lines()}")
        await asyncio.sleep(_POLL_S)
    await asyncio.sleep(3 * _POLL_S)


async def _watch(
    redis: Redis, server: int, writer: int, empty: int, seconds: float
) -> tuple[RedisFigures, float]:
    cpu = _cpu(server), _cpu(writer)
    before, began = await redis.info("stats"), time.monotonic()
    await asyncio.sleep(seconds)
    after, took = await redis.info("stats"), time.monotonic() - began
    memory = (await redis.info("memory"))["used_memory"]

    def rate(name: str) -> int:
        return round(float(after[name] - before[name]) / took)

    figures = RedisFigures(
        cpu=(_cpu(server) - cpu[0]) / took,
        commands=rate("total_commands_processed"),
        bytes_in=rate("total_net_input_bytes"),
        bytes_out=rate("total_net_output_bytes"),
        memory=memory - empty,
    )
    return figures, (_cpu(writer) - cpu[1]) / took


def _cpu(pid: int) -> float:
    """Seconds of CPU a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


_HEADINGS = (
    "replicas routers interval requests/s | router cores age p50 p99 s late p99 ms "
    "digests/s age ms MB | "
    "Redis cores commands/s MB/s in MB/s out MB held | writer cores"
)


def _line(run: Run) -> str:
    each, redis = run.each, run.redis
    return (
        f"{run.replicas:8} {run.routers:7} {run.interval_s:6.2f} s {run.rate:10.0f} | "
        f"{mean(one.cpu for one in each):12.3f} {mean(one.age_p50_s for one in each):7.3f} "
        f"{max(one.age_p99_s for one in each):5.3f} {max(one.late_p99_ms for one in each):11.1f} "
        f"{mean(one.digests for one in each):9.0f} {mean(one.digest_age_ms for one in each):6.1f} "
        f"{mean(one.memory_mb for one in each):4.0f} | {redis.cpu:11.3f} {redis.commands:10} "
        f"{redis.bytes_in / 1e6:7.2f} {redis.bytes_out / 1e6:8.2f} {redis.memory / 1e6:7.2f} | "
        f"{run.writer_cpu:.3f}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measures every size of fleet with every number of routers."""
    parser = argparse.ArgumentParser(prog="scale", description=__doc__.partition("\n")[0])
    parser.add_argument("--replicas", type=_numbers, default=[10, 100, 1000])
    parser.add_argument("--routers", type=_numbers, default=[1, 8])
    parser.add_argument("--interval", type=float, default=0.2, help="seconds between polls [0.2]")
    parser.add_argument("--rate", type=float, default=50.0, help="requests a second, in all [50]")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each line [10]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    args = parser.parse_args(argv)
    runs: list[dict[str, Any]] = []
    print(_HEADINGS)
    with tempfile.TemporaryDirectory(prefix="extproc-scale-") as directory:
        for replicas, routers in product(args.replicas, args.routers):
            run = asyncio.run(
                measure(replicas, routers, args.interval, args.rate, args.seconds, Path(directory))
            )
            print(_line(run), flush=True)
            runs.append(asdict(run))
    if args.json:
        args.json.write_text(json.dumps({"runs": runs}, indent=2) + "\n")
    return 0


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    raise SystemExit(main())
