"""What the headers of an inference request say."""

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from extproc.config import Config
from extproc.proxy import messages
from extproc.request.endpoint import Endpoint, endpoint_of
from extproc.request.objective import first_of, session_of, targets_of

_LONGEST_ID = 128
"""Characters of a request id: one is kept with every decision."""
_DIGITS = 15
"""Of a content-length: a petabyte."""
_ALWAYS = frozenset(
    {":path", ":method", "x-request-id", "content-length", "content-encoding", messages.UNSEEN}
)


class Asked(NamedTuple):
    """What the headers of an inference request say."""

    endpoint: Endpoint
    request_id: str
    policy: str
    """That the client chooses; empty: none."""
    tenant: str
    session: str
    """As the client names it."""
    objective: str
    """As a header names it."""
    targets: dict[str, float]
    """That headers tell, beside those of its objective; in seconds."""
    length: int | None
    """Bytes of the body."""
    readable: bool
    """Whether the body is not compressed."""


def asked_by(headers: Mapping[str, str], config: Config) -> Asked | None:
    """None: what makes no replica compute."""
    endpoint = endpoint_of(headers.get(":path", ""))
    if endpoint is None or headers.get(":method") != "POST":
        return None
    route = config.route
    length = headers.get("content-length", "")
    return Asked(
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
    """Those of a request that matter: to read all takes twice as long."""
    return _with(config.headers)


@cache
def _with(named: frozenset[str]) -> frozenset[str]:
    return _ALWAYS | named
