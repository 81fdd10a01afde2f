"""Requests in each of Envoy's protocols are dispatched with model name and priority, or refused."""

import gzip
import json
from typing import Any

import pytest
from envoy_data_plane.envoy.service.ext_proc.v3 import ProtocolConfiguration
from msgspec import to_builtins

from extproc.config import Config
from extproc.fleet import eligibility
from extproc.poll.destination import IntoFleet
from extproc.proxy import stream as stream_module
from extproc.proxy.services import Services
from extproc.request.endpoint import Endpoint
from tests.conftest import Logged
from tests.fakes import CountedName, replica
from tests.proxy.conftest import config_of, put_replicas, samples
from tests.proxy.envoy_side import CHAT, PROTOCOLS, EnvoySide, Stream, body_first
from tests.proxy.replies import (
    MEMBERS,
    BodyMode,
    HeaderMode,
    body_of,
    chosen,
    common,
    destination,
    error_of,
    header_of,
    mode_of,
    refusal_header,
    routed_to,
    status_of,
)

COMPLETIONS = "/v1/chat/completions"
PRIORITY = "x-vllm-priority"
ANSWER = {"choices": [], "usage": {"prompt_tokens": 75, "completion_tokens": 33}}
HOLD = {
    "objective_header": "x-objective",
    "objectives": {
        "urgent": {"priority": 10},
        "batch": {"priority": -20},
        "usual": {"ttft_s": 5},
    },
    "empty_s": 0,
}
ROUTE = {
    "policy_header": "x-extproc-policy",
    "session_header": "X-Session",
    "session_cookie": "sid",
    "seed": 1,
}
NAMES = {"chat": "llama", "any": ["a", "b"], "canary": {"llama": 1, "next": 99}}
SERVE = {"chunks_per_s": 1e6, "second_choice": True}
in_each_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)


@pytest.fixture
def config() -> Config:
    return config_of(
        hold=HOLD,
        route=ROUTE | {"models": NAMES},
        request={"tenant_header": "X-Tenant"},
        serve=SERVE,
    )


def without(**sections: Any) -> pytest.MarkDecorator:
    """Runs the test with a configuration that has these sections, and no ``route.models``."""
    settings = {"hold": {"empty_s": 0}, "route": ROUTE, "serve": SERVE} | sections
    return pytest.mark.parametrize("config", [config_of(**settings)])


@pytest.fixture(autouse=True)
def replicas(services: Services) -> None:
    put_replicas(services, takes_priority=True)


def named(**fields: Any) -> dict[str, Any]:
    return {"messages": CHAT["messages"], "model": "chat"} | fields


def compact(body: dict[str, Any]) -> bytes:
    """JSON without spaces between fields, and the values as ``json.dumps`` writes them."""
    fields = (f'"{name}":{json.dumps(value)}' for name, value in body.items())
    return f"{{{','.join(fields)}}}".encode()


SENT_ON: list[tuple[dict[str, Any], str, str, dict[str, Any]]] = [
    (CHAT, "", COMPLETIONS, {}),
    (CHAT, "usual", COMPLETIONS, {}),
    (named(), "", COMPLETIONS, {"model": "llama"}),
    (CHAT, "urgent", COMPLETIONS, {"priority": -10}),
    (CHAT, "batch", COMPLETIONS, {"priority": 20}),
    (named(), "urgent", COMPLETIONS, {"model": "llama", "priority": -10}),
    *(
        (CHAT | {"priority": -999}, objective, COMPLETIONS, {"priority": written})
        for objective, written in (("urgent", -10), ("", 0), ("usual", 0), ("unheard of", 0))
    ),
    (CHAT | {"max_tokens": 5}, "urgent", "/v1/messages", {}),
    (CHAT | {"max_tokens": 5}, "urgent", "/v1/responses", {"priority": -10}),
]
"""A body, an objective, a path, and the fields that differ in the body for the replica."""


@in_each_protocol
@pytest.mark.parametrize(("body", "objective", "path", "written"), SENT_ON)
async def test_body_gets_model_name_and_priority(
    envoy: EnvoySide, protocol: str, body: dict[str, Any],
    objective: str, path: str, written: dict[str, Any],
) -> None:  # fmt: skip
    headers = {"x-objective": objective} if objective else {}
    reply, changed = await envoy.route(protocol, body, path, headers)
    assert set(routed_to(reply)) == MEMBERS
    if not written:
        assert changed is None
        return
    assert changed is not None
    assert json.loads(changed) == body | written
    if protocol != "full duplex":
        assert header_of(reply, "content-length") == str(len(changed))
    if "priority" in written:
        assert header_of(reply, PRIORITY) == str(written["priority"])
    else:
        assert changed == compact(body | written)


