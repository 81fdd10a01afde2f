"""What a router has to know of a request to predict its completion."""

from dataclasses import dataclass
from enum import StrEnum


class Endpoint(StrEnum):
    """The OpenAI-compatible endpoints that make a replica compute."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"
    EMBEDDINGS = "/v1/embeddings"
    SCORE = "/v1/score"
    RERANK = "/v1/rerank"

    @property
    def decodes(self) -> bool:
        """Whether it generates tokens; embedding, scoring and reranking only prefill."""
        return self not in (Endpoint.EMBEDDINGS, Endpoint.SCORE, Endpoint.RERANK)


@dataclass(frozen=True, slots=True)
class RequestProfile:
    """A request as the predictor sees it."""

    endpoint: Endpoint
    model: str
    prompt_tokens: int
    """Estimated tokens of all its prompts together."""
    prompt_bytes: int
    """Bytes of text the estimate was made from; 0 where the tokens were counted. Divided by the
    prompt tokens a replica reports, it teaches the ratio of bytes to tokens of the model."""
    output_bound: int | None
    """Most tokens one sequence may generate; None: as many as the model's context leaves."""
    sequences: int = 1
    """Sequences it decodes side by side: ``n`` × number of prompts. 0 where nothing is decoded."""
    stream: bool = False
    least_output: int = 0
    """Fewest tokens a sequence will generate: as many as the bound where the end of text is
    ignored, as load generators ask."""
    tenant: str = ""
    """On whose behalf it is made, where a header says so."""


NO_WORK = RequestProfile(Endpoint.EMBEDDINGS, "", 0, 0, 0, sequences=0)
"""What makes a replica compute nothing: a list of its models, say."""
