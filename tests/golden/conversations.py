"""Conversations of Envoy with routers, message by message, and the routers' configurations.

Addresses are those of the golden files; :mod:`tests.golden.stage` replaces them.
"""

import gzip
import json
from dataclasses import dataclass, field
from typing import Any

from envoy_data_plane.envoy.config.core.v3 import Metadata
from envoy_data_plane.envoy.service.ext_proc.v3 import ProcessingRequest, ProtocolConfiguration
from envoy_data_plane.google.protobuf import Struct, Value

from tests.proxy import envoy_side
from tests.proxy.envoy_side import (
    JsonOrBytes,
    attributes_of,
    body_first,
    headers_message,
    request_body,
    request_headers,
    response_body,
)
from tests.proxy.replies import BodyMode

FAST, SLOW, SIMULATED, GONE = (f"127.100.100.{last}:8000" for last in (101, 102, 103, 250))
KV_TOKENS = 8192
"""KV cache of the simulated replica."""
_REPLICAS = [
    {"url": FAST, "profile": "llama-8b-h100", "name": "fast"},
    {"url": SLOW, "profile": "llama-8b-a10", "name": "slow"},
]
_SEES_ALL = {"chunks_per_s": 1e6}
ROUTERS: dict[str, dict[str, Any]] = {
    "plain": {
        "replicas": _REPLICAS,
        "pools": {"slow": {"replicas": _REPLICAS[1:]}},
        "serve": _SEES_ALL,
    },
    "rich": {
        "replicas": _REPLICAS,
        "serve": {**_SEES_ALL, "decision_metadata": True},
        "route": {
            "models": {"chat": "tiny", "either": ["tiny", "other"], "drawn": {"tiny": 1}},
            "session_header": "X-Session",
            "session_cookie": "sid",
        },
        "request": {"tenant_header": "X-Tenant"},
        "hold": {
            "objective_header": "X-Objective",
            "allow_inference_headers": True,
            "objectives": {
                "urgent": {"priority": 10},
                "batch": {"priority": -5, "models": ["drawn"]},
                "gold": {"priority": 3, "tenants": ["gold"]},
            },
        },
    },
    "strict": {
        "replicas": _REPLICAS,
        "serve": {"chunks_per_s": 0, "second_choice": False},
    },
    "hasty": {
        "replicas": [{"url": SIMULATED}],
        "route": {"max_ttft_s": 0.05},
        "hold": {
            "objective_header": "X-Objective",
            "objectives": {"hasty": {"ttft_s": 0.001, "sheddable": True}},
        },
    },
    "narrow": {"replicas": [{"url": SIMULATED}], "hold": {"longest_s": 2}, "serve": _SEES_ALL},
    "policy": {"replicas": _REPLICAS[:1], "route": {"policy": "queue_kv"}},
    "empty": {"replicas": [{"url": GONE}]},
}
"""Configuration by name, without the addresses and the seed that every router gets."""

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello " * 50}]}
BODY = json.dumps(CHAT).encode()
USAGE = {"choices": [], "usage": {"prompt_tokens": 75, "completion_tokens": 33}}
DONE = b"data: [DONE]\n\n"
EVENT = b'data: {"model":"tiny","choices":[{"delta":{"content":"a"}}]}\n\n'


@dataclass(frozen=True)
class ConversationStep:
    """Message, with the number of replies before the router reads the next message."""

    message: ProcessingRequest
    replies: int = 1


@dataclass(frozen=True)
class Conversation:
    """HTTP request as Envoy describes it to a router."""

    router: str
    name: str
    steps: list[ConversationStep]
    metadata: dict[str, str] = field(default_factory=dict)
    beside: list[list[ConversationStep]] = field(default_factory=list)
    """Requests that begin earlier, and end with this request or at :data:`OTHERS_END`."""


OTHERS_END = ConversationStep(ProcessingRequest(), 0)


def _dashed(named: dict[str, str]) -> dict[str, str]:
    """Return headers by their names: ``x_session`` stands for ``x-session``."""
    return {name.replace("_", "-"): value for name, value in named.items()}


def headers(
    path: str = "/v1/chat/completions",
    method: str = "POST",
    end: bool = False,
    mode: BodyMode = BodyMode.BUFFERED,
    replies: int = 1,
    subset: list[str] | None = None,
    **named: str,
) -> ConversationStep:
    """Return request headers."""
    response_mode = mode if mode == BodyMode.FULL_DUPLEX_STREAMED else BodyMode.NONE
    message = request_headers(path, method, end, mode, response_mode, _dashed(named), subset)
    return ConversationStep(message, replies)


