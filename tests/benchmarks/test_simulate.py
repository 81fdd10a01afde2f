"""``benchmarks.simulate``: figures, the oracle, and what routers learn during a simulation."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any

import pytest

from benchmarks import fleet, trace
from benchmarks.discrete import FleetSimulation
from benchmarks.report.figures import measured
from benchmarks.report.results import read
from benchmarks.simulate import main
from benchmarks.summary import summary
from benchmarks.trace import TracedRequest
from extproc.lab.simulator.engine import Engine
from extproc.lab.simulator.steps import Gauges
from extproc.route.policies import POLICIES
from tests.benchmarks.conftest import CONVERSATION, FLEETS, MIXED, a10s, play

pytestmark = pytest.mark.slow

LIVE_MIXED, EQUAL = FLEETS / "live-mixed.yaml", FLEETS / "equal.yaml"


class _LiveGauges:
    """Gauges of an engine as they are now, instead of at the end of the last step."""

    def __get__(self, engine: Engine, _: object) -> Gauges:
        return Gauges(engine.running, engine.waiting, engine.kv_usage)

    def __set__(self, engine: Engine, gauges: Gauges) -> None:
        pass


Simulate = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def simulate(tmp_path: Path) -> Simulate:
    def run(*arguments: str, fleet_file: Path = MIXED, status: int = 0) -> list[dict[str, Any]]:
        report = tmp_path / "report.json"
        report.write_text('{"runs": []}')
        common = ["--trace", str(CONVERSATION), "--fleet", str(fleet_file), "--json", str(report)]
        assert main([*common, *arguments]) == status
        return list(json.loads(report.read_text())["runs"])

    return run


@pytest.mark.parametrize("policy", [*POLICIES, "oracle"])
def test_every_request_ends_and_leaves_the_ledger(policy: str) -> None:
    requests = trace.read([CONVERSATION], speed=4, most=60)
    simulation, served = play(fleet.read(MIXED), requests, policy)
    assert not simulation.failed
    assert all(0 < request.ttft <= request.completion for request in served)


def test_same_seed_gives_the_same_run() -> None:
    requests = trace.read([CONVERSATION], speed=4, most=60)
    for file in (fleet.read(MIXED), a10s(2, draft_tokens=3)):
        (_, first), (_, again) = (play(file, requests, seed=3) for _ in range(2))
        assert [each.completion for each in first] == [each.completion for each in again]


def test_replicas_with_few_short_requests_are_predicted() -> None:
    """Two H100 and two A10, all believed to be A100; one request a second."""
    random, at, requests = Random(1), 0.0, []
    for _ in range(150):
        at += random.expovariate(1.0)
        tokens = random.randrange(50, 1500), random.randrange(5, 40)
        requests.append(TracedRequest(at, *tokens, None))
    for policy in ("completion", "round_robin"):
        ttft_errors, completion_errors = [], []
        known = frozenset({"lengths"})
        _, served = play(fleet.read(LIVE_MIXED), requests, policy, know=known)
        for request in sorted(served, key=lambda request: request.number)[50:]:
            ttft_errors.append(abs(request.decision.predicted_ttft / request.ttft - 1))
            completion = request.decision.predicted_completion
            completion_errors.append(abs(completion / request.completion - 1))
        assert median(ttft_errors) < 0.2
        assert median(completion_errors) < 0.2


def test_drafting_replicas_are_predicted(simulate: Simulate, tmp_path: Path) -> None:
    drafting = tmp_path / "drafting.yaml"
    drafting.write_text(
        "replicas:\n- {name: plain, profile: llama-8b-a10, count: 2}\n"
        "- {name: draft, profile: llama-8b-a10, count: 2, draft_tokens: 4, acceptance: 0.8}\n"
    )
    part = ["--speed", "0.7", "--requests", "800", "--know", "lengths", "--no-oracle"]
    (run,) = simulate(*part, "--policy", "completion", fleet_file=drafting)
    assert run["summary"]["prediction"]["e2e_mape"] < 0.15


def test_completion_beats_lmetric_where_replicas_differ(simulate: Simulate) -> None:
    arguments = ["--speed", "4", "--policy", "completion,lmetric", "--requests", "200"]
    completion, lmetric = (run["summary"] for run in simulate(*arguments, "--no-oracle"))
    assert completion["e2e_s"]["p99"] < 0.5 * lmetric["e2e_s"]["p99"]
    assert completion["ttft_s"]["p99"] < 0.5 * lmetric["ttft_s"]["p99"]
    assert sum(replica["requests"] for replica in completion["per_replica"].values()) == 200


def test_queue_kv_decides_like_picker_of_llm_d(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of llm-d's picker with its default scorers, live behind Envoy, with the same requests: mean
    # 2.65 s, p99 13.9 s, 42 of 522 requests on the slow replicas. The gauges of those simulated
    # replicas showed the current state. vLLM's show the end of the last step.
    monkeypatch.setattr(Engine, "gauges", _LiveGauges(), raising=False)
    part = ["--speed", "4", "--skip", "500", "--duration", "20", "--no-oracle"]
    (run,) = simulate(*part, "--policy", "queue_kv", fleet_file=LIVE_MIXED)
    found = run["summary"]
    assert found["requests"] == 522
    assert found["e2e_s"]["mean"] == pytest.approx(2.65, rel=0.05)
    assert found["e2e_s"]["p99"] == pytest.approx(13.9, rel=0.05)
    slow = sum(found["per_replica"][f"a10-{n}"]["requests"] for n in (0, 1))
    assert slow == pytest.approx(42, abs=5)


def test_distance_to_oracle_is_printed(
    simulate: Simulate, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = simulate("--policy", "round_robin", "--speed", "4", "--requests", "150")
    run, oracle = (each["summary"] for each in runs)
    assert oracle["policy"] == "oracle"
    ratio = run["to_oracle"]["e2e_s"]["mean"]
    assert ratio == run["e2e_s"]["mean"] / oracle["e2e_s"]["mean"]
    assert ratio > 1.5
    assert f"{ratio:.2f}" in capsys.readouterr().out


def test_oracle_is_skipped_with_adapters_which_it_does_not_know(simulate: Simulate) -> None:
    (run,) = simulate("--adapters", "3", "--requests", "20", fleet_file=FLEETS / "adapters.yaml")
    assert run["summary"]["policy"] == "completion"


def test_router_that_knows_step_times_ignores_a_wrong_profile() -> None:
    def replicas(profile_error: float) -> list[str]:
        options: dict[str, Any] = {"know": {"coefficients"}, "profile_error": profile_error}
        _, served = play(fleet.read(MIXED), trace.read([CONVERSATION], speed=3, most=50), **options)
        return [request.replica for request in served]

    assert replicas(4.0) == replicas(1.0)


@pytest.mark.parametrize("drafts", [0, 4])
def test_oracle_predicts_solo_requests_exactly(drafts: int) -> None:
    # Drafts are accepted as a whole: twenty steps for the hundred tokens after the first.
    file = a10s(1, draft_tokens=drafts, acceptance=1) if drafts else fleet.read(MIXED)
    solo = [TracedRequest(60.0 * n, 500 + n, 101, None) for n in range(5)]
    for request in play(file, solo, "oracle")[1]:
        predicted = request.decision
        assert request.ttft == pytest.approx(predicted.predicted_ttft, rel=0.01)
        assert request.completion == pytest.approx(predicted.predicted_completion, rel=0.01)


def test_phase_without_requests_is_refused(
    simulate: Simulate, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate("--requests", "5", "--no-oracle", "--from", "9999", status=2)
    assert "none of the requests that arrived from" in capsys.readouterr().err


def test_digests_improve_decisions_of_several_routers() -> None:
    requests = trace.read([CONVERSATION], speed=2, most=150)
    options: dict[str, Any] = {"poll_interval": 5.0, "routers": 4}
    total = {}
    for lag in (0.0, None):
        _, served = play(fleet.read(EQUAL), requests, "least_request", share_lag=lag, **options)
        assert len(served) == len(requests)
        total[lag] = sum(request.completion for request in served)
    assert total[0.0] < total[None]


def test_third_of_the_requests_goes_past_the_router() -> None:
    requests = trace.read([CONVERSATION], speed=2, most=150)
    equal = fleet.read(EQUAL)
    simulation = FleetSimulation(equal, "completion", past_router=True)
    external, past = 0.0, 0
    for served in simulation.run(requests):
        external = max(external, simulation.fleet.overview().external.max())
        past += served.decision.choice.policy == "round_robin"
    assert external >= 1.0
    assert past == pytest.approx(len(requests) / 3, rel=0.25)


def test_prompts_with_equal_hash_ids_share_their_prefix() -> None:
    requests = [TracedRequest(10.0 * n, 2048, 10, None, (1, 2, 3, 4)) for n in range(2)]
    simulation, (first, second) = play(a10s(1), requests)
    assert summary(simulation, [first, second])["hits"] == pytest.approx((2048 - 16) / 4096)
    assert first.sequence.cached_tokens == 0
    assert second.sequence.cached_tokens == 2048 - 16  # at least one token is computed
    assert second.ttft < first.ttft / 5


def test_prompt_longer_than_the_context_fails() -> None:
    requests = [TracedRequest(0.0, 50_000, 10, None), TracedRequest(1.0, 100, 10, None)]
    simulation, (served,) = play(a10s(1), requests)
    assert served.traced is requests[1]
    assert [request.traced for request in simulation.failed] == requests[:1]


def test_requests_outside_the_phase_are_in_no_figure(simulate: Simulate) -> None:
    (run,) = simulate("--requests", "100", "--no-oracle", "--from", "10")
    requests = run["requests"]
    assert len(requests) == 100
    assert all(request["counted"] == (request["at_s"] >= 10) for request in requests)
    counted = sum(request["counted"] for request in requests)
    assert 0 < run["summary"]["requests"] == counted < 100


def test_first_tokens_of_streamed_requests_alone_are_counted(simulate: Simulate) -> None:
    """The router may delay first tokens of other requests, because no client sees them."""
    (run,) = simulate("--requests", "200", "--speed", "4", "--no-oracle")
    seen = [request["ttft_s"] for request in run["requests"] if request["streamed"]]
    assert 0 < len(seen) < 200
    assert run["summary"]["ttft_s"]["mean"] == pytest.approx(mean(seen))
    (figures,) = read({"simulate": {}, "runs": [run]}).runs
    assert mean(measured(figures, "ttft_s")) == pytest.approx(mean(seen))
