"""Measures what it costs to share state as the fleet grows: CPU, Redis commands, bytes and memory.

    python -m benchmarks.scale --replicas 10,100,1000 --routers 1,8

The command runs Redis, a process that writes states in place of the pollers, and routers without
Envoy on one machine. As long as the CPU suffices, the median age of a state is ``--interval`` ÷ 2.
"""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from redis.asyncio import Redis

from benchmarks import arguments
from extproc.lab.harness.processes import Process, free_port, start_redis
from extproc.share.connection import connect

_POOL = "scale"
_PORT = 8000  # of replicas that do not exist
_POLL_S = 0.5
_HEADINGS = (
    "replicas routers interval requests/s | router cores age p50 p99 s late p99 ms "
    "digests/s age ms MB | "
    "Redis cores commands/s MB/s in MB/s out MB held | writer cores"
)
Run = dict[str, Any]
"""Figures of a line. ``each``: a list, the figures of every router. ``redis``: commands and bytes
per second, ``cpu`` in cores, and ``memory`` in bytes beyond those of an empty Redis."""


async def measure(
    replicas: int, routers: int, interval_s: float, rate: float, seconds: float, directory: Path
) -> Run:
    """Runs all processes for ``seconds``; ``rate``: requests a second of all routers together."""
    port = free_port()
    url = f"redis://127.0.0.1:{port}/0"
    common = [url, _POOL, str(replicas)]
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(await start_redis(directory, port))
        redis = await stack.enter_async_context(connect(url, _POOL))
        empty = (await redis.info("memory"))["used_memory"]
        words = [*common, str(_PORT), str(interval_s)]
        writer = await _start("benchmarks.states", words, directory)
        await stack.enter_async_context(writer)
        measured = []
        for number in range(routers):
            words = [*common, str(rate / routers), str(seconds)]
            measured.append(await _start("benchmarks.scale.router", words, directory, number))
            stack.push_async_callback(measured[-1].kill)
        await _connected(redis, routers, measured)
        cpu, before = (server.cpu_s(), writer.cpu_s()), await redis.info("stats")
        began = time.monotonic()
        await asyncio.sleep(seconds)
        after, took = await redis.info("stats"), time.monotonic() - began
        totals = {"commands": "total_commands_processed"}
        totals |= {f"bytes_{way}": f"total_net_{way}put_bytes" for way in ("in", "out")}
        counted = {name: round((after[key] - before[key]) / took) for name, key in totals.items()}
        memory = (await redis.info("memory"))["used_memory"] - empty
        used = {"cpu": (server.cpu_s() - cpu[0]) / took, "memory": memory}
        writer_cpu = (writer.cpu_s() - cpu[1]) / took
        for router in measured:
            await router.wait()
    settings = {"replicas": replicas, "routers": routers, "interval_s": interval_s, "rate": rate}
    each = [json.loads(router.last_lines(1)) for router in measured]
    return settings | {"writer_cpu": writer_cpu, "redis": counted | used, "each": each}


async def _start(module: str, words: Sequence[str], directory: Path, number: int = 0) -> Process:
    argv = [sys.executable, "-m", module, *words]
    log = directory / f"{module}-{number}.log"
    log.unlink(missing_ok=True)
    return await Process.start(module, argv, log=log)


async def _connected(redis: Redis, routers: int, processes: Sequence[Process]) -> None:
    """Waits until every router has subscribed to changes, and then a little longer."""
    channel = f"{{{_POOL}}}:changes"
    while dict(await redis.pubsub_numsub(channel)).get(channel.encode(), 0) < routers:
        if ended := [router for router in processes if not router.running]:
            raise SystemExit(f"a router died: {ended[0].last_lines()}")
        await asyncio.sleep(_POLL_S)
    await asyncio.sleep(3 * _POLL_S)


def _line(run: Run) -> str:
    redis = run["redis"]
    means, most = (
        {name: summarize(router[name] for router in run["each"]) for name in run["each"][0]}
        for summarize in (mean, max)
    )
    return (
        f"{run['replicas']:8} {run['routers']:7} {run['interval_s']:6.2f} s {run['rate']:10.0f} | "
        f"{means['cpu']:12.3f} {means['age_p50_s']:7.3f} {most['age_p99_s']:5.3f} "
        f"{most['late_p99_ms']:11.1f} {means['digests']:9.0f} {means['digest_age_ms']:6.1f} "
        f"{means['memory_mb']:4.0f} | {redis['cpu']:11.3f} {redis['commands']:10} "
        f"{redis['bytes_in'] / 1e6:7.2f} {redis['bytes_out'] / 1e6:8.2f} "
        f"{redis['memory'] / 1e6:7.2f} | {run['writer_cpu']:.3f}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.command("scale", __doc__)
    parser.add_argument("--replicas", type=arguments.counts, default=[10, 100, 1000])
    parser.add_argument("--routers", type=arguments.counts, default=[1, 8])
    parser.add_argument("--interval", type=float, default=0.2, help="seconds between polls [0.2]")
    parser.add_argument("--rate", type=float, default=50.0, help="requests a second in total [50]")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of each line [10]")
    arguments.add_json(parser)
    args = parser.parse_args(argv)
    settings = args.interval, args.rate, args.seconds
    runs = []
    print(_HEADINGS)
    with tempfile.TemporaryDirectory(prefix="extproc-scale-") as directory:
        for sizes in product(args.replicas, args.routers):
            runs.append(asyncio.run(measure(*sizes, *settings, Path(directory))))
            print(_line(runs[-1]), flush=True)
    arguments.keep(args, {"runs": runs})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
