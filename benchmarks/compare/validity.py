"""Whether the machine kept up while requests arrived: otherwise the machine was measured.

The time in which only the last answers are waited for is left out: it would make shares small.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.compare.fleets import Fleet, Servers
from benchmarks.load.summary import LATE_S
from benchmarks.pages import get_text
from extproc.clock import Clock
from extproc.poll.metrics_text import EngineFigures, read_metrics

_INTERVAL_S = 1.0

MOST_BUSY = 0.85
"""Share of all cores."""
MOST_FOREIGN = 0.1
"""Share of all cores that something else on the machine had."""


@dataclass(frozen=True, slots=True)
class Validity:
    """What the machine did while requests arrived; seconds, and shares of all its cores."""

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
    silent: tuple[str, ...] = ()
    """Replicas that did not say how late they were."""

    @property
    def doubts(self) -> list[str]:
        """Why figures are the machine's rather than the contender's; empty where they are not."""
        found = []
        if self.cpu_share > MOST_BUSY:
            found.append(f"CPU {self.cpu_share:.0%} busy")
        if (foreign := self.cpu_share - self.cpu_own_share) > MOST_FOREIGN:
            found.append(f"something else used {foreign:.0%} of the CPU")
        if self.client_late_p99_s > LATE_S:
            found.append(f"the client's p99 was {1e3 * self.client_late_p99_s:.0f} ms late")
        if self.replicas_late_p99_s > LATE_S:
            found.append(f"steps' p99 was {1e3 * self.replicas_late_p99_s:.0f} ms late")
        if self.replicas_lost_s:
            found.append(f"replicas lost {self.replicas_lost_s:.1f} s")
        if self.silent:
            found.append(f"{', '.join(self.silent)} did not say how late steps were")
        return found

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {**asdict(self), "doubts": self.doubts}


def validity(looks: "Looks", client_late_p99_s: float) -> Validity:
    """Of what was seen of the machine and its replicas, and how late the client sent."""
    late = looks[-1].late if looks else {}
    told = {name: one for name, one in late.items() if one}
    steps = [one["late_s"] for one in told.values()]
    seconds = [after.cpu - before.cpu for before, after in pairwise(looks)]
    whole = Ticks.total_of(seconds)
    return Validity(
        cpu_share=whole.share(whole.busy),
        cpu_own_share=whole.share(whole.own),
        cpu_busiest_second=max((one.share(one.busy) for one in seconds), default=0.0),
        client_late_p99_s=client_late_p99_s,
        replicas_late_mean_s=max((one["mean"] for one in steps), default=0.0),
        replicas_late_p99_s=max((one["p99"] for one in steps), default=0.0),
        replicas_lost_s=sum(one["lost_s"] for one in told.values()),
        silent=tuple(name for name in late if name not in told),
    )


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen at a moment."""

    at_s: float
    """By the clock."""
    cpu: "Ticks"
    load: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """``running`` and ``waiting`` by replica."""
    prompt_tokens: float = 0.0
    """Of all replicas, until then."""
    cached_tokens: float = 0.0
    """Of these, taken from prefix caches."""
    late: Mapping[str, Any] = field(default_factory=dict)
    """How late steps were until then, by replica; None for one that does not answer."""


Looks = Sequence[Look]
"""In order."""


def between(looks: Looks, start_s: float, end_s: float) -> list[Look]:
    """From the last look before the start to the first after the end."""
    before = sum(one.at_s <= start_s for one in looks)
    until = sum(one.at_s < end_s for one in looks)
    return list(looks[max(before - 1, 0) : until + 1])


def load_since(looks: Looks, start_s: float) -> list[dict[str, Any]]:
    """The load from then on, in seconds since."""
    return [{"at_s": one.at_s - start_s, **one.load} for one in looks if one.at_s >= start_s]


def hits(looks: Looks) -> float:
    """Share of the prompt tokens that replicas found in their prefix caches."""
    first, last = looks[0], looks[-1]
    prompt_tokens = last.prompt_tokens - first.prompt_tokens
    return (last.cached_tokens - first.cached_tokens) / max(prompt_tokens, 1.0)


@asynccontextmanager
async def watching(fleet: Fleet, servers: Servers, clock: Clock) -> AsyncIterator[list[Look]]:
    """Looks at CPU and replicas every second until the block ends, and once more then."""
    looks: list[Look] = []
    task = asyncio.create_task(_watch(looks, fleet, servers, clock))
    try:
        yield looks
    finally:
        task.cancel()
        await asyncio.wait([task])
    looks.append(await _look(fleet, servers, clock))


async def _watch(looks: list[Look], fleet: Fleet, servers: Servers, clock: Clock) -> None:
    while True:
        looks.append(await _look(fleet, servers, clock))
        await asyncio.sleep(_INTERVAL_S)


async def _look(fleet: Fleet, servers: Servers, clock: Clock) -> Look:
    at_s, cpu = clock(), ticks()
    pages = {name: await _figures(address) for name, address in servers.items()}
    figures = {name: page for name, page in pages.items() if page}
    return Look(
        at_s,
        cpu,
        {name: {"running": one.running, "waiting": one.waiting} for name, one in figures.items()},
        sum(one.prompt_tokens for one in figures.values()),
        sum(one.cached_tokens for one in figures.values()),
        await fleet.lateness(servers),
    )


async def _figures(address: str) -> EngineFigures | None:
    try:
        return read_metrics((await get_text(f"http://{address}/metrics")).encode())
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class Ticks:
    """CPU time of the machine's cores since its start, in ticks of its clock."""

    total: int
    busy: int
    own: int
    """Of this process and those it started, and that these started, ended ones too."""

    def __sub__(self, other: "Ticks") -> "Ticks":
        return Ticks(self.total - other.total, self.busy - other.busy, self.own - other.own)

    @classmethod
    def total_of(cls, several: Iterable["Ticks"]) -> "Ticks":
        """Their sum."""
        several = list(several)
        return cls(
            sum(one.total for one in several),
            sum(one.busy for one in several),
            sum(one.own for one in several),
        )

    def share(self, part: int) -> float:
        """Of all cores' time."""
        return part / max(self.total, 1)


def ticks(proc: Path = Path("/proc")) -> Ticks:
    """Up to now; nothing where no Linux says so."""
    try:
        first = (proc / "stat").read_text().partition("\n")[0]
    except OSError:
        return Ticks(0, 0, 0)
    counts = [int(word) for word in first.split()[1:9]]  # guests' are in user's already
    idle = counts[3] + counts[4]
    return Ticks(sum(counts), sum(counts) - idle, _own(proc))


def _own(proc: Path) -> int:
    parents, used = {}, {}
    for pid, fields in _processes(proc):
        parents[pid] = int(fields[1])
        used[pid] = sum(map(int, fields[11:15]))  # its own, and that of its children that ended
    return sum(spent for pid, spent in used.items() if os.getpid() in _line(pid, parents))


def _line(pid: int, parents: Mapping[int, int]) -> Iterator[int]:
    """The process, its parent, and so on."""
    while pid:
        yield pid
        pid = parents.get(pid, 0)


def _processes(proc: Path) -> Iterator[tuple[int, list[str]]]:
    for stat in proc.glob("[0-9]*/stat"):
        try:
            yield int(stat.parent.name), stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
