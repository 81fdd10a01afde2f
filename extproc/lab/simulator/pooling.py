"""Requests that only compute prompts: embeddings, pooling, classes, scores and ranks.

The values depend only on the prompt, so all replicas answer a prompt alike. Only embeddings have
vLLM's form in full; all other replies have a score for each prompt.
"""

from abc import ABC, abstractmethod
from array import array
from base64 import b64encode
from hashlib import blake2b
from math import hypot
from random import Random
from typing import Any, Literal

from pydantic import AliasChoices, Field

from extproc.lab.simulator import tokens
from extproc.lab.simulator.bodies import Body, Prompts, RequestError, encode_prompts
from extproc.request.endpoint import Endpoint

EMBEDDING_DIMENSIONS = 64

Item = str | dict[str, Any]
Items = Item | list[Item]


class PoolingBody(Body, ABC):
    """Request whose reply has an item for each prompt."""

    @abstractmethod
    def prompts(self) -> list[bytes]: ...

    def item(self, prompt: bytes) -> dict[str, Any]:
        return {"object": "score", "score": _random(prompt).random()}

    def reply(self, id_: str, model: str, created: int) -> dict[str, Any]:
        prompts = self.prompts()
        items = [{"index": index, **self.item(each)} for index, each in enumerate(prompts)]
        total = sum(tokens.count(prompt) for prompt in prompts)
        usage = {"prompt_tokens": total, "total_tokens": total, "completion_tokens": 0}
        head = {"id": f"pool-{id_}", "object": "list", "created": created, "model": model}
        return {**head, "data": items, "usage": usage}


class InputBody(PoolingBody):
    """Body of ``/pooling`` and ``/classify``."""

    input: Prompts

    def prompts(self) -> list[bytes]:
        return encode_prompts(self.input)


class EmbeddingBody(InputBody):
    """Body of ``/v1/embeddings``."""

    encoding_format: Literal["float", "base64"] = "float"

    def item(self, prompt: bytes) -> dict[str, Any]:
        random = _random(prompt)
        drawn = [random.gauss(0, 1) for _ in range(EMBEDDING_DIMENSIONS)]
        vector = [value / hypot(*drawn) for value in drawn]
        packed = self.encoding_format == "base64"
        encoded = b64encode(array("f", vector).tobytes()).decode() if packed else vector
        return {"object": "embedding", "embedding": encoded}


class PairsBody(PoolingBody):
    """Body of ``/v1/score`` or ``/v1/rerank``: pairs of texts (1:1, 1:N or N:N) as prompts."""

    left: Items = Field(validation_alias=AliasChoices("text_1", "queries", "data_1", "query"))
    right: Items = Field(validation_alias=AliasChoices("text_2", "documents", "items", "data_2"))

    def prompts(self) -> list[bytes]:
        left, right = _listed(self.left), _listed(self.right)
        if not left or not right:
            raise RequestError("text_1 and text_2 (query and documents) must not be empty")
        if len(left) not in (1, len(right)):
            raise RequestError("Input lengths must be either 1:1, 1:N or N:N")
        pairs = zip(left * (len(right) // len(left)), right, strict=True)
        return [tokens.encode_content([*pair]) for pair in pairs]


POOLING: dict[str, type[PoolingBody]] = {
    Endpoint.EMBEDDINGS: EmbeddingBody,
    **dict.fromkeys((Endpoint.POOLING, Endpoint.CLASSIFY), InputBody),
    **dict.fromkeys(
        (Endpoint.SCORE, "/score", Endpoint.RERANK, "/rerank", "/v2/rerank"), PairsBody
    ),
}


def _listed(items: Items) -> list[Item]:
    return items if isinstance(items, list) else [items]


def _random(prompt: bytes) -> Random:
    return Random(blake2b(prompt, digest_size=8).digest())
