from collections.abc import Mapping
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from extproc.config import Config
from extproc.observe.metrics import RouterMetrics
from extproc.proxy.services import Services
from extproc.route.router import Router
from tests.fakes import MODEL, ManualClock, fleet_of
from tests.proxy.conftest import config_of
from tests.proxy.envoy_side import CHAT, EnvoySide, Stream
from tests.proxy.replies import destination

BY = {"model": MODEL, "objective": "chat"}
TOKEN = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":100,"completion_tokens":5,'
    b'"prompt_tokens_details":{"cached_tokens":32}}}\n\ndata: [DONE]\n\n'
)


@pytest.fixture
def config() -> Config:
    return config_of(
        serve={"chunks_per_s": 1e6},
        hold={"objectives": {"chat": {"priority": 1, "models": [MODEL]}}},
    )


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def services(services: Services, clock: ManualClock, registry: CollectorRegistry) -> Services:
    fleet = fleet_of(clock, "llama-8b-a10", "llama-8b-h100")
    fleet.members_known.set()
    router = Router(fleet, "completion", services.random)
    metrics = RouterMetrics(registry)
    return replace(services, router=router, clock=clock, metrics=metrics)


def value(registry: CollectorRegistry, name: str, by: Mapping[str, str] = BY) -> float | None:
    return registry.get_sample_value(f"extproc_{name}", dict(by))


async def test_streamed_response_fills_time_and_prediction_metrics(
    stream: Stream, services: Services, clock: ManualClock, registry: CollectorRegistry
) -> None:
    first = destination(await stream.ask(CHAT | {"stream": True}, headers={"x-request-id": "one"}))[
        0
    ]
    await stream.response_headers(upstream=first, content_type="text/event-stream")
    clock.advance(0.5)
    await stream.response_body(TOKEN, False)
    clock.advance(2.0)
    await stream.response_body(USAGE)
    await stream.end()
    (record,) = services.log.of_request("one")
    decision = record.decision
    # Nothing was learned yet that would stretch it.
    tpot = decision.forecast().decode_time_per_token
    for name, actual, predicted in (
        ("ttft", 0.5, decision.predicted_ttft),
        ("tpot", 0.5, tpot),
        ("completion", 2.5, decision.predicted_completion),
    ):
        assert value(registry, f"{name}_seconds_count") == 1
        assert value(registry, f"{name}_seconds_sum") == pytest.approx(actual)
        ratio = value(registry, f"{name}_predicted_ratio_sum")
        assert ratio == pytest.approx(predicted / actual)
    hits = {"replica": first}
    assert value(registry, "prefix_cache_reported_tokens_total", hits) == 32
    assert value(registry, "prefix_cache_expected_tokens_total", hits) == 0


async def test_retry_on_other_replica_measures_no_prediction(
    stream: Stream, clock: ManualClock, registry: CollectorRegistry
) -> None:
    first, second = destination(await stream.ask())
    await stream.response_headers(upstream=second)
    clock.advance(1.5)
    await stream.response_body({"usage": {"prompt_tokens": 100, "completion_tokens": 50}})
    await stream.end()
    assert value(registry, "completion_seconds_sum") == 1.5
    assert value(registry, "completion_predicted_ratio_count") is None
    assert value(registry, "ttft_seconds_count") is None
    assert value(registry, "failures_total", {"replica": first}) == 1
    assert value(registry, "failures_total", {"replica": second}) is None


async def test_failures_are_counted_until_replica_leaves(
    envoy: EnvoySide, services: Services, registry: CollectorRegistry
) -> None:
    async with envoy.stream() as stream:
        first, second = destination(await stream.ask())
        await stream.answer(status=503, upstream=first)
    assert value(registry, "failures_total", {"replica": first}) == 1
    services.metrics.drop_other_replicas({second})
    assert value(registry, "failures_total", {"replica": first}) is None
    assert value(registry, "completion_seconds_count") is None


async def test_unanswered_request_counts_as_demand(envoy: EnvoySide, services: Services) -> None:
    assert services.demand.replicas(services.queue) == 0.0
    await envoy.ask()
    assert services.demand.replicas(services.queue) > 0.0


def test_replica_left_out_metric_follows_exclusions(registry: CollectorRegistry) -> None:
    metrics = RouterMetrics(registry)
    metrics.set_excluded([("a", "failing"), ("b", "draining")])
    assert value(registry, "replica_left_out", {"replica": "a", "reason": "failing"}) == 1
    metrics.set_excluded([("b", "draining")])
    assert value(registry, "replica_left_out", {"replica": "a", "reason": "failing"}) is None
    assert value(registry, "replica_left_out", {"replica": "b", "reason": "draining"}) == 1
