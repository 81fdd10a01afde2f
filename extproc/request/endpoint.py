"""Endpoints of vLLM whose requests are routed, and their paths.

A prefix before vLLM's path is ignored, because Envoy's route may remove the prefix later.
Paths are decoded as in vLLM's server: ``/v1/chat%2Fcompletions`` is a chat, too.
"""

import re
from collections.abc import Container
from enum import StrEnum
from functools import lru_cache
from urllib.parse import unquote


class Endpoint(StrEnum):
    """Endpoints of vLLM whose requests name a model."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"
    GENERATE = "/inference/v1/generate"
    INVOCATIONS = "/invocations"
    TRANSCRIPTIONS = "/v1/audio/transcriptions"
    TRANSLATIONS = "/v1/audio/translations"
    EMBEDDINGS = "/v1/embeddings"
    POOLING = "/pooling"
    CLASSIFY = "/classify"
    SCORE = "/v1/score"
    RERANK = "/v1/rerank"
    TOKENIZE = "/tokenize"
    COUNT_TOKENS = "/v1/messages/count_tokens"

    __hash__ = str.__hash__  # Enum's hash is slow, and each request looks up several endpoints

    @property
    def computes(self) -> bool:
        """True if requests make the engine work, False if they only tokenize."""
        return self not in _TOKENIZE_ALONE

    @property
    def decodes(self) -> bool:
        """True if the endpoint generates tokens."""
        return self not in _WITHOUT_OUTPUT

    @property
    def takes_priority(self) -> bool:
        """True if vLLM reads ``priority`` in the body."""
        return self not in _WITHOUT_PRIORITY

    @property
    def takes_audio(self) -> bool:
        """True if the body is a form with an audio file instead of JSON."""
        return self in (Endpoint.TRANSCRIPTIONS, Endpoint.TRANSLATIONS)


_TOKENIZE_ALONE = frozenset({Endpoint.TOKENIZE, Endpoint.COUNT_TOKENS})
_WITHOUT_OUTPUT = _TOKENIZE_ALONE | {
    *(Endpoint.EMBEDDINGS, Endpoint.POOLING, Endpoint.CLASSIFY, Endpoint.SCORE, Endpoint.RERANK)
}
_WITHOUT_PRIORITY = _TOKENIZE_ALONE | {
    *(Endpoint.MESSAGES, Endpoint.TRANSCRIPTIONS, Endpoint.TRANSLATIONS)
}

PATHS = {endpoint.value: endpoint for endpoint in Endpoint} | {
    "/v1/chat/completions/batch": Endpoint.CHAT,
    "/cohere/v2/chat": Endpoint.CHAT,
    "/v2/embed": Endpoint.EMBEDDINGS,
    "/score": Endpoint.SCORE,
    "/generative_scoring": Endpoint.SCORE,
    "/rerank": Endpoint.RERANK,
    "/v2/rerank": Endpoint.RERANK,
    "/v1/systemone": Endpoint.POOLING,  # generates a token for each question
    "/detokenize": Endpoint.TOKENIZE,
}  # by path: all that make an engine work in vLLM 0.32, and some that only tokenize
_MOST_PARTS = max(path.count("/") for path in PATHS)

_INVOKED = {
    "messages": Endpoint.CHAT,
    "prompt": Endpoint.COMPLETIONS,
    "prompt_embeds": Endpoint.COMPLETIONS,
    "input": Endpoint.EMBEDDINGS,
    "query": Endpoint.RERANK,
    "text_1": Endpoint.SCORE,
    "queries": Endpoint.SCORE,
    "data_1": Endpoint.SCORE,
    "data": Endpoint.POOLING,
}  # field that identifies the endpoint → endpoint, in the order in which vLLM tries the fields

_STORED = re.compile(r"/v1/responses/([^/]+)(?:/cancel)?\Z")


@lru_cache(maxsize=64)
def endpoint_of(path: str) -> Endpoint | None:
    """Return the endpoint with which a path ends, if any. The query string is ignored."""
    parts = _decoded(path).rsplit("/", _MOST_PARTS)
    for first in range(1, len(parts)):
        if endpoint := PATHS.get("/" + "/".join(parts[first:])):
            return endpoint
    return None


def invoked(fields: Container[str]) -> Endpoint:
    """Return the endpoint that serves a body with these fields at ``/invocations`` (SageMaker)."""
    return next((_INVOKED[field] for field in _INVOKED if field in fields), Endpoint.CHAT)


def stored_response_of(path: str) -> str:
    """Return the id of the stored response that a path retrieves or cancels, or an empty string."""
    found = _STORED.search(_decoded(path))
    return found[1] if found else ""


def lists_models(path: str) -> bool:
    """Return True for the path of the list of models, ``/v1/models``."""
    return _decoded(path).endswith("/v1/models")


def _decoded(path: str) -> str:
    return unquote(path.partition("?")[0])
