"""Headers of a request, the choice of requests to steer, and the answer to ``GET /v1/models``."""

from collections.abc import Mapping
from functools import cache
from hashlib import blake2b
from typing import NamedTuple

from pydantic_core import to_json

from extproc.config import Config
from extproc.fleet.members import Members
from extproc.proxy.messages import RESPONSE_SKIPPED
from extproc.request.endpoint import Endpoint, endpoint_of
from extproc.request.objective import first_of, session_of, targets_of

LONGEST_ID = 128  # characters of a request id or tenant: each decision record keeps both
_DIGITS = 15  # of a content-length: a petabyte
_HASH_BYTES = 8
_STANDARD = frozenset(
    {":path", ":method", "x-request-id", "content-length", "content-encoding", RESPONSE_SKIPPED}
)


class RequestHeaders(NamedTuple):
    """Headers on which the routing of a request depends."""

    endpoint: Endpoint
    request_id: str
    policy: str  # named by the client; empty: the configured policy
    tenant: str
    session: str  # id that the client sent
    objective: str  # name in a header; empty: the tenant or model selects the objective
    targets: dict[str, float]  # seconds; replace the objective's targets
    length: int | None  # bytes of the body; None: unknown
    readable: bool  # the body is not compressed


def inference_headers(headers: Mapping[str, str], config: Config) -> RequestHeaders | None:
    """Reads the headers of a POST to an endpoint; returns None for any other request."""
    endpoint = endpoint_of(headers.get(":path", ""))
    if endpoint is None or headers.get(":method") != "POST":
        return None
    route = config.route
    length = headers.get("content-length", "")
    return RequestHeaders(
        endpoint,
        request_id=headers.get("x-request-id", "")[:LONGEST_ID],
        policy=headers.get(route.policy_header or "", ""),
        tenant=first_of(config.tenant_headers, headers)[:LONGEST_ID],
        session=session_of(headers, route.session_header, route.session_cookie),
        objective=first_of(config.objective_headers, headers),
        targets=targets_of(headers) if config.hold.allow_inference_headers else {},
        length=int(length[:_DIGITS]) if length.isdecimal() else None,
        readable=headers.get("content-encoding", "identity") == "identity",
    )


def is_steered(config: Config, headers: Mapping[str, str]) -> bool:
    """Decides by a hash of the session or the request id whether to steer a request.

    So all routers treat all requests of a session alike. A larger ``serve.share`` steers the same
    requests and more. A request without session and id is steered only if all requests are.
    """
    serve, route = config.serve, config.route
    if serve.steers_all or serve.mode == "observe":
        return serve.steers_all
    session = session_of(headers, route.session_header, route.session_cookie)
    key = session or headers.get("x-request-id", "")
    digest = blake2b(key.encode(), digest_size=_HASH_BYTES).digest()
    return key != "" and int.from_bytes(digest) < serve.share * 256**_HASH_BYTES


@cache
def header_names(configured: frozenset[str]) -> frozenset[str]:
    """Names of the headers that the router reads; reading all would take twice as long.
    ``configured``: names from settings."""
    return _STANDARD | configured


def model_list(members: Members, created: int) -> bytes:
    """Answer to ``GET /v1/models`` with all names that clients may request, in vLLM's form.

    ``max_model_len`` is the smallest context length, in tokens, of the replicas that serve the
    model; ``root``, a path on the replica, is null. ``created``: time of the answer in seconds
    since the epoch.
    """
    parents, contexts = dict[str, str | None](), dict[str, int]()
    for models, adapters, context in {
        (state.models, state.adapters, state.max_model_len) for state in members
    }:
        own = {*models}.difference(adapters)
        parents |= dict.fromkeys(adapters, next(filter(own.__contains__, models), None))
        if context:
            contexts |= {model: min(context, contexts.get(model, context)) for model in models}
    names = members.names
    same = {"object": "model", "created": created, "owned_by": "vllm", "root": None}
    entries = []
    for name in members.models:
        served = (each for model in names.models(name) for each in names.served(model))
        shortest = min((contexts[each] for each in served if each in contexts), default=None)
        entries.append({"id": name, **same, "parent": parents.get(name), "max_model_len": shortest})
    return to_json({"object": "list", "data": entries})
