"""Faults in the middle of a turn: a part dies, hangs or slows down, and stays so."""

import asyncio
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from math import nan
from typing import Any

import aiohttp

from benchmarks.compare.contenders import Front, Servers
from benchmarks.processes import get_json
from extproc.ground.clock import wall
from extproc.lab.harness.processes import Process

TIMEOUT_S = 45.0  # for an answer, in a turn with a fault
_SLOWER = 4.0  # times as long as before every step of a slow replica takes
_SIGNALS = {"killed": signal.SIGKILL, "hung": signal.SIGSTOP}
FAULTS = (
    *("picker-killed", "picker-hung"),
    *("replica-killed", "replica-hung", "replica-slow"),
    *("poller-killed", "redis-killed"),
)


@dataclass(frozen=True, slots=True)
class Fault:
    name: str  # one of `FAULTS`
    at_s: float  # seconds after the first request is sent

    @property
    def part(self) -> str:
        return self.name.partition("-")[0]

    @property
    def way(self) -> str:
        return self.name.partition("-")[2]


class Blow:
    def __init__(
        self, fault: Fault, front: Front, servers: Servers, replicas: Mapping[str, Process]
    ) -> None:
        """Strikes a part of the contender or the first of the replicas' processes."""
        self.complaints: list[str] = []  # why the contender was not at work before
        self.others = dict(servers)  # the replicas that it does not fall on
        self._fault = fault
        self._front = front
        self._address = ""
        self._at_s = nan
        self._there: frozenset[str] = frozenset()
        if fault.part == "replica":
            name = next(iter(servers))
            self._address, self._process = self.others.pop(name), replicas[name]
        else:
            self._process = front.parts[fault.part]

    async def fall(self) -> None:
        """Returns when the fault has happened; to be called when the first request is sent."""
        await asyncio.sleep(self._fault.at_s)
        self.complaints = await self._front.complaints([])
        if self._address:
            there = await get_json(f"http://{self._address}/simulate/requests")
            self._there = frozenset(there or ())
        self._at_s = wall()
        if self._fault.way == "slow":
            await _slow_down(self._address)
        else:
            self._process.signal(_SIGNALS[self._fault.way])

    async def end(self) -> None:
        if self._fault.way == "hung":
            await self._process.kill()

    def marked(
        self, requests: list[dict[str, Any]], started_s: float
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Fault in seconds after the start, and the requests, each with ``struck``: in flight on
        the part when the fault fell. For a picker these are all that were in flight.
        """
        at_s = self._at_s - started_s

        def struck(one: Mapping[str, Any]) -> bool:
            if self._fault.part != "picker":
                return one["request_id"] in self._there
            return bool(one["at_s"] + one["late_s"] <= at_s < _ended_s(one))

        fault = {"name": self._fault.name, "at_s": at_s}
        return fault, [one | {"struck": struck(one)} for one in requests]


def excused(request: Mapping[str, Any], fault: Mapping[str, Any] | None) -> bool:
    """True for a request that failed after a fault, which is reported but no complaint."""
    return bool(fault and request["error"] and _ended_s(request) > fault["at_s"])


def _ended_s(request: Mapping[str, Any]) -> float:
    lasted = request["completion_s"] or request["failed_after_s"]
    return float(request["at_s"] + request["late_s"] + lasted)


async def _slow_down(address: str) -> None:
    url = f"http://{address}/simulate"
    async with aiohttp.ClientSession(raise_for_status=True) as session:
        await session.post(url, json={"slow": _SLOWER})
