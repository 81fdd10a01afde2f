"""Headers of a request, and the answer to ``GET /v1/models``."""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

from pydantic_core import to_json

from extproc.config import Config
from extproc.fleet.members import ModelNames
from extproc.proxy import messages
from extproc.replica_state import ReplicaState
from extproc.request.endpoint import Endpoint, endpoint_of
from extproc.request.objective import first_of, session_of, targets_of

_LONGEST_ID = 128  # characters of a request id, which is kept with every decision
_DIGITS = 15  # of a content-length: a petabyte
_ALWAYS = frozenset(
    {
        ":path",
        ":method",
        "x-request-id",
        "content-length",
        "content-encoding",
        messages.RESPONSE_SKIPPED,
    }
)


class RequestHeaders(NamedTuple):
    """The headers of an inference request, as far as they matter."""

    endpoint: Endpoint
    request_id: str
    policy: str  # chosen by the client; empty: none
    tenant: str
    session: str  # as the client names it
    objective: str  # as a header names it
    targets: dict[str, float]  # seconds; named by headers beside those of its objective
    length: int | None  # bytes of the body
    readable: bool  # the body is not compressed


def asked_by(headers: Mapping[str, str], config: Config) -> RequestHeaders | None:
    """Returns None for a request that makes no replica compute."""
    endpoint = endpoint_of(headers.get(":path", ""))
    if endpoint is None or headers.get(":method") != "POST":
        return None
    route = config.route
    length = headers.get("content-length", "")
    return RequestHeaders(
        endpoint,
        request_id=headers.get("x-request-id", "")[:_LONGEST_ID],
        policy=headers.get(route.policy_header or "", ""),
        tenant=first_of(config.tenant_headers, headers)[:_LONGEST_ID],
        session=session_of(headers, route.session_header, route.session_cookie),
        objective=first_of(config.objective_headers, headers),
        targets=targets_of(headers) if config.hold.allow_inference_headers else {},
        length=int(length[:_DIGITS]) if length.isdecimal() else None,
        readable=headers.get("content-encoding", "identity") == "identity",
    )


def headers_read(config: Config) -> frozenset[str]:
    """Names of the request headers that matter: to read all takes twice as long."""
    return _with(config.headers)


@cache
def _with(named: frozenset[str]) -> frozenset[str]:
    return _ALWAYS | named


def model_list(names: ModelNames, states: Iterable[ReplicaState], created: int) -> bytes:
    """Answers ``GET /v1/models`` where names are configured that no replica knows of.

    The form is OpenAI's, with vLLM's ``max_model_len``: tokens that prompt and answer may have, on
    the replica with the fewest.

    Args:
        created: seconds since the epoch; vLLM, too, gives the time of the answer.
    """
    kinds = {(state.models, state.max_model_len) for state in states}
    listed = names.requestable(name for models, _ in kinds for name in models)
    return to_json(
        {
            "object": "list",
            "data": [
                {
                    "id": name,
                    "object": "model",
                    "created": created,
                    "owned_by": "vllm",
                    "max_model_len": min(_contexts(names, name, kinds), default=None),
                }
                for name in listed
            ],
        }
    )


def _contexts(
    names: ModelNames, asked: str, kinds: Iterable[tuple[tuple[str, ...], int | None]]
) -> list[int]:
    return [
        context
        for models, context in kinds
        if context and any(names.known(model, models) for model in names.models(asked))
    ]
