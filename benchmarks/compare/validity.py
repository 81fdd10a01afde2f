"""Checks that the machine kept up while requests arrived: otherwise the machine was measured.

Waiting for the last answers does not count: it would make shares small.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.compare.contenders import Servers, lateness
from benchmarks.load.summary import LATE_S
from benchmarks.processes import get_text
from extproc.ground.clock import Clock
from extproc.poll.metrics_text import read_metrics

_INTERVAL_S = 1.0
MOST_BUSY = 0.85  # share of all cores
MOST_FOREIGN = 0.1  # share of all cores that something else on the machine had

Ticks = tuple[int, int, int]
"""CPU ticks of all cores since boot: in all, busy, and of this process and its descendants."""


@dataclass(frozen=True, slots=True)
class Look:
    at_s: float  # by the clock
    cpu: Ticks
    prompt_tokens: float = 0.0  # of all replicas, until then
    cached_tokens: float = 0.0  # of these, taken from prefix caches
    late: Mapping[str, Any] = field(default_factory=dict)  # as `lateness` tells it


Looks = Sequence[Look]  # in order


def validity(looks: Looks, client_late_p99_s: float) -> dict[str, Any]:
    """Lateness in seconds, shares of all cores, and ``doubts``: reasons to distrust figures."""
    late = looks[-1].late if looks else {}
    told = [one for one in late.values() if one]
    steps = [one["late_s"] for one in told]
    each = np.diff(np.array([look.cpu for look in looks]).reshape(-1, 3), axis=0)
    _, busy, own = each.sum(axis=0) / max(each[:, 0].sum(), 1)
    found = {
        "cpu_share": busy,
        "cpu_own_share": own,
        "cpu_busiest_second": max(each[:, 1] / np.maximum(each[:, 0], 1), default=0.0),
        "client_late_p99_s": client_late_p99_s,
        "replicas_late_mean_s": max((one["mean"] for one in steps), default=0.0),
        "replicas_late_p99_s": max((one["p99"] for one in steps), default=0.0),
        "replicas_lost_s": sum(one["lost_s"] for one in told),
    }
    steps_late, lost = found["replicas_late_p99_s"], found["replicas_lost_s"]
    silent = ", ".join(name for name, one in late.items() if not one)
    doubts = {
        f"CPU {busy:.0%} busy": busy > MOST_BUSY,
        f"something else used {busy - own:.0%} of the CPU": busy - own > MOST_FOREIGN,
        f"the client's p99 was {1e3 * client_late_p99_s:.0f} ms late": client_late_p99_s > LATE_S,
        f"steps' p99 was {1e3 * steps_late:.0f} ms late": steps_late > LATE_S,
        f"replicas lost {lost:.1f} s": lost > 0,
        f"{silent} did not say how late steps were": bool(silent),
    }
    return {**found, "doubts": [text for text, true in doubts.items() if true]}


def between(looks: Looks, start_s: float, end_s: float) -> list[Look]:
    """Looks from the last before the start to the first after the end."""
    before = sum(one.at_s <= start_s for one in looks)
    until = sum(one.at_s < end_s for one in looks)
    return list(looks[max(before - 1, 0) : until + 1])


def hits(looks: Looks) -> float:
    """Share of the prompt tokens that replicas found in their prefix caches."""
    first, last = looks[0], looks[-1]
    prompt_tokens = last.prompt_tokens - first.prompt_tokens
    return (last.cached_tokens - first.cached_tokens) / max(prompt_tokens, 1.0)


@asynccontextmanager
async def watching(servers: Servers, clock: Clock) -> AsyncIterator[list[Look]]:
    """Looks at CPU and replicas every second until the block ends, and once more then."""
    looks: list[Look] = []

    async def watch() -> None:
        while True:
            looks.append(await _look(servers, clock))
            await asyncio.sleep(_INTERVAL_S)

    task = asyncio.create_task(watch())
    try:
        yield looks
    finally:
        task.cancel()
        await asyncio.wait([task])
    looks.append(await _look(servers, clock))


async def _look(servers: Servers, clock: Clock) -> Look:
    at_s, cpu = clock(), ticks()
    prompt_tokens = cached_tokens = 0.0
    for address in servers.values():
        with suppress(ValueError):  # no page
            page = read_metrics((await get_text(f"http://{address}/metrics")).encode())
            prompt_tokens += page.prompt_tokens
            cached_tokens += page.cached_tokens
    return Look(at_s, cpu, prompt_tokens, cached_tokens, await lateness(servers))


def ticks(proc: Path = Path("/proc")) -> Ticks:
    """CPU time until now; zeros without Linux's ``/proc``."""
    try:
        first = (proc / "stat").read_text().partition("\n")[0]
    except OSError:
        return 0, 0, 0
    counts = [int(word) for word in first.split()[1:9]]  # guests' are in user's already
    return sum(counts), sum(counts) - counts[3] - counts[4], _own(proc)


def _own(proc: Path) -> int:
    processes: dict[int, list[str]] = {}
    for stat in proc.glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            processes[int(stat.parent.name)] = stat.read_text().rpartition(")")[2].split()
    parents = {pid: int(fields[1]) for pid, fields in processes.items()}

    def ours(pid: int) -> bool:
        return pid == os.getpid() or (pid in parents and ours(parents[pid]))

    # Of each its own, and that of its children that ended.
    return sum(sum(map(int, fields[11:15])) for pid, fields in processes.items() if ours(pid))
