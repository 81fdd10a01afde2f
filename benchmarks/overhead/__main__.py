"""Measures the latency that the router adds, and the cost of a request, behind a real Envoy.

    python -m benchmarks.overhead --json overhead.json

Envoy runs with the project's own file, in front of an Envoy that answers at once in place of all
replicas: alone, with an ext_proc server that does nothing, and with the router.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import arguments
from benchmarks.arguments import about
from benchmarks.overhead.client import Report
from benchmarks.overhead.stack import Cores, Setup, Stack, running
from benchmarks.overhead.upstream import EVERY_S
from benchmarks.processes import allow_many_connections
from extproc.lab.harness.envoy_config import TEMPLATE
from extproc.lab.harness.processes import ProcessError

_AT_ONCE = 64
_RATE = 300  # requests a second, where the latency is measured
_RAMP = 1000  # requests a second, until all are in flight that are to be held
HELD_S = 3.0  # how long all of them are in flight together
WARM_UP_S = 2.0
_STREAM_RATES = 100, 200  # requests a second
STREAM_WARM_UP_S = 5.0
_SAMPLE_EVERY_S = 0.1
_HEADER = (
    f"{'':<24}{'latency ms':>10}{'p95':>8}{'p99':>8}{'added p50':>11}{'p95':>8}{'p99':>8}"
    f"{'requests/s':>12}{'router CPU':>12}{'µs/request':>12}{'kB/stream':>11}"
)
_STREAM_HEADER = (
    f"{'':<24}{'tokens':>8}{'sent/s':>8}{'requests/s':>12}{'router CPU':>12}{'µs/request':>12}"
)


@dataclass(frozen=True, slots=True)
class Figures:
    name: str
    rate: Report  # at a fixed rate
    at_once: Report  # at a fixed number of requests in flight
    held: Report  # with many requests in flight, held by the upstream
    cpu_s_at_once: float  # of the router's process
    stream_kb: float  # the router's memory for each request in flight

    @property
    def failed(self) -> int:
        return self.rate.failed + self.at_once.failed + self.held.failed

    @property
    def requests_per_s(self) -> float:
        return self.at_once.answered / self.at_once.seconds

    @property
    def cpu_us(self) -> float:
        """Microseconds of the router's CPU for a request, at a fixed number in flight."""
        return 1e6 * self.cpu_s_at_once / max(self.at_once.answered, 1)

    @property
    def load(self) -> float:
        """Share of its core that the router used, at a fixed number in flight."""
        return self.cpu_s_at_once / self.at_once.seconds

    def line(self, alone: "Figures") -> str:
        rate, without = self.rate, alone.rate
        text = f"{self.name:<24}{rate.p50_ms:>10.2f}{rate.p95_ms:>8.2f}{rate.p99_ms:>8.2f}"
        text += f"{rate.p50_ms - without.p50_ms:>11.2f}{rate.p95_ms - without.p95_ms:>8.2f}"
        text += f"{rate.p99_ms - without.p99_ms:>8.2f}{self.requests_per_s:>12.0f}"
        text += f"{self.load:>12.0%}{self.cpu_us:>12.0f}{self.stream_kb:>11.1f}"
        if self.failed:
            text += f"   {self.failed} FAILED"
        if self.held.most_at_once < self.held.answered + self.held.failed:
            text += f"   only {self.held.most_at_once} at once"
        return text

    def to_json(self) -> dict[str, object]:
        return asdict(self) | {
            name: getattr(self, name) for name in ("requests_per_s", "cpu_us", "load", "failed")
        }


