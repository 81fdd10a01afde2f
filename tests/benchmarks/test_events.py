from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import fleet
from benchmarks.discrete import Simulation
from benchmarks.fleet import FleetFile
from benchmarks.trace import TracedRequest
from extproc.lab.replay.routers import Served

FLEETS = Path(__file__).parents[2] / "benchmarks" / "fleets"


def two(*events: dict[str, Any]) -> FleetFile:
    replicas = [{"name": "a", "profile": "llama-8b-a10", "count": 2}]
    return FleetFile.model_validate({"replicas": replicas, "events": events})


def every(seconds: float, until: float, output: int = 50) -> list[TracedRequest]:
    return [
        TracedRequest(seconds * n, 200, output, None) for n in range(1, int(until / seconds) + 1)
    ]


def play(file: FleetFile, requests: Sequence[TracedRequest]) -> tuple[Simulation, list[Served]]:
    simulation = Simulation(file, "round_robin")
    served = list(simulation.run(requests))
    assert len(served) + len(simulation.failed) == len(requests)
    assert simulation.fleet.in_flight == 0
    return simulation, served


def on(served: Sequence[Served], start: float, end: float = 1e9) -> set[str]:
    return {one.replica for one in served if start <= one.traced.at < end}


@pytest.mark.parametrize("path", sorted(FLEETS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_fleets_that_are_shipped_can_be_read(path: Path) -> None:
    assert fleet.read(path).members


def test_a_slow_replica_takes_longer_until_it_is_not() -> None:
    events = [{"at": 20, "replica": "a-0", "slow": 3}, {"at": 60, "replica": "a-0", "slow": 1}]
    _, served = play(two(*events), every(5, 100, output=20))
    took = {one.traced.at: one.completion for one in served if one.replica == "a-0"}
    normal = took[min(took)]
    slow = [seconds for at, seconds in took.items() if 20 <= at < 55]
    after = [seconds for at, seconds in took.items() if at >= 60]
    assert slow == [pytest.approx(3 * normal, rel=0.01)] * len(slow)
    assert after == [pytest.approx(normal, rel=0.01)] * len(after)


def test_the_speed_that_was_learned_is_compared_with_the_truth() -> None:
    simulation, _ = play(two({"at": 60, "replica": "a-0", "slow": 3}), every(0.5, 120))
    (learned,) = simulation.speeds.learned
    assert (learned.replica, learned.slow) == ("a-0", 3)
    assert learned.at == pytest.approx(90, abs=0.3)
    assert 0.7 < learned.ratio < 1.3


def test_what_a_replica_was_doing_when_it_died_fails_or_is_done_by_another() -> None:
    simulation, served = play(two({"at": 30.1, "replica": "a-0", "down": None}), every(0.2, 60))
    # Streams had begun to be answered; what had not is served by the other replica.
    assert {one.replica for one in simulation.failed} == {"a-0"}
    assert {one.at for one in simulation.failed} == {30.1}
    retried = [one for one in served if one.retried]
    assert retried
    assert {one.replica for one in retried} == {"a-1"}
    assert on(served, 30.2) == {"a-1"}


def test_a_replica_that_comes_back_is_used_again_and_starts_from_zero() -> None:
    events = [{"at": 30, "replica": "a-0", "down": None}, {"at": 40, "replica": "a-0", "up": None}]
    simulation, served = play(two(*events), every(1, 80))
    assert on(served, 31, 40) == {"a-1"}
    assert on(served, 45) == {"a-0", "a-1"}
    counted = simulation.machines["a-0"].engine.counters.generated_tokens
    assert 0 < counted < sum(one.traced.output_tokens for one in served if one.replica == "a-0")


def test_a_replica_that_hangs_goes_on_where_it_was() -> None:
    hang, up = {"at": 30.5, "hang": None}, {"at": 50, "up": None}
    events = [event | {"replica": "a-0"} for event in (hang, up)]
    simulation, served = play(two(*events), every(1, 80))
    assert not simulation.failed
    stuck = [one for one in served if one.replica == "a-0" and 28 < one.traced.at <= 30]
    assert stuck
    assert all(one.finished is not None and one.finished > 50 for one in stuck)
    # Scrapes time out after a second, and then nobody is sent there.
    assert on(served, 32, 50) == {"a-1"}
    assert on(served, 55) == {"a-0", "a-1"}


def test_with_no_replica_left_requests_fail() -> None:
    downs = [{"at": 10, "replica": name, "down": None} for name in ("a-0", "a-1")]
    simulation, served = play(two(*downs), every(1, 20, output=5))
    assert all(one.traced.at < 10 for one in served)
    assert len(simulation.failed) >= 10


def test_a_newcomer_with_a_profile_far_too_fast_is_not_flooded() -> None:
    groups = [
        {"name": "a", "profile": "llama-8b-a10", "count": 8},
        {"name": "new", "profile": "llama-8b-a10", "believed": "llama-8b-h100"},
    ]
    down, up = ({"at": at, "replica": "new-0", "do": do} for at, do in ((0, "down"), (10, "up")))
    file = FleetFile.model_validate({"replicas": groups, "events": [down, up]})
    simulation = Simulation(file, "completion")
    requests = [TracedRequest(0.05 * n, 1000, 100, None) for n in range(1, 320)]
    served = list(simulation.run(requests))
    first = [one for one in served if one.replica == "new-0" and one.traced.at < 11]
    assert 2 <= len(first) <= 4
    assert "new-0" in on(served, 12)
