"""Checks that the machine was fast enough: figures should show the contender, not the machine.

Only the time until the last arrival counts; later times would lower the mean use of the CPU.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.compare.contenders import Servers
from benchmarks.load.summary import LATE_S
from extproc.ground.clock import Clock
from extproc.lab.harness.pages import get_json, get_text
from extproc.poll.metrics_text import ScrapeError, read_metrics

_INTERVAL_S = 1.0
MOST_BUSY = 0.85  # share of all cores that was in use
MOST_OTHER = 0.1  # share of all cores that other processes on the machine used

Ticks = tuple[int, int, int]
"""CPU ticks of all cores since boot: total, busy, and of this process and its descendants."""


@dataclass(frozen=True, slots=True)
class Observation:
    at_s: float  # by the clock
    cpu: Ticks
    prompt_tokens: float = 0.0  # of all replicas so far
    cached_tokens: float = 0.0  # prompt tokens from prefix caches
    late: Mapping[str, Any] = field(default_factory=dict)
    """Lateness of each simulated replica's steps so far; None if the replica does not answer."""


Observations = Sequence[Observation]  # in order


def validity(observed: Observations, client_late_p99_s: float) -> dict[str, Any]:
    """Lateness in seconds, CPU time as shares of all cores, and ``doubts``: reasons to distrust the
    figures."""
    late = observed[-1].late if observed else {}
    answered = [replica for replica in late.values() if replica]
    steps = [replica["late_s"] for replica in answered]
    intervals = np.diff(np.array([moment.cpu for moment in observed]).reshape(-1, 3), axis=0)
    _, busy, own = intervals.sum(axis=0) / max(intervals[:, 0].sum(), 1)
    found = {
        "cpu_share": busy,
        "cpu_own_share": own,
        "cpu_busiest_second": max(intervals[:, 1] / np.maximum(intervals[:, 0], 1), default=0.0),
        "client_late_p99_s": client_late_p99_s,
        "replicas_late_mean_s": max((times["mean"] for times in steps), default=0.0),
        "replicas_late_p99_s": max((times["p99"] for times in steps), default=0.0),
        "replicas_lost_s": sum(replica["lost_s"] for replica in answered),
    }
    steps_late, lost = found["replicas_late_p99_s"], found["replicas_lost_s"]
    silent = ", ".join(name for name, replica in late.items() if not replica)
    doubts = {
        f"CPU {busy:.0%} busy": busy > MOST_BUSY,
        f"other processes used {busy - own:.0%} of the CPU": bool(late) and busy - own > MOST_OTHER,
        f"the client sent {1e3 * client_late_p99_s:.0f} ms late at p99": client_late_p99_s > LATE_S,
        f"steps were {1e3 * steps_late:.0f} ms late at p99": steps_late > LATE_S,
        f"replicas lost {lost:.1f} s": lost > 0,
        f"{silent} did not answer how late its steps were": bool(silent),
    }
    return {**found, "doubts": [text for text, true in doubts.items() if true]}


def around(observed: Observations, start_s: float, end_s: float) -> list[Observation]:
    """Observations during a period, the last observation before it, and the first after it."""
    before = sum(moment.at_s <= start_s for moment in observed)
    until = sum(moment.at_s < end_s for moment in observed)
    return list(observed[max(before - 1, 0) : until + 1])


def hits(observed: Observations) -> float:
    """Share of the prompt tokens that replicas found in their prefix caches."""
    first, last = observed[0], observed[-1]
    prompt_tokens = last.prompt_tokens - first.prompt_tokens
    return (last.cached_tokens - first.cached_tokens) / max(prompt_tokens, 1.0)


@asynccontextmanager
async def observing(
    servers: Servers, clock: Clock, simulated: bool
) -> AsyncIterator[list[Observation]]:
    """Observes CPU and replicas every second inside the block, and once at its end."""
    observed: list[Observation] = []

    async def observe() -> None:
        while True:
            observed.append(await _observe(servers, clock, simulated))
            await asyncio.sleep(_INTERVAL_S)

    task = asyncio.create_task(observe())
    try:
        yield observed
    finally:
        task.cancel()
        await asyncio.wait([task])
    observed.append(await _observe(servers, clock, simulated))


async def _observe(servers: Servers, clock: Clock, simulated: bool) -> Observation:
    at_s, cpu, late = clock(), ticks(), {}
    prompt_tokens = cached_tokens = 0.0
    for name, address in servers.items():
        if simulated:
            late[name] = await get_json(f"http://{address}/simulate/late")
        with suppress(ScrapeError):  # the replica does not answer
            text = await get_text(f"http://{address}/metrics") or ""
            page = read_metrics(text.encode())
            prompt_tokens += page.prompt_tokens
            cached_tokens += page.cached_tokens
    return Observation(at_s, cpu, prompt_tokens, cached_tokens, late)


def ticks(proc: Path = Path("/proc")) -> Ticks:
    """CPU time that the machine has used so far, from ``/proc``; zeros on systems without it."""
    try:
        first = (proc / "stat").read_text().partition("\n")[0]
    except OSError:
        return 0, 0, 0
    counts = [int(word) for word in first.split()[1:9]]  # user time includes guests'
    return sum(counts), sum(counts) - counts[3] - counts[4], _own(proc)


def _own(proc: Path) -> int:
    processes: dict[int, list[str]] = {}
    for stat in proc.glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            processes[int(stat.parent.name)] = stat.read_text().rpartition(")")[2].split()
    parents = {pid: int(fields[1]) for pid, fields in processes.items()}

    def ours(pid: int) -> bool:
        return pid == os.getpid() or (pid in parents and ours(parents[pid]))

    # Time of each process, and of its children that have ended.
    return sum(sum(map(int, fields[11:15])) for pid, fields in processes.items() if ours(pid))