def body(data: JsonOrBytes, end: bool = True, replies: int = 1) -> ConversationStep:
    """Return a request body, or a chunk of it."""
    return ConversationStep(request_body(data, end), replies)


def first(
    data: JsonOrBytes,
    path: str = "/v1/chat/completions",
    end: bool = True,
    mode: BodyMode = BodyMode.BUFFERED,
    **named: str,
) -> ConversationStep:
    """Return a request body as the first message, with attributes in place of headers."""
    message = body_first(data, path, _dashed(named), end)
    message.protocol_config = ProtocolConfiguration(request_body_mode=mode)
    return ConversationStep(message)


def response(
    status: int = 200,
    upstream: str = FAST,
    kind: str = "application/json",
    end: bool = False,
    served: str = "",
) -> ConversationStep:
    """Response headers; Envoy names the replica in ``upstream``, a gateway in ``served``."""
    message = ProcessingRequest(
        response_headers=headers_message({":status": str(status), "content-type": kind}, end)
    )
    if served:
        fields = {"x-gateway-destination-endpoint-served": Value(string_value=served)}
        message.metadata_context = Metadata(filter_metadata={"envoy.lb": Struct(fields=fields)})
    else:
        message.attributes = attributes_of({"upstream.address": upstream})
    return ConversationStep(message)


def chunk(data: JsonOrBytes, end: bool = True) -> ConversationStep:
    """Return a response body, or a chunk of it."""
    return ConversationStep(response_body(data, end))


REQUEST_TRAILERS, RESPONSE_TRAILERS = map(
    ConversationStep, (envoy_side.REQUEST_TRAILERS, envoy_side.RESPONSE_TRAILERS)
)
_STREAM = [
    response(kind="text/event-stream"),
    chunk(EVENT, end=False),
    chunk(b"data: " + json.dumps(USAGE).encode() + b"\n\n", end=False),
    chunk(DONE),
]
_ANSWER = [response(), chunk(USAGE)]
_DUPLEX: dict[str, Any] = {"mode": BodyMode.FULL_DUPLEX_STREAMED}
_HELD: dict[str, Any] = {"mode": BodyMode.FULL_DUPLEX_STREAMED, "replies": 0}
_MULTIPART = (
    b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\ntiny\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\r\n--b--\r\n'
)
_BODIES: dict[str, Any] = {
    "/v1/chat/completions": CHAT | {"n": 2, "max_tokens": 20, "stream": True},
    "/v1/completions": {"model": "tiny", "prompt": [[1, 2, 3], [4, 5]], "max_tokens": 7},
    "/v1/responses": {"model": "tiny", "input": "hello", "max_output_tokens": 9},
    "/v1/messages": CHAT | {"max_tokens": 5, "system": "be brief"},
    "/v1/audio/transcriptions": _MULTIPART,
    "/v1/audio/translations": _MULTIPART,
    "/v1/embeddings": {"model": "tiny", "input": ["one", "two"]},
    "/pooling": {"model": "tiny", "input": "one"},
    "/classify": {"model": "tiny", "input": "one"},
    "/v1/score": {"model": "tiny", "text_1": "one", "text_2": ["two", "three"]},
    "/v2/rerank": {"model": "tiny", "query": "one", "documents": ["two", "three"]},
}
_MALFORMED: dict[str, bytes] = {
    "empty": b"",
    "no JSON": b"not json",
    "a list": b"[]",
    "a model that is a number": b'{"model": 5}',
    "deep": b"[" * 10_000,
    "no UTF-8": b'{"model": "\xff"}',
    "cut": BODY[:-5],
}
_LARGE = json.dumps(CHAT | {"filler": "x" * 9_000_000}).encode()
_LONG = {"model": "tiny", "prompt": list(range(8_000))}


