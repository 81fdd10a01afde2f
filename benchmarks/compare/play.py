"""Runs: a contender is started anew, put under load and observed, in some runs with a fault."""

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from math import nan
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.compare.contenders import ComparedFleet, Contender, Front, Servers
from benchmarks.compare.validity import around, hits, observing, validity
from benchmarks.fleet import imbalance
from benchmarks.load.__main__ import SENDING
from benchmarks.report.results import Fault
from extproc.ground.clock import wall
from extproc.lab.harness.pages import get_json
from extproc.lab.harness.processes import Process, ProcessError, flags

TIMEOUT_S = 45.0  # of an answer, in a run with a fault
_SLOWER = 4.0  # factor of every step's time on a slow replica
_SIGNALS = {"killed": signal.SIGKILL, "hung": signal.SIGSTOP}
REPLICA_FAULTS = "replica-killed", "replica-hung", "replica-slow"
FAULTS = "picker-killed", "picker-hung", *REPLICA_FAULTS, "poller-killed", "redis-killed"


class FaultInjection:
    """Fault that hits a part of the contender, or the first replica."""

    def __init__(
        self, fault: Fault, front: Front, servers: Servers, replicas: Mapping[str, Process]
    ) -> None:
        self.complaints: list[str] = []  # problems of the contender before the fault
        self.spared = dict(servers)  # replicas that the fault does not hit
        self._fault = fault
        self._front = front
        self._address = ""
        self._at_s = nan
        self._in_flight: frozenset[str] = frozenset()  # request ids on the replica at the fault
        if fault.part == "replica":
            name = next(iter(servers))
            self._address, self._process = self.spared.pop(name), replicas[name]
        else:
            self._process = front.parts[fault.part]

    async def inject(self) -> None:
        """Waits until the fault is due, counted from the first request, and causes it."""
        await asyncio.sleep(self._fault.at_s)
        self.complaints = await self._front.complaints([])
        if self._address:
            in_flight = await get_json(f"http://{self._address}/simulate/requests")
            self._in_flight = frozenset(in_flight or ())
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
        """Returns the fault, with its time in seconds after the start, and the requests. Each gets
        ``struck``: true if the request was in flight on the failing part at that time.

        If a picker fails, all requests in flight are struck.
        """
        at_s = self._at_s - started_s

        def struck(request: Mapping[str, Any]) -> bool:
            if self._fault.part != "picker":
                return request["request_id"] in self._in_flight
            return bool(request["at_s"] + request["late_s"] <= at_s < _ended_s(request))

        fault = {"name": self._fault.name, "at_s": at_s}
        return fault, [request | {"struck": struck(request)} for request in requests]


def excused(request: Mapping[str, Any], fault: Mapping[str, Any] | None) -> bool:
    """True for a request that failed after a fault. Such a failure is counted, but the run is not
    called wrong because of it."""
    return bool(fault and request["error"] and _ended_s(request) > fault["at_s"])


def _ended_s(request: Mapping[str, Any]) -> float:
    lasted = request["completion_s"] or request["failed_after_s"]
    return float(request["at_s"] + request["late_s"] + lasted)


_BEGINS_S = 60.0  # until the load client, which reads the trace first, sends a request
_SOME_FAILED = 1  # exit status of the load client
_TIMEOUT_S = 120.0  # of an answer: under round robin on the mixed fleet some take 60 s


def load_arguments(args: argparse.Namespace, repeat: int) -> list[str]:
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
    return flags(options)


async def play(
    contender: Contender,
    fleet: ComparedFleet,
    args: argparse.Namespace,
    repeat: int,
    directory: Path,
) -> dict[str, Any]:
    """Plays a run. Returns the result of the load client, with observations of the machine and the
    contender.

    Raises ProcessError if the contender, a replica or the load client fails.
    """
    async with (
        fleet.fresh(directory) as (servers, replicas),
        contender.running(fleet, servers, directory, args.seed + repeat) as front,
    ):
        injection = FaultInjection(args.fault, front, servers, replicas) if args.fault else None
        async with observing(
            injection.spared if injection else servers, wall, bool(replicas)
        ) as observed:
            options = load_arguments(args, repeat)
            result = await _load(front.url, fleet, options, directory, injection)
        sent = result["requests"]
        complaints = injection.complaints if injection else await front.complaints(sent)
        records = await front.decisions() if front.decisions else []
        decisions = {record["request_id"]: record for record in records}
    names = {address: name for name, address in servers.items()}
    start_s = datetime.fromisoformat(result["run"]["started"]).timestamp()
    fault = None
    if injection:
        fault, sent = injection.marked(sent, start_s)
    unexcused = [request for request in sent if not excused(request, fault)]
    complaints = [*work_complaints(unexcused), *complaints]
    requests = [
        _with_decision(request, decisions.get(request["request_id"], {}), names) for request in sent
    ]
    stays = (
        (request["replica"], request["at_s"], request["at_s"] + request["completion_s"])
        for request in requests
        if request["error"] is None
    )
    summary = result["summary"]
    summary["hits"] = hits(observed)
    summary["imbalance"] = imbalance(stays, fleet.speeds)
    summary["replicas"] = {names.get(key, key): of for key, of in summary["replicas"].items()}
    last_arrival_s = start_s + max(request["at_s"] for request in requests)
    arriving = around(observed, start_s, last_arrival_s)
    machine = validity(arriving, summary["late_s"]["p99"])
    summary["warnings"] += [*complaints, *(f"the machine: {doubt}" for doubt in machine["doubts"])]
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
    url: str,
    fleet: ComparedFleet,
    options: Sequence[str],
    directory: Path,
    injection: FaultInjection | None,
) -> dict[str, Any]:
    file, log = directory / "load.json", directory / "load.log"
    argv = [sys.executable, "-m", "benchmarks.load", "--url", url, "--model", fleet.model]
    argv += [*fleet.load_options, *options, "--json", str(file)]

    async def sending() -> bool:
        return SENDING in process.last_lines()

    async with await Process.start("load", argv, log=log) as process:
        if injection:
            await process.wait_ready(sending, _BEGINS_S)
            await injection.inject()
        if await process.wait() not in (0, _SOME_FAILED):
            raise ProcessError(f"the load client did not begin:\n{process.last_lines()}")
    if injection:
        await injection.end()
    result: dict[str, Any] = json.loads(file.read_text())
    return result


def _with_decision(
    request: dict[str, Any], decision: Mapping[str, Any], names: Mapping[str, str]
) -> dict[str, Any]:
    replica: Any = request["replica"] or decision.get("replica")
    predicted = {
        name: decision.get(name) for name in ("predicted_ttft_s", "predicted_completion_s")
    }
    return request | predicted | {"replica": names.get(replica, replica)}


def work_complaints(requests: Sequence[Mapping[str, Any]]) -> list[str]:
    """Problems that make a run wrong: failed requests, answers of another length than planned."""
    answered = [request for request in requests if request["error"] is None]
    counts = {
        "failed": len(requests) - len(answered),
        "had an answer without a token count, or with another than planned": sum(
            request["output_tokens"] != request["planned_output_tokens"] for request in answered
        ),
    }
    return [f"{n} of {len(requests)} requests {event}" for event, n in counts.items() if n]