async def test_large_body_is_read_to_rewrite_model(stream: Stream) -> None:
    reply = await stream.request_headers(headers={"content-length": str(40 * 2**20)})
    assert destination(reply) == []
    assert body_of(await stream.request_body(named())) == compact(named(model="llama"))


@without()
async def test_client_priority_passes_without_objectives(envoy: EnvoySide) -> None:
    reply, changed = await envoy.route("body first", CHAT | {"priority": -999})
    assert changed is None
    assert header_of(reply, PRIORITY) is None


async def test_priority_needs_support_of_all_replicas(envoy: EnvoySide, services: Services) -> None:
    async def written(**fields: int) -> int | None:
        urgent = {"x-objective": "urgent"}
        _, body = await envoy.route("body first", CHAT | fields, headers=urgent)
        return None if body is None else json.loads(body)["priority"]

    put_replicas(services, 2, takes_priority=False)
    assert [await written() for _ in range(4)] == [None] * 4
    assert await written(priority=-999) == 0
    put_replicas(services, 2, takes_priority=True)
    put_replicas(services, 3, models=(), healthy=False)  # a replica that still loads does not count
    assert await written() == -10


LOADING: dict[str, Any] = {"models": (), "healthy": False}


@pytest.mark.parametrize(
    ("model", "first", "second"),
    [
        ("chat", LOADING, LOADING),
        ("any", LOADING, LOADING),
        ("canary", {"healthy": False}, {"healthy": False}),
        ("canary", {"healthy": False}, {"models": ("other",)}),
        ("canary", {"healthy": False}, {"models": ("other",), "listed": False}),
        ("canary", {"models": ("other",)}, {"models": ("other",)}),
    ],
)
async def test_alias_whose_replicas_are_down_gets_503(
    envoy: EnvoySide, services: Services, model: str, first: dict[str, Any], second: dict[str, Any]
) -> None:
    """Envoy's fallback would send the alias, and a replica that is just back would answer 404."""
    put_replicas(services, 1, **first)
    put_replicas(services, 2, **second)
    for _ in range(10):
        assert status_of(await envoy.ask(named(model=model))) == 503


TEXT = "of the sea " * 40
MESSAGES = {"messages": [{"role": "user", "content": TEXT}]}
IDS = list(range(1000))
TOKENS_OF_TEXT = len(TEXT) / 4
PATHS: list[tuple[str, dict[str, Any], Endpoint, float]] = [
    ("/v1/chat%2Fcompletions", MESSAGES, Endpoint.CHAT, TOKENS_OF_TEXT),
    ("/v1%2F%63hat/completions?a=%2F", MESSAGES, Endpoint.CHAT, TOKENS_OF_TEXT),
    ("/pool/v1/chat/completions/batch", {"messages": [MESSAGES["messages"]] * 2}, Endpoint.CHAT,
     2 * TOKENS_OF_TEXT),
    ("/cohere/v2/chat", MESSAGES, Endpoint.CHAT, TOKENS_OF_TEXT),
    ("/generative_scoring", {"query": TEXT, "items": [TEXT]}, Endpoint.SCORE, 2 * TOKENS_OF_TEXT),
    ("/v1/systemone", {"state": TEXT, "questions": {}}, Endpoint.POOLING, TOKENS_OF_TEXT),
    ("/inference/v1/generate", {"token_ids": IDS}, Endpoint.GENERATE, len(IDS)),
    ("/invocations", MESSAGES, Endpoint.CHAT, TOKENS_OF_TEXT),
    ("/invocations", {"prompt": TEXT}, Endpoint.COMPLETIONS, TOKENS_OF_TEXT),
    ("/invocations", {"input": TEXT}, Endpoint.EMBEDDINGS, TOKENS_OF_TEXT),
    ("/invocations", {"query": TEXT, "documents": ["x"]}, Endpoint.RERANK, TOKENS_OF_TEXT),
    ("/invocations", {"text_1": TEXT, "text_2": "x"}, Endpoint.SCORE, TOKENS_OF_TEXT),
    ("/invocations", {"data": TEXT}, Endpoint.POOLING, TOKENS_OF_TEXT),
    ("/pooling", {"data": {"text": TEXT}}, Endpoint.POOLING, TOKENS_OF_TEXT),
    ("/v2/embed", {"inputs": [{"content": [{"type": "text", "text": TEXT}]}]}, Endpoint.EMBEDDINGS,
     TOKENS_OF_TEXT),
]  # fmt: skip
"""Paths of inference, each with a body, its endpoint and the approximate tokens."""