def _plain() -> list[Conversation]:
    steps: dict[str, list[ConversationStep]] = {
        "headers first, answer": [headers(x_request_id="headers-first"), body(CHAT), *_ANSWER],
        "headers first, stream": [headers(), body(CHAT | {"stream": True}), *_STREAM],
        "headers first, retried": [headers(), body(CHAT), response(upstream=SLOW), chunk(USAGE)],
        "headers first, trailers": [headers(), body(CHAT, end=False), REQUEST_TRAILERS, *_ANSWER],
        "response trailers": [headers(), body(CHAT), response(), RESPONSE_TRAILERS],
        "response of headers alone": [headers(), body(CHAT), response(204, end=True)],
        "no body mode": [headers(mode=BodyMode.NONE), *_ANSWER],
        "streamed mode": [headers(mode=BodyMode.STREAMED), *_ANSWER],
        "partial mode": [headers(mode=BodyMode.BUFFERED_PARTIAL), body(BODY[:-20], end=False)],
        "POST without a body": [headers(end=True)],
        "compressed": [headers(content_encoding="gzip"), *_ANSWER],
        "large by its length": [headers(content_length=str(2**24)), *_ANSWER],
        "large body": [headers(), body(_LARGE)],
        "unknown model": [headers(), body(CHAT | {"model": "unknown"})],
        "without a model": [headers(), body({"messages": []})],
        "list of models": [headers("/v1/models", "GET", end=True), response()],
        "GET of a chat": [headers("/v1/chat/completions", "GET"), body(b"x"), response()],
        "tokenize": [headers("/tokenize"), body(b"x"), response()],
        "path with prefix and query": [headers("/a/b/v1/completions?x=1"), body(CHAT)],
        "phases in any order": [
            *(response(), chunk(b"x"), RESPONSE_TRAILERS, REQUEST_TRAILERS),
            *(ConversationStep(ProcessingRequest()), body(CHAT), headers(), body(CHAT), body(CHAT)),
        ],
        "body first, answer": [first(CHAT, x_request_id="body-first"), *_ANSWER],
        "body first, stream": [first(CHAT | {"stream": True}), *_STREAM],
        "body first, unseen": [first(CHAT, x_extproc_response_skipped="1")],
        "body first, client left": [first(CHAT)],
        "body first, compressed": [first(gzip.compress(BODY, mtime=0), content_encoding="gzip")],
        "body first, goes on": [first(BODY[:-20], end=False, mode=BodyMode.BUFFERED_PARTIAL)],
        "body first, twice": [first(CHAT), first(CHAT), headers()],
        "body first, large": [first(_LARGE)],
        "body first, unknown model": [first(CHAT | {"model": "unknown"})],
        "body first, tokenize": [first(CHAT, "/tokenize"), response()],
        "response alone": [response()],
        "gateway, three chunks": [
            *(headers(**_HELD), body(BODY[:7], False, 0), body(BODY[7:100], False, 0)),
            *(body(BODY[100:], replies=2), response(served=SLOW), chunk(EVENT, end=False)),
            *(chunk(DONE), RESPONSE_TRAILERS),
        ],
        "gateway, trailers": [
            *(headers(**_HELD), body(BODY, False, 0), ConversationStep(REQUEST_TRAILERS.message)),
        ],
        "gateway, subset": [headers(**_HELD, subset=[SLOW]), body(CHAT, replies=2)],
        "gateway, no member": [headers(**_HELD, subset=[GONE]), body(CHAT)],
        "gateway, empty subset": [headers(**_HELD, subset=[]), body(CHAT)],
        "gateway, GET": [headers("/v1/models", "GET", end=True, **_DUPLEX), *_ANSWER],
        "gateway, tokenize": [headers("/tokenize", **_DUPLEX), body(b"text"), *_ANSWER],
        "gateway, bad body": [headers(**_HELD), body(b"not json")],
        "gateway, unknown model": [headers(**_HELD), body(CHAT | {"model": "unknown"})],
        "buffered subset": [headers(subset=[SLOW]), body(CHAT)],
        "buffered, no member": [headers(subset=[GONE]), body(CHAT)],
        "stored response": [
            *(first({"model": "tiny", "input": "a"}, "/v1/responses"), response()),
            chunk({"id": "resp_1", "object": "response", "status": "completed"}),
        ],
        "stored response, GET": [headers("/v1/responses/resp_1", "GET", end=True)],
        "stored response, cancel": [first(b"{}", "/v1/responses/resp_1/cancel")],
        "stored response, gateway": [headers("/v1/responses/resp_1", "GET", end=True, **_DUPLEX)],
        "stored response, next": [
            first(
                {"model": "tiny", "input": "b", "previous_response_id": "resp_1"}, "/v1/responses"
            )
        ],
    }
    steps |= {f"endpoint {path}": [first(data, path), *_ANSWER] for path, data in _BODIES.items()}
    steps |= {f"headers, {path}": [headers(path), body(data)] for path, data in _BODIES.items()}
    steps |= {f"malformed, {name}": [headers(), body(data)] for name, data in _MALFORMED.items()}
    steps |= {f"malformed first, {name}": [first(data)] for name, data in _MALFORMED.items()}
    found = _held_with("plain", steps)
    for pool in ("slow", "unknown"):
        steps_of_pool = [headers(), body(CHAT)]
        found.append(Conversation("plain", f"pool {pool}", steps_of_pool, {"x-extproc-pool": pool}))
    return found


