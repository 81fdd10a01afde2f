"""Division of the requests: the router steers some, and observes those that Envoy handles alone."""

from collections.abc import Mapping
from hashlib import blake2b

from extproc.config import Config
from extproc.request.objective import session_of

_BYTES = 8  # of the hash


def is_steered(config: Config, headers: Mapping[str, str]) -> bool:
    """Decides by a hash, so that all routers and all requests of a session agree.

    A request that is steered at one share is steered at every larger share. A request with
    neither a session nor an id is not steered, unless all requests are.
    """
    serve, route = config.serve, config.route
    if serve.steers_all or serve.mode == "observe":
        return serve.steers_all
    session = session_of(headers, route.session_header, route.session_cookie)
    key = session or headers.get("x-request-id", "")
    digest = blake2b(key.encode(), digest_size=_BYTES).digest()
    return key != "" and int.from_bytes(digest) < serve.share * 256**_BYTES
