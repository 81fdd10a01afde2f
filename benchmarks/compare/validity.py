"""Whether the machine kept up: otherwise it is the machine that was measured."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.compare.fleets import Servers
from extproc.clock import Clock
from extproc.poll.metrics_text import read_metrics

_INTERVAL_S = 1.0

MOST_BUSY = 0.85
"""Share of all cores over a run."""
MOST_LATE_CLIENT_S = 0.05
"""p99 of the delay with which requests left."""
MOST_LATE_REPLICAS_S = 0.05
"""p99 of the delay with which simulated steps were delivered, on the worst replica."""


@dataclass(frozen=True, slots=True)
class Validity:
    """What the machine did in a run; seconds, and shares of all its cores."""

    cpu_share: float
    cpu_own_share: float
    """Of this comparison's processes; the rest is what else the machine does."""
    cpu_busiest_second: float
    client_late_p99_s: float
    replicas_late_mean_s: float
    """Of the worst replica, as the next."""
    replicas_late_p99_s: float
    replicas_lost_s: float
    """Time that simulated engines did not catch up on, over all replicas."""

    @property
    def doubts(self) -> list[str]:
        """Why figures are the machine's rather than the contender's; empty where they are not."""
        found = []
        if self.cpu_share > MOST_BUSY:
            found.append(f"CPU {self.cpu_share:.0%} busy")
        if self.client_late_p99_s > MOST_LATE_CLIENT_S:
            found.append(f"the client's p99 was {1e3 * self.client_late_p99_s:.0f} ms late")
        if self.replicas_late_p99_s > MOST_LATE_REPLICAS_S:
            found.append(f"steps' p99 was {1e3 * self.replicas_late_p99_s:.0f} ms late")
        if self.replicas_lost_s:
            found.append(f"replicas lost {self.replicas_lost_s:.1f} s")
        return found

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {**asdict(self), "doubts": self.doubts}


def validity(watched: "Watched", client_late_p99_s: float, late: Mapping[str, Any]) -> Validity:
    """Of what was seen of the machine, the client, and what replicas say of themselves."""
    steps = [one["late_s"] for one in late.values()]
    total = max(watched.cpu.total, 1)
    return Validity(
        cpu_share=watched.cpu.busy / total,
        cpu_own_share=watched.cpu.own / total,
        cpu_busiest_second=watched.busiest_second,
        client_late_p99_s=client_late_p99_s,
        replicas_late_mean_s=max((one["mean"] for one in steps), default=0.0),
        replicas_late_p99_s=max((one["p99"] for one in steps), default=0.0),
        replicas_lost_s=sum(one["lost_s"] for one in late.values()),
    )


@dataclass(slots=True)
class Watched:
    """What was seen while it was watched."""

    cpu: "Ticks"
    busiest_second: float = 0.0
    load: list[dict[str, Any]] = field(default_factory=list)
    """``at_s``, by the clock, and ``running`` and ``waiting`` by replica."""

    def load_since(self, start_s: float) -> list[dict[str, Any]]:
        """The load from then on, in seconds since."""
        return [
            one | {"at_s": one["at_s"] - start_s} for one in self.load if one["at_s"] >= start_s
        ]


@asynccontextmanager
async def watching(servers: Servers, clock: Clock) -> AsyncIterator[Watched]:
    """Looks at CPU and replicas every second until the block ends."""
    began = ticks()
    watched = Watched(began - began)
    task = asyncio.create_task(_watch(watched, servers, clock))
    try:
        yield watched
    finally:
        task.cancel()
        await asyncio.wait([task])
        watched.cpu = ticks() - began
        async with aiohttp.ClientSession() as session:
            watched.load.append(await _look(session, servers, clock))


async def _watch(watched: Watched, servers: Servers, clock: Clock) -> None:
    last = ticks()
    async with aiohttp.ClientSession() as session:
        while True:
            await asyncio.sleep(_INTERVAL_S)
            watched.load.append(await _look(session, servers, clock))
            now = ticks()
            second = now - last
            watched.busiest_second = max(watched.busiest_second, second.busy / max(second.total, 1))
            last = now


async def _look(session: aiohttp.ClientSession, servers: Servers, clock: Clock) -> dict[str, Any]:
    at_s = clock()
    pages = [await _page(session, address) for address in servers.values()]
    loads = dict(zip(servers, pages, strict=True))
    return {"at_s": at_s} | {name: load for name, load in loads.items() if load}


async def _page(session: aiohttp.ClientSession, address: str) -> dict[str, int] | None:
    try:
        async with session.get(f"http://{address}/metrics") as response:
            figures = read_metrics(await response.read())
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None
    return {"running": figures.running, "waiting": figures.waiting}


@dataclass(frozen=True, slots=True)
class Ticks:
    """CPU time of the machine's cores since its start, in ticks of its clock."""

    total: int
    busy: int
    own: int
    """Of this process and its children, those that have ended too."""

    def __sub__(self, other: "Ticks") -> "Ticks":
        return Ticks(self.total - other.total, self.busy - other.busy, self.own - other.own)


def ticks(proc: Path = Path("/proc")) -> Ticks:
    """Up to now; nothing where no Linux says so."""
    try:
        first = (proc / "stat").read_text().partition("\n")[0]
    except OSError:
        return Ticks(0, 0, 0)
    counts = [int(word) for word in first.split()[1:9]]  # guests' are in user's already
    idle = counts[3] + counts[4]
    return Ticks(sum(counts), sum(counts) - idle, sum(_own(proc)))


def _own(proc: Path) -> Iterator[int]:
    for stat in proc.glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if os.getpid() in (int(stat.parent.name), int(fields[1])):
            yield sum(map(int, fields[11:15]))
