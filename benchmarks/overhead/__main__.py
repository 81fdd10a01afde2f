"""What the router adds to a request, and what a request costs it, behind a real Envoy.

    python -m benchmarks.overhead --json overhead.json

Envoy runs with the project's own file, in front of an Envoy that answers at once in place of all
replicas: alone, with an ext_proc server that does nothing, and with the router.
"""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import arguments
from benchmarks.about import about
from benchmarks.overhead.client import Report
from benchmarks.overhead.stack import Cores, Setup, Stack, running
from benchmarks.overhead.streams import RATES, measure_streams
from benchmarks.processes import allow_many_connections
from extproc.lab.harness.envoy_config import TEMPLATE
from extproc.lab.harness.processes import ProcessError

_AT_ONCE = 64
_RATE = 300  # requests a second, where the latency is measured
_RAMP = 1000  # requests a second, until all are in flight that are to be held
HELD_S = 3.0  # how long all of them are in flight together
WARM_UP_S = 2.0
_SAMPLE_EVERY_S = 0.1
_HEADER = (
    f"{'':<24}{'latency ms':>10}{'p95':>8}{'p99':>8}{'added p50':>11}{'p95':>8}{'p99':>8}"
    f"{'requests/s':>12}{'router CPU':>12}{'µs/request':>12}{'kB/stream':>11}"
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
        """The router's CPU for one request, at a fixed number in flight; microseconds."""
        return 1e6 * self.cpu_s_at_once / max(self.at_once.answered, 1)

    @property
    def router_load(self) -> float:
        """Share of its core that the router used, at a fixed number in flight."""
        return self.cpu_s_at_once / self.at_once.seconds


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.command("overhead", __doc__)
    sizes = "sizes of the router's fleet [8,100,1000]"
    parser.add_argument(
        "--replicas", type=arguments.counts, default=[8, 100, 1000], metavar="N[,N]", help=sizes
    )
    parser.add_argument(
        "--seconds", type=float, default=10.0, metavar="S", help="length of each measurement"
    )
    parser.add_argument(
        "--in-flight", type=int, default=5000, metavar="N", help="requests held for memory's sake"
    )
    parser.add_argument(
        "--envoy", type=Path, action="append", default=[], metavar="FILE",
        help="measure an Envoy with this file, too, by turns with the project's own",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=int, default=1, metavar="N", help="measure everything so often"
    )
    parser.add_argument(
        "--stream",
        type=arguments.count,
        metavar="TOKENS",
        help="instead: what answers of so many chunks cost, beside those of one",
    )
    arguments.add_outputs(parser)
    args = parser.parse_args(argv)
    first, files = args.replicas[0], [TEMPLATE, *args.envoy]
    setups = [Setup("none", first), *(Setup("proceed", first, file) for file in files)]
    setups += [Setup("extproc", size, file) for size in args.replicas for file in files]
    setups *= args.rounds
    if args.stream and args.report:
        parser.error("--stream has no page: leave --report out, or take --json")
    allow_many_connections()  # each request is two of Envoy's
    try:
        arguments.check_outputs(args)
        if args.stream:
            measuring = measure_streams(args.replicas, RATES, args.seconds, args.stream)
            streams = asyncio.run(measuring)
            failed = any(one.report.failed for one in streams)
            measured = {"streams": [asdict(one) | {"cpu_us": one.cpu_us} for one in streams]}
        else:
            figures = asyncio.run(measure_all(setups, args.seconds, args.in_flight))
            failed = any(one.failed for one in figures)
            measured = {"setups": [_to_json(one) for one in figures]}
    except (OSError, ValueError, ProcessError) as error:
        print(f"overhead: {error}", file=sys.stderr)
        return 1
    command = about("benchmarks.overhead", sys.argv[1:] if argv is None else argv)
    arguments.keep(args, {"streamed" if args.stream else "overhead": command} | measured)
    return 1 if failed else 0


async def measure_all(setups: Sequence[Setup], seconds: float, in_flight: int) -> list[Figures]:
    """Measures every setup and prints its line; the first of them is without a router."""
    cores = Cores.of_this_machine()
    print(cores)
    print(
        f"latency at {_RATE} requests/s; requests/s, CPU and µs at {_AT_ONCE} at once; "
        f"memory at {in_flight} in flight\n"
    )
    print(_HEADER)
    hold_s = in_flight / _RAMP + HELD_S
    measured: list[Figures] = []
    for setup in setups:
        with TemporaryDirectory() as directory:
            async with running(setup, Path(directory), cores, hold_s) as stack:
                measured.append(await _measure(stack, setup.name, seconds, in_flight))
        print(_line(measured[-1], measured[0]), flush=True)
    return measured


async def _measure(stack: Stack, name: str, seconds: float, in_flight: int) -> Figures:
    await stack.load("--at-once", str(_AT_ONCE), "--seconds", str(WARM_UP_S))
    requests = max(round(_RATE * seconds), 2)
    rate = await stack.load("--rate", str(_RATE), "--requests", str(requests))
    begun = stack.cpu_s()
    at_once = await stack.load("--at-once", str(_AT_ONCE), "--seconds", str(seconds))
    cpu_s = stack.cpu_s() - begun
    held, memory_kb = await _hold(stack, in_flight)
    stream_kb = memory_kb / max(held.most_at_once, 1)
    return Figures(name, rate, at_once, held, cpu_s, stream_kb)


async def _hold(stack: Stack, count: int) -> tuple[Report, float]:
    """Holds so many requests, and by how much the router's memory grew meanwhile; kB."""
    before = most = stack.memory_kb()
    load = asyncio.create_task(stack.load("--hold", "--rate", str(_RAMP), "--requests", str(count)))
    while not load.done():
        await asyncio.sleep(_SAMPLE_EVERY_S)
        most = max(most, stack.memory_kb())
    return await load, most - before


def _line(of: Figures, alone: Figures) -> str:
    rate, without = of.rate, alone.rate
    text = f"{of.name:<24}{rate.p50_ms:>10.2f}{rate.p95_ms:>8.2f}{rate.p99_ms:>8.2f}"
    text += f"{rate.p50_ms - without.p50_ms:>11.2f}{rate.p95_ms - without.p95_ms:>8.2f}"
    text += f"{rate.p99_ms - without.p99_ms:>8.2f}{of.requests_per_s:>12.0f}"
    text += f"{of.router_load:>12.0%}{of.cpu_us:>12.0f}{of.stream_kb:>11.1f}"
    if of.failed:
        text += f"   {of.failed} FAILED"
    if of.held.most_at_once < of.held.answered + of.held.failed:
        text += f"   only {of.held.most_at_once} at once"
    return text


def _to_json(of: Figures) -> dict[str, object]:
    more = {"requests_per_s": of.requests_per_s, "cpu_us": of.cpu_us, "load": of.router_load}
    return asdict(of) | more


if __name__ == "__main__":
    raise SystemExit(main())
