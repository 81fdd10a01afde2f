"""Turns of a contender: started anew, put under load and observed, some with a fault midway."""

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import nan
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.compare.contenders import Contender, Fleet, Front, Servers
from benchmarks.compare.validity import between, hits, validity, watching
from benchmarks.fleet import imbalance
from benchmarks.load.__main__ import SENDING
from benchmarks.processes import get_json
from extproc.ground.clock import wall
from extproc.lab.harness.processes import Process, ProcessError

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
            url = f"http://{self._address}/simulate"
            async with aiohttp.ClientSession(raise_for_status=True) as session:
                await session.post(url, json={"slow": _SLOWER})
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


_BEGINS_S = 60.0  # until the load client, which reads the trace first, sends a request
_SOME_FAILED = 1  # exit status of the load client
_TIMEOUT_S = 120.0  # for an answer; round robin on the mixed fleet needs 60 s for some


def part(args: argparse.Namespace, repeat: int) -> list[str]:
    """Arguments of the load client, the same for all contenders.

    Each repeat sends the next part of the trace, with other words in the prompts.
    """
    options = {
        "trace": ",".join(map(str, args.trace)),
        "speed": args.speed,
        "from": args.skip + repeat * args.duration,
        "duration": args.duration,
        "stream-share": args.stream_share,
        "seed": args.seed + repeat,
        "timeout": TIMEOUT_S if args.fault else _TIMEOUT_S,
    }
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


async def play(
    contender: Contender, fleet: Fleet, args: argparse.Namespace, repeat: int, directory: Path
) -> dict[str, Any]:
    """Result of the load client, with observations of machine and contender; or ProcessError."""
    directory.mkdir(parents=True)  # noqa: ASYNC240
    async with (
        fleet.fresh(directory) as (servers, replicas),
        contender.running(fleet, servers, directory, args.seed + repeat) as front,
    ):
        blow = Blow(args.fault, front, servers, replicas) if args.fault else None
        async with watching(blow.others if blow else servers, wall) as looks:
            result = await _load(front.url, fleet, part(args, repeat), directory, blow)
        sent = result["requests"]
        complaints = blow.complaints if blow else await front.complaints(sent)
        decided = {one["request_id"]: one for one in await front.decisions()}
    names = {address: name for name, address in servers.items()}
    start_s = datetime.fromisoformat(result["run"]["started"]).timestamp()
    fault = None
    if blow:
        fault, sent = blow.marked(sent, start_s)
    complaints = [*work([one for one in sent if not excused(one, fault)]), *complaints]
    requests = [_seen(one, decided.get(one["request_id"], {}), names) for one in sent]
    answered = [one for one in requests if one["error"] is None]
    summary = result["summary"]
    summary["hits"] = hits(looks)
    stays = ((one["replica"], one["at_s"], one["at_s"] + one["completion_s"]) for one in answered)
    summary["imbalance"] = imbalance(stays, fleet.speeds)
    summary["replicas"] = {names.get(k, k): v for k, v in summary["replicas"].items()}
    arriving = between(looks, start_s, start_s + max(one["at_s"] for one in requests))
    machine = validity(arriving, summary["late_s"]["p99"])
    summary["warnings"] += [*complaints, *(f"the machine: {one}" for one in machine["doubts"])]
    return {
        "run": result["run"] | {"name": contender.name, "repeat": repeat},
        "validity": machine,
        "complaints": complaints,
        "fault": fault,
        "summary": summary,
        "requests": requests,
        "late": arriving[-1].late,
    }


async def _load(
    url: str, fleet: Fleet, arguments: Sequence[str], directory: Path, blow: Blow | None
) -> dict[str, Any]:
    answer = directory / "load.json"
    log = directory / "load.log"
    argv = [sys.executable, "-m", "benchmarks.load", "--url", url, "--model", fleet.model]
    argv += ["--context", str(fleet.context), *arguments, "--json", str(answer)]

    async def sending() -> bool:
        return SENDING in process.last_lines()

    async with await Process.start("load", argv, log=log) as process:
        if blow:
            await process.wait_ready(sending, _BEGINS_S)
            await blow.fall()
        if await process.wait() not in (0, _SOME_FAILED):
            raise ProcessError(f"the load client did not begin:\n{process.last_lines()}")
    if blow:
        await blow.end()
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def _seen(
    request: dict[str, Any], decision: Mapping[str, Any], names: Mapping[str, str]
) -> dict[str, Any]:
    replica: Any = request["replica"] or decision.get("replica")
    told = {name: decision.get(name) for name in ("predicted_ttft_s", "predicted_completion_s")}
    return request | told | {"replica": names.get(replica, replica)}


def work(requests: Sequence[Mapping[str, Any]]) -> list[str]:
    """Complaints about failed requests and answers of another length than planned."""
    answered = [one for one in requests if one["error"] is None]
    counts = {
        "failed": len(requests) - len(answered),
        "got another number of tokens than asked for, or were not told how many": sum(
            one["output_tokens"] != one["planned_output_tokens"] for one in answered
        ),
    }
    return [f"{n} of {len(requests)} requests {what}" for what, n in counts.items() if n]
