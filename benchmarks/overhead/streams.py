"""What a streamed answer costs the router, beside one of a single chunk."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.overhead.client import Report
from benchmarks.overhead.stack import Cores, Setup, Stack, running
from benchmarks.overhead.upstream import EVERY_S

RATES = 100, 200  # requests a second
WARM_UP_S = 5.0
_HEADER = (
    f"{'':<24}{'tokens':>8}{'sent/s':>8}{'requests/s':>12}{'router CPU':>12}{'µs/request':>12}"
)


@dataclass(frozen=True, slots=True)
class Streamed:
    name: str
    tokens: int
    rate: int  # requests a second that were sent
    report: Report
    cpu_s: float  # of the router's process

    @property
    def cpu_us(self) -> float:
        return 1e6 * self.cpu_s / max(self.report.answered, 1)

    def line(self) -> str:
        per_s = self.report.answered / self.report.seconds
        load = self.cpu_s / self.report.seconds
        text = f"{self.name:<24}{self.tokens:>8}{self.rate:>8}{per_s:>12.0f}{load:>12.0%}"
        failed = f"   {self.report.failed} FAILED" if self.report.failed else ""
        return f"{text}{self.cpu_us:>12.0f}{failed}"


async def measure_streams(
    sizes: Sequence[int], rates: Sequence[int], seconds: float, tokens: int
) -> list[Streamed]:
    """Measures each size of fleet and each rate with answers of one chunk and of so many tokens,
    and prints its line."""
    cores = Cores.of_this_machine()
    print(cores)
    print(f"answers that are streamed, a token every {1000 * EVERY_S:.0f} ms\n")
    print(_HEADER)
    measured: list[Streamed] = []
    for size in sizes:
        for length in (1, tokens):
            setup = Setup("extproc", size, tokens=length)
            with TemporaryDirectory() as directory:
                async with running(setup, Path(directory), cores, 0.0) as stack:
                    for rate in rates:
                        measured.append(await _measure(stack, setup, rate, seconds))
                        print(measured[-1].line(), flush=True)
    return measured


async def _measure(stack: Stack, setup: Setup, rate: int, seconds: float) -> Streamed:
    async def load(seconds: float) -> Report:
        count = max(round(rate * seconds), 2)
        return await stack.load("--rate", str(rate), "--requests", str(count))

    await load(WARM_UP_S)
    begun = stack.cpu_s()
    report = await load(seconds)
    return Streamed(setup.name, setup.tokens, rate, report, stack.cpu_s() - begun)
