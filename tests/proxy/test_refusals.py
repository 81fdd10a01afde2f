import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from envoy_data_plane.envoy.service.ext_proc.v3 import ProcessingResponse

from extproc.proxy.services import Services
from tests.proxy.conftest import config_of, put_replicas, router_of, samples
from tests.proxy.envoy_side import CHAT, EnvoySide, Stream, connected
from tests.proxy.replies import MEMBERS, destination, error_of, status_of


@pytest.mark.parametrize(
    "body", [b"", b"not json", b"[]", b'{"model": 5}', b"[" * 10_000, b'{"model": "\xff"}']
)
async def test_invalid_body_answers_400(envoy: EnvoySide, services: Services, body: bytes) -> None:
    reply = await envoy.ask(body)
    assert status_of(reply) == 400
    error = error_of(reply)
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    assert services.fleet.in_flight == 0


ANTHROPIC_ERRORS = [
    (b"not json", 400, "invalid_request_error"),
    ({"model": "none"}, 404, "not_found_error"),
    ({"model": "down"}, 503, "overloaded_error"),
]


@pytest.mark.parametrize(("body", "status", "kind"), ANTHROPIC_ERRORS)
@pytest.mark.parametrize("ask", [EnvoySide.ask, EnvoySide.ask_body_first])
async def test_messages_endpoint_refuses_in_anthropics_form(
    services: Services,
    envoy: EnvoySide,
    ask: Callable[..., Awaitable[ProcessingResponse]],
    body: Any,
    status: int,
    kind: str,
) -> None:
    put_replicas(services, 3, models=("down",), healthy=False)
    reply = await ask(envoy, body, "/v1/messages")
    assert status_of(reply) == status
    assert reply.immediate_response is not None
    answer = json.loads(reply.immediate_response.body)
    assert answer == {
        "type": "error",
        "error": {"type": kind, "message": answer["error"]["message"]},
    }


async def test_post_without_body_is_refused(stream: Stream) -> None:
    reply = await stream.request_headers(end_of_stream=True)
    assert reply.immediate_response is not None


async def test_missing_model_means_the_only_one(envoy: EnvoySide, services: Services) -> None:
    assert set(destination(await envoy.ask({"messages": []}))) == MEMBERS
    assert services.log.last(1)[0].decision.profile.model == "llama"


async def test_missing_model_among_several_is_routed(envoy: EnvoySide, services: Services) -> None:
    put_replicas(services, 2, models=("other",))
    assert set(destination(await envoy.ask({"messages": []}))) == MEMBERS
    assert services.log.last(1)[0].decision.profile.model == ""


@pytest.mark.parametrize("healthy", [True, False])
async def test_unlisted_model_is_404(envoy: EnvoySide, services: Services, healthy: bool) -> None:
    for number in range(3, 100):
        put_replicas(services, number, models=(f"model-{number:02}",), healthy=healthy)
    reply = await envoy.ask(CHAT | {"model": "none"})
    error = error_of(reply)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert status_of(reply) == 404
    assert "`none`" in error["message"]
    assert "`llama`, `model-03`" in error["message"]
    assert error["message"].endswith(" and 48 more.")


async def test_refusals_are_counted_by_reason(envoy: EnvoySide, services: Services) -> None:
    put_replicas(services, 3, models=("down",), healthy=False)
    for body in (b"no json", b'{"model": 5}', CHAT | {"model": "none"}, CHAT | {"model": "down"}):
        error = error_of(await envoy.ask(body))
        (*_, reason) = samples(services.metrics.refused)
        assert reason == (error["code"] or error["type"],)
    assert samples(services.metrics.refused) == {
        ("invalid_json",): 1,
        ("invalid_model",): 1,
        ("model_not_found",): 1,
        ("service_unavailable_error",): 1,
    }
    assert samples(services.metrics.requests) == {("refused",): 4}


@pytest.mark.parametrize("figures", [{"models": ()}, {"listed": False}])
async def test_replica_without_model_list_may_serve_any(
    envoy: EnvoySide, services: Services, figures: dict[str, Any]
) -> None:
    """``/metrics`` names one; of adapters and further names ``/v1/models`` tells."""
    put_replicas(services, 2, **figures)
    assert set(destination(await envoy.ask(CHAT | {"model": "none"}))) <= MEMBERS


async def test_no_model_is_unknown_before_replicas(envoy: EnvoySide, services: Services) -> None:
    services.fleet.known.clear()
    assert set(destination(await envoy.ask(CHAT | {"model": "none"}))) <= MEMBERS


async def test_listed_models_only_false_routes_any_model() -> None:
    lenient = config_of(route={"listed_models_only": False})
    services = router_of(lenient, 1)
    async with connected(services) as envoy:
        assert destination(await envoy.ask(CHAT | {"model": "an adapter"}))
