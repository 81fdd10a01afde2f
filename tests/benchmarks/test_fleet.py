"""Fleet files: events of replicas that slow down, die, hang and come back, and imbalance."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import fleet
from benchmarks.fleet import FleetFile, Stay, imbalance
from benchmarks.trace import TracedRequest
from extproc.lab.replay.routers import Served
from tests.benchmarks.conftest import FLEETS, a10s, play


def requests_every(seconds: float, until: float, output: int = 50) -> list[TracedRequest]:
    return [
        TracedRequest(seconds * n, 200, output, None) for n in range(1, int(until / seconds) + 1)
    ]


def replicas_of(served: Sequence[Served], start: float, end: float = 1e9) -> set[str]:
    return {request.replica for request in served if start <= request.traced.at < end}


@pytest.mark.parametrize("path", sorted(FLEETS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_fleet_is_valid(path: Path) -> None:
    assert fleet.read(path).members


def test_slow_replica_takes_longer_until_it_recovers() -> None:
    events = [{"at": 20, "replica": "a-0", "slow": 3}, {"at": 60, "replica": "a-0", "slow": 1}]
    _, served = play(a10s(2, *events), requests_every(5, 100, output=20), "round_robin")
    took = {each.traced.at: each.completion for each in served if each.replica == "a-0"}
    normal = took[min(took)]
    slow = [seconds for at, seconds in took.items() if 20 <= at < 55]
    after = [seconds for at, seconds in took.items() if at >= 60]
    assert slow == [pytest.approx(3 * normal, rel=0.01)] * len(slow)
    assert after == [pytest.approx(normal, rel=0.01)] * len(after)


@pytest.mark.parametrize("caching", [True, False])
def test_replica_without_a_prefix_cache_computes_a_prompt_again(caching: bool) -> None:
    group = {"name": "a", "profile": "llama-8b-a10", "prefix_caching": caching}
    requests = [TracedRequest(at, 2048, 5, None, hash_ids=(1, 2, 3, 4)) for at in (0.0, 10.0)]
    _, (first, second) = play(FleetFile.model_validate({"replicas": [group]}), requests)
    assert (second.completion < 0.5 * first.completion) == caching


def test_requests_of_a_dead_replica_fail_or_are_retried() -> None:
    hang, down = {"at": 30.1, "hang": None}, {"at": 31.0, "down": None}
    events = [event | {"replica": "a-0"} for event in (hang, down)]
    simulation, served = play(a10s(2, *events), requests_every(0.2, 60), "round_robin")
    # Streams whose answers have begun fail. The other replica serves the other requests.
    assert {failed.replica for failed in simulation.failed} == {"a-0"}
    assert {failed.at for failed in simulation.failed} == {31.0}
    assert all(failed.traced.at < 30.1 for failed in simulation.failed)
    moved = [each for each in served if each.replica != each.decision.replica]
    assert {each.replica for each in moved} == {"a-1"}
    assert {each.profile.stream for each in moved} == {True, False}
    assert replicas_of(served, 31.0) == {"a-1"}


def test_restarted_replica_is_used_again_and_counts_from_zero() -> None:
    events = [{"at": 30, "replica": "a-0", "down": None}, {"at": 40, "replica": "a-0", "up": None}]
    simulation, served = play(a10s(2, *events), requests_every(1, 80), "round_robin")
    assert replicas_of(served, 31, 40) == {"a-1"}
    assert replicas_of(served, 45) == {"a-0", "a-1"}
    counted = simulation.machines["a-0"].engine.counters.generated_tokens
    assert 0 < counted < sum(each.traced.output_tokens for each in served if each.replica == "a-0")


def test_hung_replica_continues_where_it_stopped() -> None:
    hang, up = {"at": 30.5, "hang": None}, {"at": 50, "up": None}
    events = [event | {"replica": "a-0"} for event in (hang, up)]
    simulation, served = play(a10s(2, *events), requests_every(1, 80), "round_robin")
    assert not simulation.failed
    stuck = [each for each in served if each.replica == "a-0" and 28 < each.traced.at <= 30]
    assert stuck
    assert all((request.finished or 0.0) > 50 for request in stuck)
    # Scrapes time out after a second; from then on the replica gets no requests.
    assert replicas_of(served, 32, 50) == {"a-1"}
    assert replicas_of(served, 55) == {"a-0", "a-1"}


def test_requests_fail_without_any_replica() -> None:
    downs = [{"at": 10, "replica": name, "down": None} for name in ("a-0", "a-1")]
    simulation, served = play(a10s(2, *downs), requests_every(1, 20, output=5), "round_robin")
    assert all(request.traced.at < 10 for request in served)
    assert len(simulation.failed) >= 10


EQUAL = {"a": 1.0, "b": 1.0}
TOGETHER: list[Stay] = [*[("a", 0, 1)] * 4, ("a", 1, 5), ("b", 1, 5)]
IN_TURN: list[Stay] = [("a", 0, 1), ("b", 1, 2), ("a", 2, 3), ("b", 3, 4)]
THREE_TO_ONE: list[Stay] = [*[("a", 0, 1)] * 3, ("b", 0, 1)]
CASES: dict[str, tuple[list[Stay], dict[str, float], float | None]] = {
    "evenly spread": ([("a", 0, 4), ("b", 0, 4), ("a", 9, 11), ("b", 9, 11)], EQUAL, 1),
    "moments weighted by requests": (TOGETHER, EQUAL, (2 * 4 + 1 * 8) / 12),
    "even over time, but at no moment": (IN_TURN, EQUAL, 2),
    "fast replica with a larger share": (THREE_TO_ONE, {"a": 3.0, "b": 1.0}, 1),
    "equal replicas with equal shares": (THREE_TO_ONE, EQUAL, 1.5),
    "replica without requests": ([("a", 0, 1)], {**EQUAL, "c": 2.0}, 4),
    "no requests": ([], EQUAL, None),
    "unknown replica": ([("elsewhere", 0, 1)], EQUAL, None),
}


@pytest.mark.parametrize("case", CASES)
def test_imbalance_is_the_load_of_the_busiest_replica_for_its_speed(case: str) -> None:
    stays, speeds, expected = CASES[case]
    assert imbalance(stays, speeds) == (expected and pytest.approx(expected))
