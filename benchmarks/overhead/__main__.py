"""Measures the latency that the router adds and the CPU time of a request, behind a real Envoy.

    python -m benchmarks.overhead --json overhead.json

Envoy runs with the project's own file. A second Envoy, which answers at once, takes the place of
all replicas. Three setups are measured: Envoy alone, Envoy with an ext_proc server that does
nothing, and Envoy with the router.
"""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import arguments
from benchmarks.arguments import about
from benchmarks.overhead.client import ClientReport
from benchmarks.overhead.stack import Cores, OverheadStack, Setup, running_on
from extproc.ground.runtime import allow_many_connections
from extproc.lab.harness.envoy_config import TEMPLATE
from extproc.lab.harness.processes import ProcessError

_CLOSED_LOOP = 64  # requests in flight while the throughput is measured
_RATE = 300  # requests a second while the latency is measured
_RAMP = 1000  # requests a second until all requests of the memory measurement are in flight
HELD_S = 3.0  # time for which all of them stay in flight together
WARM_UP_S = 2.0
_SAMPLE_EVERY_S = 0.1
_HEADER = (
    f"{'':<24}{'latency ms':>10}{'p95':>8}{'p99':>8}{'added p50':>11}{'p95':>8}{'p99':>8}"
    f"{'requests/s':>12}{'router CPU':>12}{'µs/request':>12}{'kB/stream':>11}"
)


@dataclass(frozen=True, slots=True)
class SetupFigures:
    name: str
    rate: ClientReport  # at a fixed rate
    at_once: ClientReport  # at a fixed number of requests in flight
    held: ClientReport  # with many requests in flight, which the upstream holds
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
        """Microseconds of CPU that the router uses for a request, measured while a constant number
        of requests is in flight."""
        return 1e6 * self.cpu_s_at_once / max(self.at_once.answered, 1)

    @property
    def load(self) -> float:
        """Share of its core that the router uses with a constant number of requests in flight."""
        return self.cpu_s_at_once / self.at_once.seconds

    def line(self, alone: "SetupFigures") -> str:
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
        derived = ("requests_per_s", "cpu_us", "load", "failed")
        return asdict(self) | {name: getattr(self, name) for name in derived}


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.command("overhead", __doc__)
    add = parser.add_argument
    sizes = "replicas of the router's fleet [8,100,1000]"
    add("--replicas", type=arguments.counts, default=[8, 100, 1000], metavar="N[,N]", help=sizes)
    add("--seconds", type=float, default=10.0, metavar="S", help="length of each measurement")
    held = "requests in flight while the memory is measured"
    add("--in-flight", type=int, default=5000, metavar="N", help=held)
    other = "also measure Envoy with this file, in alternation with the project's own"
    add("--envoy", type=Path, action="append", default=[], metavar="FILE", help=other)
    add("--rounds", type=int, default=1, metavar="N", help="measure everything N times")
    arguments.add_json(parser)
    args = parser.parse_args(argv)
    first, files = args.replicas[0], [TEMPLATE, *args.envoy]
    setups = [Setup("none", first), *(Setup("proceed", first, file) for file in files)]
    setups += [Setup("extproc", size, file) for size in args.replicas for file in files]
    setups *= args.rounds
    allow_many_connections()  # a request takes two of Envoy's connections
    try:
        arguments.check_outputs(args)
        measured = asyncio.run(_measure_all(setups, args.seconds, args.in_flight))
    except (OSError, ValueError, ProcessError) as error:
        print(f"overhead: {error}", file=sys.stderr)
        return 1
    command = about("benchmarks.overhead", argv)
    setup_figures = [figures.to_json() for figures in measured]
    arguments.keep(args, {"overhead": command, "setups": setup_figures})
    return int(any(figures.failed for figures in measured))


async def _measure_all(
    setups: Sequence[Setup], seconds: float, in_flight: int
) -> list[SetupFigures]:
    """Measures every setup and prints its line, compared with the last setup without a router."""
    cores = Cores.of_this_machine()
    print(cores)
    print(
        f"latency at {_RATE} requests/s; requests/s, CPU and µs with {_CLOSED_LOOP} in flight; "
        f"memory with {in_flight} in flight\n\n{_HEADER}"
    )
    measured: list[SetupFigures] = []
    for setup in setups:
        hold_s = in_flight / _RAMP + HELD_S
        with TemporaryDirectory() as directory, running_on(cores.others):
            async with OverheadStack(setup, Path(directory), cores.router, hold_s) as stack:
                measured.append(await _measure(stack, setup.name, seconds, in_flight))
        if setup.router == "none":
            alone = measured[-1]
        print(measured[-1].line(alone), flush=True)
    return measured


async def _measure(stack: OverheadStack, name: str, seconds: float, in_flight: int) -> SetupFigures:
    await stack.load("--at-once", str(_CLOSED_LOOP), "--seconds", str(WARM_UP_S))
    requests = str(max(round(_RATE * seconds), 2))
    rate = await stack.load("--rate", str(_RATE), "--requests", requests)
    cpu_before_s = stack.cpu_s()
    at_once = await stack.load("--at-once", str(_CLOSED_LOOP), "--seconds", str(seconds))
    cpu_s = stack.cpu_s() - cpu_before_s
    held, memory_kb = await _hold(stack, in_flight)
    return SetupFigures(name, rate, at_once, held, cpu_s, memory_kb / max(held.most_at_once, 1))


async def _hold(stack: OverheadStack, count: int) -> tuple[ClientReport, float]:
    """Keeps ``count`` requests in flight for a while; returns the client's report, and the growth
    of the router's memory in kB."""
    before = most = stack.memory_kb()
    load = asyncio.create_task(stack.load("--hold", "--rate", str(_RAMP), "--requests", str(count)))
    while not load.done():
        await asyncio.sleep(_SAMPLE_EVERY_S)
        most = max(most, stack.memory_kb())
    return await load, most - before


if __name__ == "__main__":
    raise SystemExit(main())