@pytest.mark.parametrize(("path", "body", "endpoint", "tokens"), PATHS)
async def test_each_inference_path_is_routed_with_model_and_priority(
    stream: Stream, services: Services, path: str,
    body: dict[str, Any], endpoint: Endpoint, tokens: float,
) -> None:  # fmt: skip
    reply = await stream.body_first(body | {"model": "chat", "priority": -999}, path)
    assert services.fleet.in_flight == 1
    await stream.end()
    assert set(chosen(reply)) == MEMBERS
    assert json.loads(body_of(reply) or b"") == body | {"model": "llama", "priority": 0}
    profile = services.log.last(1)[0].decision.profile
    assert profile.endpoint is endpoint
    assert profile.prompt_tokens == pytest.approx(tokens, rel=0.25)


@in_each_protocol
@pytest.mark.parametrize(
    "body", [b"", b"not json", b"[]", b'{"model": 5}', b"[" * 10_000, b'{"model": "\xff"}']
)
async def test_invalid_body_answers_400(
    envoy: EnvoySide, services: Services, protocol: str, body: bytes
) -> None:
    reply, _ = await envoy.route(protocol, body)
    assert status_of(reply) == 400
    error = error_of(reply)
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    assert refusal_header(reply, "content-type") == b"application/json"
    assert services.fleet.in_flight == 0


ANTHROPIC_ERRORS = [
    (b"not json", 400, "invalid_request_error"),
    ({"model": "none"}, 404, "not_found_error"),
    ({"model": "down"}, 503, "overloaded_error"),
]


@in_each_protocol
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(("body", "status", "kind"), ANTHROPIC_ERRORS)
async def test_messages_endpoints_refuse_in_anthropics_form(
    services: Services, envoy: EnvoySide, protocol: str,
    path: str, body: Any, status: int, kind: str,
) -> None:  # fmt: skip
    put_replicas(services, 3, models=("down",), healthy=False)
    reply, _ = await envoy.route(protocol, body, path)
    assert status_of(reply) == status
    assert reply.immediate_response is not None
    answer = json.loads(reply.immediate_response.body)
    assert answer == {
        "type": "error",
        "error": {"type": kind, "message": answer["error"]["message"]},
    }


@without()
@pytest.mark.parametrize(("second", "model"), [({}, "llama"), ({"models": ("other",)}, "")])
async def test_request_without_model_gets_the_only_model(
    envoy: EnvoySide, services: Services, second: dict[str, Any], model: str
) -> None:
    put_replicas(services, 2, **second)
    assert set(destination(await envoy.ask({"messages": []}))) == MEMBERS
    assert services.log.last(1)[0].decision.profile.model == model


@without()
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


