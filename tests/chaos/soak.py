"""``python -m tests.chaos.soak --minutes 60 --rate 4``: slow metrics exclude no replica.

The system is a real Envoy with a router, a poller, a Redis and four simulated replicas, whose
``/metrics`` take 0.2 to 2 s to answer. Requests arrive at a steady rate. The command exits with 1
if a replica left the fleet, a request failed, or the memory of the router or the poller grew.
"""

import argparse
import asyncio
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import aiohttp

from extproc.lab.harness.pages import samples_of
from extproc.lab.harness.stack import SimulatedReplica, Stack
from tests.chaos.load import SteadyLoad
from tests.chaos.report import report
from tests.chaos.system import LoadedSystem

METRICS_SECONDS = (0.2, 2.0)
MOST_GROWTH_MIB = 16.0
"""Growth of a process after the warm-up that Python's allocator may cause in a busy moment. A leak
of 1 kB a request reaches the limit after an hour and a quarter."""
_REPLICAS = tuple(
    SimulatedReplica(f"r{number}", "llama-8b-h100", ("--seed", str(number)))
    for number in range(1, 5)
)
_PROCESSES = ("router", "poller")
_SETTINGS = {"serve": {"decisions_kept": 200}}
"""Few decisions, so that their number no longer grows after the warm-up."""
_WARM_UP_S = 120.0
_CHECK_EVERY_S = 0.5
_PRINT_EVERY_S = 300.0


class Soak(LoadedSystem):
    """Checks router and poller repeatedly, and records problems."""

    def __init__(self, stack: Stack, load: SteadyLoad, session: aiohttp.ClientSession) -> None:
        super().__init__(stack, load, session)
        self.problems: Counter[str] = Counter()  # with the number of checks that found each
        self.decisions = 0  # number of the last one checked

    async def slow_metrics(self) -> None:
        """Slow down the metrics page of every replica."""
        for replica in _REPLICAS:
            await self.post(replica.name, "/simulate", json={"metrics_seconds": METRICS_SECONDS})

    async def watch(self) -> None:
        while True:
            for process in self.stack.ended():
                self._note(f"{process.name} ended with status {process.returncode}")
            with suppress(TimeoutError):  # the machine is busy: the next check will do
                await self._check_fleet()
                await self._check_decisions()
                await self._check_poller()
            await asyncio.sleep(_CHECK_EVERY_S)

    async def scrapes(self) -> dict[str, float]:
        """Number of scrapes by result."""
        return await self._counts("extproc_poll_scrapes_total", "result")

    def memory_mib(self) -> dict[str, float]:
        """Resident memory of each process (Linux)."""
        return {name: self.stack.process(name).memory_kb() / 1024 for name in _PROCESSES}

    async def _check_fleet(self) -> None:
        fleet = (await self._get("router", "/fleet"))["replicas"]
        names = {replica["name"] for replica in fleet}
        for missing in {replica.name for replica in _REPLICAS} - names:
            self._note(f"router: {missing} left the fleet")
        for replica in fleet:
            if not replica["healthy"]:
                self._note(f"router: {replica['name']} is not healthy: {replica['problem']}")

    async def _check_decisions(self) -> None:
        while records := await self._get("router", f"/decisions?after={self.decisions}"):
            self.decisions = records[-1]["number"]
            for replica in (excluded for record in records for excluded in record["excluded"]):
                self._note(f"a decision excluded {replica['name']}: {replica['why']}")

    async def _check_poller(self) -> None:
        healthy = (await self._counts("extproc_poll_replicas_healthy", "pool"))["default"]
        if healthy < len(_REPLICAS):
            self._note(f"poller: {healthy:.0f} of {len(_REPLICAS)} replicas are healthy")

    async def _counts(self, metric: str, label: str) -> dict[str, float]:
        async with self.session.get(f"{self.stack.admin('poller')}/metrics") as response:
            samples = samples_of(await response.text())
        return {sample.labels[label]: sample.value for sample in samples if sample.name == metric}

    def _note(self, problem: str) -> None:
        if problem not in self.problems:
            print(f"{time.strftime('%H:%M:%S')} {problem}", flush=True)
        self.problems[problem] += 1


async def run(directory: Path, minutes: float, rate: float) -> list[str]:
    """Print figures every five minutes; return the problems."""
    seconds = 60.0 * minutes
    warm_up = min(_WARM_UP_S, seconds / 4)
    async with Soak.started(Stack(directory, _REPLICAS, _SETTINGS), rate, answer_s=10.0) as soak:
        load = soak.load
        await soak.slow_metrics()
        watching = asyncio.create_task(soak.watch())
        async with load:
            ends = time.monotonic() + seconds
            await asyncio.sleep(warm_up)
            first = soak.memory_mib()
            await _print(soak)
            while (left := ends - time.monotonic()) > 0:
                await asyncio.sleep(min(_PRINT_EVERY_S, left))
                await _print(soak)
        watching.cancel()
        last, scrapes = soak.memory_mib(), await soak.scrapes()
    if watching.done() and not watching.cancelled():
        watching.result()
    failures = Counter(answer.account for answer in load.answers.values() if not answer.ok)
    found = [f"{count} times: {problem}" for problem, count in soak.problems.items()]
    found += [f"{count} requests failed: {problem}" for problem, count in failures.items()]
    found += [
        f"the {name} grew by {last[name] - first[name]:.1f} MiB, more than {MOST_GROWTH_MIB:g}"
        for name in first
        if last[name] - first[name] > MOST_GROWTH_MIB
    ]
    if not scrapes.get("late"):
        found.append("no scrape was late: the metrics pages were not slow")
    if soak.decisions < len(load.answers) * 0.99:
        found.append(f"the router decided only {soak.decisions} of {len(load.answers)} requests")
    return found


async def _print(soak: Soak) -> None:
    scrapes = ", ".join(f"{count:.0f} {result}" for result, count in (await soak.scrapes()).items())
    memory = ", ".join(f"{name} {mib:.1f} MiB" for name, mib in soak.memory_mib().items())
    failed = sum(not answer.ok for answer in soak.load.answers.values())
    print(
        f"{time.strftime('%H:%M:%S')} {len(soak.load.answers)} requests, {failed} failed; "
        f"{soak.decisions} decisions; scrapes {scrapes}; {memory}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=4.0, help="requests/s")
    args = parser.parse_args()
    return report(lambda directory: run(directory, args.minutes, args.rate))


if __name__ == "__main__":
    raise SystemExit(main())
