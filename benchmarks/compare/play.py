"""Turn of a contender: it is started anew, put under load, and observed."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.compare import faults
from benchmarks.compare.contenders import Contender, Fleet
from benchmarks.compare.faults import Blow
from benchmarks.compare.validity import between, hits, validity, watching
from benchmarks.fleet import Stay, imbalance
from benchmarks.load.__main__ import SENDING
from extproc.ground.clock import wall
from extproc.lab.harness.processes import Process, ProcessError

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
        "timeout": faults.TIMEOUT_S if args.fault else _TIMEOUT_S,
    }
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


async def play(
    contender: Contender, fleet: Fleet, args: argparse.Namespace, repeat: int, directory: Path
) -> dict[str, Any]:
    """Result of the load client and observations of machine and contender.

    Raises:
        ProcessError: a process does not start, or the load client cannot begin.
    """
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
    complaints = [*work([one for one in sent if not faults.excused(one, fault)]), *complaints]
    requests = [_seen(one, decided.get(one["request_id"], {}), names) for one in sent]
    answered = [one for one in requests if one["error"] is None]
    summary = result["summary"]
    summary["hits"] = hits(looks)
    summary["imbalance"] = imbalance(map(_stay, answered), fleet.speeds)
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
    predicted = ("predicted_ttft_s", "predicted_completion_s")
    told = {name: decision.get(name) for name in predicted}
    return request | told | {"replica": names.get(replica, replica)}


def _stay(request: Mapping[str, Any]) -> Stay:
    return request["replica"], request["at_s"], request["at_s"] + request["completion_s"]


def work(requests: Sequence[Mapping[str, Any]]) -> list[str]:
    """Complaints about failed requests and answers of another length than planned."""
    answered = [one for one in requests if one["error"] is None]
    other = sum(one["output_tokens"] != one["planned_output_tokens"] for one in answered)
    found = []
    if failed := len(requests) - len(answered):
        found.append(f"{failed} of {len(requests)} requests failed")
    if other:
        found.append(
            f"{other} of {len(requests)} requests got another number of tokens than asked for, "
            "or were not told how many"
        )
    return found