def _held_with(router: str, steps: dict[str, list[ConversationStep]]) -> list[Conversation]:
    return [Conversation(router, name, each) for name, each in steps.items()]


def _rich() -> list[Conversation]:
    renamed = CHAT | {"model": "chat"}
    steps: dict[str, list[ConversationStep]] = {
        "alias, headers first": [headers(), body(renamed), *_STREAM],
        "alias, body first": [first(renamed), response(), chunk({"model": "tiny", **USAGE})],
        "alias before trailers": [first(renamed, end=False), REQUEST_TRAILERS],
        "alias, gateway": [headers(**_HELD), body(renamed, replies=2)],
        "alias, audio": [first(_MULTIPART.replace(b"tiny", b"chat"), "/v1/audio/transcriptions")],
        "either name": [headers(), body(CHAT | {"model": "either"})],
        "drawn name, objective of a model": [headers(), body(CHAT | {"model": "drawn"})],
        "unknown model": [first(CHAT | {"model": "unknown"})],
        "list of models": [headers("/v1/models", "GET", end=True)],
        "list of models, gateway": [headers("/v1/models", "GET", end=True, **_DUPLEX)],
        "urgent": [first(CHAT, x_objective="urgent", x_request_id="urgent"), *_ANSWER],
        "urgent, client's own priority": [first(CHAT | {"priority": 7}, x_objective="urgent")],
        "own priority": [first(CHAT | {"priority": 7})],
        "messages have no priority": [first(CHAT, "/v1/messages", x_objective="urgent")],
        "objective of a tenant": [headers(x_tenant="gold"), body(CHAT)],
        "objective by the gateway's header": [
            first(CHAT, x_gateway_inference_objective="urgent"),
        ],
        "session header": [headers(x_session="s"), body(CHAT)],
        "session cookie": [first(CHAT, cookie="a=b; sid=s")],
    }
    return _held_with("rich", steps)


def _filling(number: int) -> ConversationStep:
    """Request whose unique prompt fills 3/8 of the KV cache."""
    tokens = list(range(number, number + 3 * KV_TOKENS // 8))
    return first({"model": "tiny", "prompt": tokens, "max_tokens": 100}, "/v1/completions")


def _refusing() -> list[Conversation]:
    hasty: dict[str, list[ConversationStep]] = {
        "too late": [headers("/v1/completions"), body(_LONG)],
        "too late, body first": [first(_LONG, "/v1/completions")],
        "too late, gateway": [headers("/v1/completions", **_HELD), body(_LONG)],
        "sheddable": [first(CHAT, x_objective="hasty")],
    }
    strict: dict[str, list[ConversationStep]] = {
        "in time, unseen": [headers(), body(CHAT)],
        "in time, body first": [first(CHAT), *_ANSWER],
        **{f"failure {n}": [headers(), body(CHAT), response(500)] for n in (1, 2, 3)},
        "after failures": [first(CHAT)],
    }
    empty: dict[str, list[ConversationStep]] = {
        "headers first": [headers(), body(CHAT)],
        "body first": [first(CHAT)],
        "gateway": [headers(**_HELD), body(CHAT)],
        "gateway, GET": [headers("/v1/models", "GET", end=True, **_DUPLEX)],
        "GET": [headers("/v1/models", "GET", end=True)],
    }
    others = [[[_filling(number)], [_filling(number + 1)]] for number in (1, 4)]
    late = ConversationStep(_filling(7).message, 2)
    return [
        *_held_with("hasty", hasty),
        *_held_with("strict", strict),
        *_held_with("empty", empty),
        Conversation("policy", "headers first", [headers(), body(CHAT)]),
        Conversation(
            "narrow", "waits", [_filling(3), ConversationStep(OTHERS_END.message)], beside=others[0]
        ),
        Conversation("narrow", "waits too long", [late], beside=others[1]),
    ]


CONVERSATIONS = [*_plain(), *_rich(), *_refusing()]
