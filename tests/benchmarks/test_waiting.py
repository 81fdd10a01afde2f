from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from benchmarks import fleet, trace
from benchmarks.discrete import Simulation
from benchmarks.fleet import FleetFile
from benchmarks.trace import TracedRequest
from extproc.lab.replay.routers import Served

CONVERSATION = Path(__file__).parents[2] / "benchmarks/traces/azure-2023-conv.jsonl.gz"


@pytest.fixture
def two(tmp_path: Path) -> FleetFile:
    file = tmp_path / "two.yaml"
    file.write_text("replicas:\n- {name: a, profile: llama-8b-a10, count: 2}\n")
    return fleet.read(file)


def play(two: FleetFile, speed: float, most: int, **options: Any) -> list[Served]:
    simulation = Simulation(two, "completion", **options)
    served = list(simulation.run(trace.read([CONVERSATION], speed=speed, most=most)))
    assert not simulation.failed
    assert len(served) == most
    assert all(node.fleet.in_flight == len(node.queue) == 0 for node in simulation.nodes)
    return served


def preemptions(served: Sequence[Served]) -> int:
    return sum(one.sequence.preemptions for one in served)


def completion(served: Sequence[Served]) -> float:
    return mean(one.completion for one in served)


@pytest.mark.parametrize("routers", [1, 3])
def test_what_waits_is_neither_preempted_nor_later(two: FleetFile, routers: int) -> None:
    sharing = {"routers": routers, "share_lag": 0.02}
    at_once = play(two, 0.75, 500, **sharing)
    held = play(two, 0.75, 500, hold=True, **sharing)
    assert preemptions(at_once) > 50
    assert preemptions(held) < 0.2 * preemptions(at_once)
    assert completion(held) < 0.9 * completion(at_once)


def test_queue_changes_little_where_there_is_room(two: FleetFile) -> None:
    """A request waits while the prompts ahead take more than 0.2 s, and then goes anywhere."""
    at_once, held = (play(two, 0.3, 200, hold=hold) for hold in (False, True))
    assert completion(held) == pytest.approx(completion(at_once), rel=0.01)


def test_urgent_requests_go_first(two: FleetFile) -> None:
    by_group = defaultdict(list)
    for one in play(two, 0.9, 600, hold=True, urgent=0.3):
        by_group[one.group].append(one.ttft)
    assert len(by_group["urgent"]) > 100
    assert mean(by_group["urgent"]) < 0.2 * mean(by_group[""])


def test_tenants_get_the_same_however_much_they_ask_for(two: FleetFile) -> None:
    """Tenant 1 sends three times as much as tenant 2; together they send twice the capacity."""
    alike = [TracedRequest(number / 15, 1000, 60, None) for number in range(600)]
    ratios = []
    for hold in (False, True):
        simulation = Simulation(two, "completion", hold=hold, tenants=[3, 1])
        begun = [one for one in simulation.run(alike) if 24 < (one.first_token or 0.0) < 40]
        first = sum(one.group == "tenant 1" for one in begun)
        ratios.append(first / (len(begun) - first))
    assert ratios[0] > 2
    assert 0.8 < ratios[1] < 1.25