@without()
async def test_unknown_models_displace_no_candidates(
    envoy: EnvoySide, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To choose the candidates of a thousand replicas takes as long as 27 decisions."""
    monkeypatch.setattr(eligibility, "_REMEMBERED_ROWS", 3)
    candidates = services.fleet.eligibility.candidates("llama")
    for number in range(4):
        assert status_of(await envoy.ask(CHAT | {"model": f"unknown {number}"})) == 404
    assert services.fleet.eligibility.candidates("llama") is candidates


@without()
@pytest.mark.parametrize("subset", [None, [replica(2)]])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_model_that_was_served_lately_gets_503(
    envoy: EnvoySide, services: Services, subset: list[str] | None, path: str
) -> None:
    """Clients take 404 for final, but the model's next replica may be starting."""
    put_replicas(services, 2, models=("other",))
    put_replicas(services, 3, models=("third",))
    services.fleet.remove(replica(1))
    assert status_of(await envoy.ask(CHAT, path, subset=subset)) == 503
    assert status_of(await envoy.ask(CHAT | {"model": "none"}, path, subset=subset)) == 404


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


@pytest.mark.parametrize(
    ("figures", "known"), [({"models": ()}, True), ({"listed": False}, True), ({}, False)]
)
async def test_model_that_a_replica_may_serve_is_routed(
    envoy: EnvoySide, services: Services, figures: dict[str, Any], known: bool
) -> None:
    """A replica without a list, or with models from its metrics only, may serve other models."""
    put_replicas(services, 2, **figures)
    if not known:
        services.fleet.members_known.clear()
    reply = await envoy.ask(CHAT | {"model": "none"})
    assert reply.immediate_response is None
    assert set(destination(reply)) <= MEMBERS


async def test_memory_state_refuses_no_model_before_each_replica_has_a_state(
    envoy: EnvoySide, services: Services
) -> None:
    services.fleet.members_known.clear()
    services.fleet.remove(replica(2))
    into = IntoFleet(services.fleet)
    await into.claim(MEMBERS)
    assert set(destination(await envoy.ask(CHAT | {"model": "none"}))) == {replica(1)}
    put_replicas(services, 2, healthy=False)
    await into.claim(MEMBERS)
    assert status_of(await envoy.ask(CHAT | {"model": "none"})) == 404


@without(route={"listed_models_only": False})
async def test_listed_models_only_false_routes_any_model(envoy: EnvoySide) -> None:
    assert destination(await envoy.ask(CHAT | {"model": "an adapter"}))


@in_each_protocol
@pytest.mark.parametrize(
    "headers", [{"x-session": "s"}, {"cookie": "a=b; sid=s"}, {"x-extproc-policy": "round_robin"}]
)
async def test_headers_name_tenant_session_and_policy(
    envoy: EnvoySide, services: Services, protocol: str, headers: dict[str, str]
) -> None:
    await envoy.route(protocol, CHAT, headers=headers | {"x-tenant": "t"})
    (record,) = services.log.last(1)
    assert record.decision.profile.tenant == "t"
    in_turn = "x-extproc-policy" in headers
    assert bool(record.decision.profile.session) is not in_turn
    assert record.decision.choice.policy == ("round_robin" if in_turn else "completion")


async def test_header_attributes_may_hold_any_bytes(envoy: EnvoySide, services: Services) -> None:
    """Envoy copies header bytes into a text field."""
    async with envoy.stream() as stream:
        message = body_first(CHAT, headers={"x-session": "s?", "x-request-id": "abc"})
        reply = await stream.send_bytes(bytes(message).replace(b"s?", b"s\xff"))
        assert set(chosen(reply)) == MEMBERS
    (record,) = services.log.of_request("abc")
    assert record.decision.profile.session


@pytest.mark.parametrize("protocol", ["headers first", "body first"])
@pytest.mark.parametrize("retried", [False, True])
async def test_request_is_routed_and_outcome_logged(
    stream: Stream, services: Services, protocol: str, retried: bool
) -> None:
    send = stream.body_first if protocol == "body first" else stream.ask
    reply = await send(CHAT, headers={"x-request-id": "abc"})
    assert not common(reply).clear_route_cache
    first, second = routed_to(reply)
    assert {first, second} == MEMBERS
    assert (services.fleet.in_flight, services.fleet.in_flight_on(first)) == (1, 1)

    served, other = (second, first) if retried else (first, second)
    reply = await stream.response_headers(upstream=served)
    assert mode_of(reply).response_body_mode == BodyMode.STREAMED
    assert [services.fleet.in_flight_on(each) for each in (served, other)] == [1, 0]
    assert (await stream.response_body(ANSWER)).response_body is not None
    await stream.end()

    assert services.fleet.in_flight == 0
    (record,) = services.log.of_request("abc")
    shown = to_builtins(record.record())
    assert shown["replica"] == first
    assert shown["outcome"]["served_by"] == served
    assert shown["outcome"]["status"] == 200
    assert shown["outcome"]["output_tokens"] == 33
    assert shown["outcome"]["completion_s"] > 0
    assert {candidate["replica"] for candidate in shown["candidates"]} == MEMBERS
    json.dumps(shown, allow_nan=False)


@pytest.mark.parametrize("mode", [BodyMode.NONE, BodyMode.STREAMED, BodyMode.BUFFERED_PARTIAL])
async def test_other_body_modes_leave_requests_to_envoy(
    envoy: EnvoySide, services: Services, logged: Logged, mode: BodyMode
) -> None:
    stream_module._warn_of_body_mode.cache_clear()
    for _ in range(2):
        async with envoy.stream() as stream:
            reply = await stream.request_headers(body_mode=mode)
            assert destination(reply) == []
            assert mode_of(reply).response_header_mode == HeaderMode.SKIP
            await stream.end()
    message = body_first(CHAT, end_of_stream=False)
    message.protocol_config = ProtocolConfiguration(request_body_mode=mode)
    async with envoy.stream() as stream:
        assert destination(await stream.send(message)) == []
        await stream.end()
    assert samples(services.metrics.requests) == {("unrouted",): 3.0}
    (line,) = (line for line in logged.lines() if line["levelname"] == "ERROR")
    assert "request_body_mode" in str(line["msg"])


async def test_compressed_body_is_routed_by_length(
    stream: Stream, envoy: EnvoySide, services: Services
) -> None:
    body, gzipped = gzip.compress(json.dumps(CHAT).encode()), {"content-encoding": "gzip"}
    reply = await stream.request_headers(headers=gzipped | {"content-length": "400"})
    assert set(destination(reply)) == MEMBERS
    assert mode_of(reply).request_body_mode == BodyMode.NONE
    assert destination(await stream.request_body(body)) == []
    reply = await envoy.ask_body_first(body + bytes(10_000), headers=gzipped)
    assert set(chosen(reply)) == MEMBERS
    (record,) = services.log.last(1)
    assert record.decision.profile.prompt_tokens > 2000


@pytest.mark.parametrize(
    ("body", "headers"), [(CHAT, {}), (b"\x1f\x8b", {"content-encoding": "gzip"})]
)
@without()
async def test_without_healthy_replica_envoy_chooses(
    envoy: EnvoySide, services: Services, body: Any, headers: dict[str, str]
) -> None:
    put_replicas(services, healthy=False)
    reply = await envoy.converse(body, status=503, headers=headers)
    assert reply.immediate_response is None
    assert destination(reply) == []


@without(hold=HOLD)
async def test_large_body_stays_with_envoy(stream: Stream, services: Services) -> None:
    headers = {"x-objective": "urgent", "content-length": str(40 * 2**20)}
    reply = await stream.request_headers(headers=headers)
    assert set(destination(reply)) == MEMBERS
    assert header_of(reply, PRIORITY) == "-10"
    assert mode_of(reply).request_body_mode == BodyMode.NONE
    assert mode_of(reply).response_header_mode == HeaderMode.DEFAULT
    assert mode_of(reply).response_trailer_mode == HeaderMode.SEND
    (record,) = services.log.after(0)
    assert record.decision.profile.model == "llama"
    assert record.decision.profile.prompt_tokens == 40 * 576
    # Without allow_mode_override, Envoy sends the body all the same.
    assert destination(await stream.request_body(b"{")) == []
    await stream.answer()


@without()
async def test_large_body_passes_the_router_by_if_envoy_chooses(
    stream: Stream, services: Services
) -> None:
    put_replicas(services, healthy=False)
    reply = await stream.request_headers(headers={"content-length": str(40 * 2**20)})
    assert destination(reply) == []
    assert mode_of(reply).request_body_mode == BodyMode.NONE


@without()
async def test_large_body_is_read_to_choose_model(stream: Stream, services: Services) -> None:
    put_replicas(services, 2, models=("other",))
    reply = await stream.request_headers(headers={"content-length": str(40 * 2**20)})
    assert destination(reply) == []
    reply = await stream.request_body(CHAT | {"model": "other"})
    assert set(destination(reply)) == {replica(2)}  # a retry elsewhere would fail


async def test_list_of_models_searches_no_list(stream: Stream, services: Services) -> None:
    """A search for each of 2,000 adapters would block the router for 100 ms."""
    adapters = tuple(CountedName(f"adapter-{number}") for number in range(500))
    listed = {"models": ("llama", *adapters), "adapters": adapters}
    for number in (1, 2):
        put_replicas(services, number, **listed, max_model_len=1024 * number)
    CountedName.compared = 0
    reply = await stream.request_headers("/v1/models", "GET", end_of_stream=True)
    assert CountedName.compared < 20 * 500
    assert reply.immediate_response is not None
    models = {model["id"]: model for model in json.loads(reply.immediate_response.body)["data"]}
    shown = [
        (models[name]["parent"], models[name]["max_model_len"]) for name in ("chat", "adapter-7")
    ]
    assert shown == [(None, 1024), ("llama", 1024)]
