"""The endpoints of vLLM that a router decides on, and the paths they are served under.

Prefixes before vLLM's own paths, which Envoy's route may take off later on, do not matter.
"""

import re
from enum import StrEnum


class Endpoint(StrEnum):
    """The endpoints of vLLM that make a replica compute."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"
    TRANSCRIPTIONS = "/v1/audio/transcriptions"
    TRANSLATIONS = "/v1/audio/translations"
    EMBEDDINGS = "/v1/embeddings"
    POOLING = "/pooling"
    CLASSIFY = "/classify"
    SCORE = "/v1/score"
    RERANK = "/v1/rerank"

    __hash__ = str.__hash__  # Enum's is slow, and requests are told apart by it several times

    @property
    def decodes(self) -> bool:
        """Whether it generates tokens; the others only prefill."""
        return self not in _PREFILL_ALONE

    @property
    def takes_priority(self) -> bool:
        """Whether vLLM reads ``priority`` in its body."""
        return self not in _WITHOUT_PRIORITY

    @property
    def takes_audio(self) -> bool:
        """Whether its body is a form with an audio file instead of JSON."""
        return self in (Endpoint.TRANSCRIPTIONS, Endpoint.TRANSLATIONS)


_PREFILL_ALONE = frozenset(
    {Endpoint.EMBEDDINGS, Endpoint.POOLING, Endpoint.CLASSIFY, Endpoint.SCORE, Endpoint.RERANK}
)
_WITHOUT_PRIORITY = frozenset({Endpoint.MESSAGES, Endpoint.TRANSCRIPTIONS, Endpoint.TRANSLATIONS})


_ENDPOINTS = {endpoint.value: endpoint for endpoint in Endpoint} | {
    "/v2/embed": Endpoint.EMBEDDINGS,
    "/score": Endpoint.SCORE,
    "/rerank": Endpoint.RERANK,
    "/v2/rerank": Endpoint.RERANK,
}  # by every path that vLLM 0.32 serves them under
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
    """Tells whether a path is that of the list of models."""
    return path.partition("?")[0].endswith("/v1/models")
