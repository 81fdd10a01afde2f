"""Speeds that routers learn in simulation, and how they spread requests by these speeds."""

from collections import Counter
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest

from benchmarks import fleet, trace
from benchmarks.discrete import MODEL, FleetSimulation
from benchmarks.fleet import FleetFile, speed
from benchmarks.trace import TracedRequest
from extproc.predict.step import StepModel
from tests.benchmarks.conftest import CONVERSATION, FLEETS

pytestmark = pytest.mark.slow

H100, A100, A10 = "llama-8b-h100", "llama-3-8b-a100", "llama-8b-a10"
SHORT = (50, 400), (20, 200)  # ranges of tokens of prompts and of answers
MIXED = (50, 1500), (20, 300)


@dataclass
class ObservedSimulation(FleetSimulation):
    """Simulation that compares learned with true step times at the times ``look_at``."""

    look_at: tuple[float, ...] = ()
    ratios: dict[float, dict[str, tuple[float, float]]] = field(default_factory=dict)

    def _poll(self) -> None:
        super()._poll()
        for at in self.look_at:
            if at <= self.clock() and at not in self.ratios:
                self.ratios[at] = {name: self._compare(name) for name in self.fleet.view(MODEL).ids}

    def _compare(self, name: str) -> tuple[float, float]:
        """Learned ÷ true decode speed, and learned ÷ true time of a prefill of 1,000 tokens."""
        view, truth = self.fleet.view(MODEL), self.machines[name].engine.step_model
        row = view.ids.index(name)
        each = view.c0, view.c_prefill, view.c_batch, view.c_kv
        learned = StepModel(*(float(values[row]) for values in each))
        prefill = truth.step_time(1000, 1, 0, 1000 * 500)
        return speed(learned) / speed(truth), learned.step_time(1000, 1, 0) / prefill


def requests_at(
    rate: float, count: int, seed: int, lengths: tuple[tuple[int, int], tuple[int, int]]
) -> list[TracedRequest]:
    random, at, requests = Random(seed), 0.0, []
    for _ in range(count):
        at += random.expovariate(rate)
        prompt, answer = (random.randrange(*bounds) for bounds in lengths)
        requests.append(TracedRequest(at, prompt, answer, None))
    return requests


def are_within(factor: float, ratios: tuple[float, ...]) -> bool:
    return all(1 / factor <= ratio <= factor for ratio in ratios)


# -- equal replicas ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("believed", "cold_steps", "lengths"),  # each pair of values occurs
    [(A100, 0, SHORT), (A100, 10, MIXED), (A10, 0, MIXED), (A10, 10, SHORT)],
)
def test_equal_replicas_get_equal_shares(
    believed: str, cold_steps: int, lengths: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    group = {"name": "gpu", "profile": H100, "believed": believed, "count": 2}
    file = FleetFile.model_validate({"replicas": [group | {"cold_steps": cold_steps}]})
    sent = Counter[str]()
    for seed in range(2):  # a draw decides between idle replicas: of 400 requests 50% ± 2.5%
        simulation = FleetSimulation(file, "completion", seed=seed)
        served = simulation.run(requests_at(8, 400, seed, lengths))
        sent.update(request.replica for request in served)
    assert 0.45 <= sent["gpu-0"] / sent.total() <= 0.55, sent


@pytest.mark.parametrize("believed", [A100, A10])
def test_lone_requests_reach_every_replica_of_a_fresh_pool(believed: str) -> None:
    """The profile is wrong: the first replica that is measured looks much faster than the rest."""
    group = {"name": "gpu", "profile": H100, "believed": believed, "count": 4}
    file = FleetFile.model_validate({"replicas": [group]})
    served = FleetSimulation(file, "completion").run(requests_at(0.5, 100, 0, SHORT))
    sent = Counter(request.replica for request in served)
    assert min(sent[name] for name in file.members) >= 15, sent


# -- a slow card among others ------------------------------------------------------------------

SLOW = {
    "replicas": [{"name": "gpu", "profile": H100, "count": 2}, {"name": "small", "profile": A10}],
    "events": [
        {"at": 0, "replica": "gpu-1", "slow": 1 / 0.15},
        {"at": 60, "replica": "gpu-1", "do": "down"},
        {"at": 60, "replica": "gpu-1", "slow": 1},
        {"at": 62, "replica": "gpu-1", "do": "up"},
    ],
}


@pytest.fixture(scope="module", params=[2, 14], ids=["2/s", "14/s"])
def slow_card(request: pytest.FixtureRequest) -> ObservedSimulation:
    """Two H100 and an A10; an H100 runs at 15% of its speed until it is restarted."""
    file, rate = FleetFile.model_validate(SLOW), request.param
    simulation = ObservedSimulation(file, "completion", look_at=(5.0, 15.0, 30.0, 59.0, 72.0))
    for _ in simulation.run(requests_at(rate, rate * 80, 0, MIXED)):
        pass
    assert not simulation.failed
    return simulation


def test_slow_card_is_learned_within_thirty_seconds(slow_card: ObservedSimulation) -> None:
    assert are_within(1.2, slow_card.ratios[30.0]["gpu-1"])


def test_slow_card_does_not_change_other_cards(slow_card: ObservedSimulation) -> None:
    for at in (5.0, 15.0, 30.0, 59.0):
        for name in ("gpu-0", "small-0"):
            assert are_within(1.2, slow_card.ratios[at][name]), (at, name)


def test_restarted_card_is_relearned_within_ten_seconds(slow_card: ObservedSimulation) -> None:
    assert slow_card.ratios[59.0]["gpu-1"] != slow_card.ratios[72.0]["gpu-1"]
    assert are_within(1.3, slow_card.ratios[72.0]["gpu-1"])


# -- a fresh pool with wrong profiles ----------------------------------------------------------


def test_fresh_pool_with_wrong_profiles_is_nearly_as_fast_as_with_true_ones() -> None:
    """All four are said to be A100; two are H100 and two are A10, and all start cold."""
    file = fleet.read(FLEETS / "cold.yaml")
    groups = [group.model_copy(update={"believed": None}) for group in file.replicas]
    times = {}
    for believed in (file, file.model_copy(update={"replicas": groups})):
        completions = []
        for number in (1, 3):
            part = trace.read([CONVERSATION], speed=4, start=46 + 16 * number, duration=16)
            simulation = FleetSimulation(believed, "completion", seed=number)
            completions += [served.completion for served in simulation.run(part)]
        times[believed is file] = np.mean(completions), np.quantile(completions, 0.99)
    (mean, p99), (true_mean, true_p99) = times[True], times[False]
    assert mean <= 1.04 * true_mean
    assert p99 <= 1.25 * true_p99
