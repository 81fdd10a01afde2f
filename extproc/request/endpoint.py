"""The endpoints of vLLM that a router decides on."""

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
