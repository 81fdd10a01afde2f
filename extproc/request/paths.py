"""What a request's path says. Prefixes before vLLM's own paths, which Envoy's route may take off
later on, do not matter."""

import re

from extproc.request.endpoint import Endpoint

_ENDPOINTS = {endpoint.value: endpoint for endpoint in Endpoint} | {
    "/v2/embed": Endpoint.EMBEDDINGS,
    "/score": Endpoint.SCORE,
    "/rerank": Endpoint.RERANK,
    "/v2/rerank": Endpoint.RERANK,
}
"""By every path that vLLM 0.32 serves them under."""
_MOST_PARTS = max(path.count("/") for path in _ENDPOINTS)

_STORED = re.compile(r"/v1/responses/([^/]+)(?:/cancel)?\Z")


def endpoint_of(path: str) -> Endpoint | None:
    """The endpoint that a path ends with, query string or not; None: no inference."""
    parts = path.partition("?")[0].rsplit("/", _MOST_PARTS)
    for first in range(1, len(parts)):
        if endpoint := _ENDPOINTS.get("/" + "/".join(parts[first:])):
            return endpoint
    return None


def stored_response_of(path: str) -> str:
    """The id of the stored response that a path asks for or cancels; empty: none."""
    found = _STORED.search(path.partition("?")[0])
    return found[1] if found else ""


def lists_models(path: str) -> bool:
    """Whether it is the list of models."""
    return path.partition("?")[0].endswith("/v1/models")
