"""Objectives and targets of requests, from settings and headers."""

from typing import Any

import pytest

from extproc.config import Config
from extproc.proxy.services import Services
from extproc.request.objective import NO_OBJECTIVE, Objective
from tests.proxy.conftest import config_of, put_replicas, router_of, samples
from tests.proxy.envoy_side import CHAT, EnvoySide, Local, Stream
from tests.proxy.replies import chosen, error_of

CODER = {**CHAT, "model": "coder"}
OBJECTIVES = {
    "chat": {"priority": 2, "ttft_s": 20.0, "tenants": ["support"]},
    "code": {"priority": 1, "completion_s": 60.0, "models": ["coder"]},
    "soon": {"ttft_s": 30.0, "sheddable": True},
    "whole": {"completion_s": 0.001, "sheddable": True},
}
ALLOWED = {"allow_inference_headers": True}
allowed = pytest.mark.parametrize("config", [{"hold": ALLOWED}], indirect=True)


@pytest.fixture
def config(request: pytest.FixtureRequest) -> Config:
    """With ``param``: further settings of ``hold`` and ``route``."""
    more: dict[str, dict[str, object]] = {"hold": {}, "route": {}} | getattr(request, "param", {})
    return config_of(
        hold={"objectives": OBJECTIVES, "objective_header": "X-Objective"} | more["hold"],
        request={"tenant_header": "X-Tenant"},
        route={"models": {"coder": "llama"}, "seed": 1} | more["route"],
    )


async def objective_of(
    envoy: EnvoySide, services: Services, headers: dict[str, str], body: dict[str, Any] = CHAT
) -> Objective:
    assert chosen(await envoy.ask_body_first(body, headers=headers))
    (record,) = services.log.last(1)
    objective = record.decision.profile.objective
    assert record.record().objective == objective.name
    return objective


@pytest.mark.parametrize(
    ("headers", "body", "name"),
    [
        ({}, CHAT, ""),
        ({"x-objective": "soon"}, CHAT, "soon"),
        ({"x-objective": "soon", "x-tenant": "support"}, CODER, "soon"),
        ({"x-objective": "unknown", "x-tenant": "support"}, CODER, "chat"),
        ({"x-tenant": "support"}, CODER, "chat"),
        ({"x-tenant": "other"}, CODER, "code"),
        ({"x-gateway-inference-objective": "soon"}, CHAT, ""),
        ({"x-llm-d-inference-fairness-id": "support"}, CHAT, ""),
    ],
)
async def test_objective_follows_header_then_tenant_then_model(
    envoy: EnvoySide, services: Services, headers: dict[str, str], body: dict[str, Any], name: str
) -> None:
    assert (await objective_of(envoy, services, headers, body)).name == name


@allowed
@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"x-llm-d-inference-objective": "chat"}, Objective("chat", 2, ttft_s=20.0)),
        ({"x-gateway-inference-objective": "chat"}, Objective("chat", 2, ttft_s=20.0)),
        (
            {"x-gateway-inference-objective": "soon", "x-llm-d-inference-objective": "chat"},
            Objective("chat", 2, ttft_s=20.0),
        ),
        ({"x-gateway-inference-fairness-id": "support"}, Objective("chat", 2, ttft_s=20.0)),
        ({"x-llm-d-inference-fairness-id": "support"}, Objective("chat", 2, ttft_s=20.0)),
        ({"x-slo-ttft-ms": "1500"}, Objective(ttft_s=1.5)),
        ({"x-slo-ttft-ms": "1500", "x-llm-d-slo-ttft-ms": "2500.5"}, Objective(ttft_s=2.5005)),
        (
            {"x-objective": "chat", "x-llm-d-slo-tpot-ms": "50"},
            Objective("chat", 2, ttft_s=20.0, tpot_s=0.05),
        ),
        ({"x-objective": "chat", "x-slo-ttft-ms": "40000"}, Objective("chat", 2, ttft_s=40.0)),
        *(({"x-slo-ttft-ms": wrong}, NO_OBJECTIVE) for wrong in ("", "x", "-1", "0", "inf", "nan")),
    ],
)
async def test_allowed_inference_headers_set_objective(
    envoy: EnvoySide, services: Services, headers: dict[str, str], expected: Objective
) -> None:
    assert await objective_of(envoy, services, headers) == expected


@pytest.mark.parametrize("config", [{}, {"hold": ALLOWED}], indirect=True)
@pytest.mark.parametrize(
    "headers",
    [{"x-objective": "whole"}, {"x-objective": "soon", "x-llm-d-slo-ttft-ms": "0.1"}],
)
async def test_sheddable_request_beyond_target_is_refused(
    stream: Stream, services: Services, config: Config, headers: dict[str, str]
) -> None:
    """The replicas are idle: the targets are too short for any load."""
    counts = len(headers) == 1 or config.hold.allow_inference_headers
    reply = await stream.body_first(CHAT, headers=headers)
    assert (reply.immediate_response is not None) is counts
    if reply.immediate_response is not None:
        error = error_of(reply)
        assert error["code"] == "too_late"
        assert "would miss its target, by " in error["message"]
        assert samples(services.metrics.refused) == {("too_late",): 1}


limited = pytest.mark.parametrize(
    ("config", "headers"),
    [({"route": {"max_ttft_s": 0.001}}, {}), ({}, {"x-objective": "whole"})],
    indirect=["config"],
    ids=["limit of the pool", "target of the request"],
)


@limited
async def test_prompt_that_fits_nowhere_is_refused_by_a_replica(
    envoy: EnvoySide, services: Services, headers: dict[str, str]
) -> None:
    """The error of a replica names the limit. A 429 of the router would say: try again."""
    put_replicas(services, max_model_len=8)
    assert chosen(await envoy.ask_body_first(CHAT, headers=headers))


@limited
async def test_idle_replica_whose_speed_is_not_measured_is_never_too_slow(
    config: Config, headers: dict[str, str]
) -> None:
    """If all requests were refused, the speed of the replica would never be measured."""
    envoy = EnvoySide(Local(router_of(config, measured=False)))
    async with envoy.stream() as first, envoy.stream() as second, envoy.stream() as third:
        replies = [
            await stream.body_first(CHAT, headers=headers) for stream in (first, second, third)
        ]
    assert [reply.immediate_response is not None for reply in replies] == [False, False, True]


def test_sheddable_objective_may_get_targets_from_headers() -> None:
    hold = {"objectives": {"a": {"sheddable": True}}} | ALLOWED
    assert config_of(hold=hold).hold.objectives["a"].sheddable
