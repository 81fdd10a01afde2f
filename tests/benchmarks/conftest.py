"""Shipped traces and fleets, simulated fleets and replicas, and a check of a command's refusal."""

import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.discrete import FleetSimulation
from benchmarks.fleet import FleetFile
from benchmarks.trace import TracedRequest
from extproc.lab.replay.routers import Served
from extproc.lab.simulator.replica import Replica, ReplicaSettings
from extproc.lab.simulator.server import serving

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TRACES, FLEETS = BENCHMARKS / "traces", BENCHMARKS / "fleets"
CONVERSATION = TRACES / "azure-2023-conv.jsonl.gz"
MIXED = FLEETS / "mixed.yaml"


def a10s(count: int, *events: dict[str, Any], **group: Any) -> FleetFile:
    """Returns a fleet of equal replicas ``a-0``, …"""
    replicas = [{"name": "a", "profile": "llama-8b-a10", "count": count, **group}]
    return FleetFile.model_validate({"replicas": replicas, "events": events})


def play(
    file: FleetFile, requests: Sequence[TracedRequest], policy: str = "completion", **options: Any
) -> tuple[FleetSimulation, list[Served]]:
    """Simulates requests, each of which must end or fail, and leave ledger and queue."""
    simulation = FleetSimulation(file, policy, **options)
    served = list(simulation.run(requests))
    assert len(served) + len(simulation.failed) == len(requests)
    assert all(node.fleet.in_flight == len(node.queue) == 0 for node in simulation.nodes)
    return simulation, served


@asynccontextmanager
async def simulated(**settings: Any) -> AsyncIterator[tuple[Replica, str]]:
    """Serves a simulated replica; yields the replica and its ``ip:port``."""
    replica = Replica(ReplicaSettings(**settings))
    async with serving(replica, "127.0.0.1", 0) as (port, _):
        yield replica, f"127.0.0.1:{port}"


@pytest.fixture
async def replica_url() -> AsyncIterator[str]:
    fast = {"profile": "llama-8b-h100", "speed": 50, "max_model_len": 131_072}
    async with simulated(**fast) as (_, address):
        yield f"http://{address}"


def complaint_of(
    main: Callable[[Sequence[str]], int], capsys: pytest.CaptureFixture[str], *given: str | Path
) -> str:
    """Runs a command that must refuse its arguments; returns the last line of its error."""
    with pytest.raises(SystemExit) as ended:
        sys.exit(main([*map(str, given)]))
    output = capsys.readouterr()
    assert (ended.value.code, output.out) == (2, "")
    usage = output.err.splitlines()[:-1]
    assert all(line.startswith(("usage: ", " ")) for line in usage)
    return output.err.splitlines()[-1]
