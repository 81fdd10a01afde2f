"""One contender, once: started anew, put under load, looked at."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.compare.contenders import Contender, Prediction
from benchmarks.compare.fleets import Fleet, Servers
from benchmarks.compare.validity import validity, watching
from extproc.clock import wall
from extproc.demo.processes import Process, ProcessError

_SOME_FAILED = 1
"""Exit status of the load client."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What is sent to every contender."""

    traces: tuple[Path, ...]
    speed: float
    duration_s: float
    stream_share: float
    seed: int
    known_lengths: bool = False
    """For servers that end answers where they like."""

    @property
    def arguments(self) -> list[str]:
        """The load client's."""
        options = {
            "trace": ",".join(map(str, self.traces)),
            "speed": self.speed,
            "duration": self.duration_s,
            "stream-share": self.stream_share,
            "seed": self.seed,
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return [*words, "--known-lengths"] if self.known_lengths else words


async def play(
    contender: Contender, fleet: Fleet, traffic: Traffic, repeat: int, directory: Path
) -> dict[str, Any]:
    """The load client's result, and what was seen beside it.

    Raises:
        ProcessError: something does not start, or the load client cannot begin.
    """
    directory.mkdir(parents=True)  # noqa: ASYNC240
    async with (
        fleet.fresh(directory) as servers,
        contender.running(fleet, servers, directory, traffic.seed) as front,
    ):
        async with watching(servers, wall) as watched:
            result = await _load(front.url, fleet, traffic, directory)
        complaints = await front.complaints(result["requests"])
        predictions = await front.predictions()
        late = await fleet.lateness(servers)
    names = {address: name for name, address in servers.items()}
    requests = [_seen(one, predictions.get(one["request_id"]), names) for one in result["requests"]]
    summary = result["summary"]
    summary["replicas"] = {names.get(k, k): v for k, v in summary["replicas"].items()}
    machine = validity(watched, summary["late_s"]["p99"], late)
    complaints = [*_work(summary), *complaints]
    summary["warnings"] += [*complaints, *(f"the machine: {one}" for one in machine.doubts)]
    return {
        "run": result["run"] | {"name": contender.name, "repeat": repeat},
        "validity": machine.to_json(),
        "complaints": complaints,
        "summary": summary,
        "requests": requests,
        "load": watched.load_since(datetime.fromisoformat(result["run"]["started"]).timestamp()),
        "late": late,
    }


async def _load(url: str, fleet: Fleet, traffic: Traffic, directory: Path) -> dict[str, Any]:
    answer = directory / "load.json"
    log = directory / "load.log"
    argv = [sys.executable, "-m", "benchmarks.load", "--url", url, "--model", fleet.model]
    argv += ["--context", str(fleet.context), *traffic.arguments, "--json", str(answer)]
    async with await Process.start("load", argv, log=log) as process:
        if await process.wait() not in (0, _SOME_FAILED):
            raise ProcessError(f"the load client did not begin:\n{process.last_lines()}")
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def _seen(request: dict[str, Any], prediction: Prediction | None, names: Servers) -> dict[str, Any]:
    """With what was predicted, and the replica's name in place of its address."""
    replica = request["replica"]
    if prediction is not None:
        replica = replica or prediction.replica
        request["predicted_ttft_s"] = prediction.ttft_s
        request["predicted_completion_s"] = prediction.completion_s
    return request | {"replica": names.get(replica, replica)}


def _work(summary: Mapping[str, Any]) -> list[str]:
    """Whether all of the work was done, and no other."""
    found = []
    if summary["failed"]:
        found.append(f"{summary['failed']} of {summary['requests']} requests failed")
    planned, counted = (summary["output_tokens"][key] for key in ("planned", "counted"))
    if not summary["failed"] and planned != counted:
        found.append(f"replicas generated {counted} tokens, but {planned} were asked for")
    return found