@dataclass(frozen=True, slots=True)
class Streamed:
    """Cost of streamed answers of a length."""

    name: str
    tokens: int
    rate: int  # requests a second that were sent
    report: Report
    cpu_s: float  # of the router's process

    @property
    def failed(self) -> int:
        return self.report.failed

    @property
    def cpu_us(self) -> float:
        return 1e6 * self.cpu_s / max(self.report.answered, 1)

    def line(self) -> str:
        per_s, load = (of / self.report.seconds for of in (self.report.answered, self.cpu_s))
        text = f"{self.name:<24}{self.tokens:>8}{self.rate:>8}{per_s:>12.0f}{load:>12.0%}"
        return f"{text}{self.cpu_us:>12.0f}" + (f"   {self.failed} FAILED" if self.failed else "")

    def to_json(self) -> dict[str, object]:
        return asdict(self) | {"cpu_us": self.cpu_us}


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.command("overhead", __doc__)
    add = parser.add_argument
    sizes = "sizes of the router's fleet [8,100,1000]"
    add("--replicas", type=arguments.counts, default=[8, 100, 1000], metavar="N[,N]", help=sizes)
    add("--seconds", type=float, default=10.0, metavar="S", help="length of each measurement")
    held = "requests held for memory's sake"
    add("--in-flight", type=int, default=5000, metavar="N", help=held)
    other = "measure an Envoy with this file, too, by turns with the project's own"
    add("--envoy", type=Path, action="append", default=[], metavar="FILE", help=other)
    add("--rounds", type=int, default=1, metavar="N", help="measure everything so often")
    streams = "instead: what answers of so many chunks cost, beside those of one"
    add("--stream", type=arguments.count, metavar="TOKENS", help=streams)
    arguments.add_json(parser)
    args = parser.parse_args(argv)
    first, files = args.replicas[0], [TEMPLATE, *args.envoy]
    setups = [Setup("none", first), *(Setup("proceed", first, file) for file in files)]
    setups += [Setup("extproc", size, file) for size in args.replicas for file in files]
    setups *= args.rounds
    allow_many_connections()  # each request is two of Envoy's
    measured: Sequence[Figures | Streamed]
    try:
        arguments.check_outputs(args)
        if args.stream:
            measured = asyncio.run(_measure_streams(args.replicas, args.seconds, args.stream))
        else:
            measured = asyncio.run(_measure_all(setups, args.seconds, args.in_flight))
    except (OSError, ValueError, ProcessError) as error:
        print(f"overhead: {error}", file=sys.stderr)
        return 1
    command = about("benchmarks.overhead", sys.argv[1:] if argv is None else argv)
    kinds = ("streamed", "streams") if args.stream else ("overhead", "setups")
    figures = command, [one.to_json() for one in measured]
    arguments.keep(args, dict(zip(kinds, figures, strict=True)))
    return int(any(one.failed for one in measured))


@asynccontextmanager
async def _started(setup: Setup, cores: Cores, hold_s: float = 0.0) -> AsyncIterator[Stack]:
    with TemporaryDirectory() as directory:
        async with running(setup, Path(directory), cores, hold_s) as stack:
            yield stack


async def _measure_all(setups: Sequence[Setup], seconds: float, in_flight: int) -> list[Figures]:
    """Measures every setup, the first of them without a router, and prints its line."""
    cores = Cores.of_this_machine()
    print(cores)
    print(
        f"latency at {_RATE} requests/s; requests/s, CPU and µs at {_AT_ONCE} at once; "
        f"memory at {in_flight} in flight\n\n{_HEADER}"
    )
    measured: list[Figures] = []
    for setup in setups:
        async with _started(setup, cores, in_flight / _RAMP + HELD_S) as stack:
            measured.append(await _measure(stack, setup.name, seconds, in_flight))
        print(measured[-1].line(measured[0]), flush=True)
    return measured


async def _measure(stack: Stack, name: str, seconds: float, in_flight: int) -> Figures:
    await stack.load("--at-once", str(_AT_ONCE), "--seconds", str(WARM_UP_S))
    rate = await stack.load_at(_RATE, seconds)
    begun = stack.cpu_s()
    at_once = await stack.load("--at-once", str(_AT_ONCE), "--seconds", str(seconds))
    cpu_s = stack.cpu_s() - begun
    held, memory_kb = await _hold(stack, in_flight)
    return Figures(name, rate, at_once, held, cpu_s, memory_kb / max(held.most_at_once, 1))


async def _hold(stack: Stack, count: int) -> tuple[Report, float]:
    """Holds requests; returns the growth of the router's memory meanwhile, too, in kB."""
    before = most = stack.memory_kb()
    load = asyncio.create_task(stack.load("--hold", "--rate", str(_RAMP), "--requests", str(count)))
    while not load.done():
        await asyncio.sleep(_SAMPLE_EVERY_S)
        most = max(most, stack.memory_kb())
    return await load, most - before


async def _measure_streams(sizes: Sequence[int], seconds: float, tokens: int) -> list[Streamed]:
    """Measures answers of one chunk and of ``tokens`` by size of fleet and rate."""
    cores = Cores.of_this_machine()
    print(cores)
    print(f"answers that are streamed, a token every {1000 * EVERY_S:.0f} ms\n\n{_STREAM_HEADER}")
    measured: list[Streamed] = []
    for size, length in product(sizes, (1, tokens)):
        setup = Setup("extproc", size, tokens=length)
        async with _started(setup, cores) as stack:
            for rate in _STREAM_RATES:
                await stack.load_at(rate, STREAM_WARM_UP_S)
                begun = stack.cpu_s()
                report = await stack.load_at(rate, seconds)
                cpu_s = stack.cpu_s() - begun
                measured.append(Streamed(setup.name, length, rate, report, cpu_s))
                print(measured[-1].line(), flush=True)
    return measured


if __name__ == "__main__":
    raise SystemExit(main())
