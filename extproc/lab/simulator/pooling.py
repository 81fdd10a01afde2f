"""Requests that only compute prompts: embeddings, pooling, classes, scores and ranks.

Vectors and scores depend only on the prompt: all replicas give a prompt the same answer.
"""

from abc import ABC, abstractmethod
from array import array
from base64 import b64encode
from hashlib import blake2b
from math import hypot
from random import Random
from typing import Any, ClassVar, Literal

from pydantic import AliasChoices, Field

from extproc.lab.simulator import tokens
from extproc.lab.simulator.bodies import Body, Prompts, RequestError, encode_prompts
from extproc.request.endpoint import Endpoint

EMBEDDING_DIMENSIONS = 64

Item = str | dict[str, Any]
Items = Item | list[Item]


class PoolingBody(Body, ABC):
    """Request with an item in the reply for each prompt."""

    id_prefix: ClassVar[str]

    @abstractmethod
    def prompts(self) -> list[bytes]: ...

    @abstractmethod
    def item(self, prompt: bytes) -> dict[str, Any]: ...

    def reply(self, id_: str, model: str, created: int) -> dict[str, Any]:
        prompts = self.prompts()
        items = [{"index": index, **self.item(each)} for index, each in enumerate(prompts)]
        head = {"id": f"{self.id_prefix}-{id_}", "object": "list", "created": created}
        total = sum(tokens.count(prompt) for prompt in prompts)
        usage = {"prompt_tokens": total, "total_tokens": total, "completion_tokens": 0}
        return {**head, "model": model, "data": items, "usage": usage}


class EmbeddingBody(PoolingBody):
    """``/v1/embeddings``: a vector for each input."""

    id_prefix = "embd"
    result: ClassVar = "embedding"
    field: ClassVar = "embedding"
    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"

    def prompts(self) -> list[bytes]:
        return encode_prompts(self.input)

    def item(self, prompt: bytes) -> dict[str, Any]:
        random = _random(prompt)
        drawn = [random.gauss(0, 1) for _ in range(EMBEDDING_DIMENSIONS)]
        vector = [value / hypot(*drawn) for value in drawn]
        packed = self.encoding_format == "base64"
        encoded = b64encode(array("f", vector).tobytes()).decode() if packed else vector
        return {"object": self.result, self.field: encoded}


class PoolBody(EmbeddingBody):
    """``/pooling``."""

    id_prefix = "pool"
    result: ClassVar = "pooling"
    field: ClassVar = "data"


class ClassifyBody(EmbeddingBody):
    """``/classify``: a class for each input, of two."""

    id_prefix = "classify"

    def item(self, prompt: bytes) -> dict[str, Any]:
        score = _score(prompt)
        label = f"LABEL_{round(score)}"
        return {"label": label, "probs": [1 - score, score], "num_classes": 2}


class ScoreBody(PoolingBody):
    """``/v1/score``: scores of pairs of texts, each pair a prompt; 1:1, 1:N or N:N."""

    id_prefix = "score"

    left: Items = Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))
    right: Items = Field(validation_alias=AliasChoices("text_2", "documents", "items", "data_2"))

    def prompts(self) -> list[bytes]:
        left, right = _listed(self.left), _listed(self.right)
        if not left or not right:
            raise RequestError("At least one text of each kind is needed")
        if len(left) not in (1, len(right)):
            raise RequestError("Input lengths must be either 1:1, 1:N or N:N")
        pairs = zip(left * (len(right) // len(left)), right, strict=True)
        return [tokens.encode_content([*pair]) for pair in pairs]

    def item(self, prompt: bytes) -> dict[str, Any]:
        return {"object": "score", "score": _score(prompt)}


class RerankBody(PoolingBody):
    """``/v1/rerank``: the best documents for a query."""

    id_prefix = "rerank"

    query: Item
    documents: Items
    top_n: int = Field(default=0, ge=0)

    def prompts(self) -> list[bytes]:
        documents = _listed(self.documents)
        if not documents:
            raise RequestError("at least one document is needed", "documents")
        return [tokens.encode_content([self.query, document]) for document in documents]

    def item(self, prompt: bytes) -> dict[str, Any]:
        return {"relevance_score": _score(prompt)}

    def reply(self, id_: str, model: str, created: int) -> dict[str, Any]:
        reply = super().reply(id_, model, created)
        items: list[dict[str, Any]] = reply["data"]
        for item, document in zip(items, _listed(self.documents), strict=True):
            item["document"] = {"text": document if isinstance(document, str) else None}
        best = sorted(items, key=lambda item: -item["relevance_score"])[: self.top_n or None]
        return {"id": reply["id"], "model": model, "usage": reply["usage"], "results": best}


POOLING: dict[str, type[PoolingBody]] = {
    Endpoint.EMBEDDINGS: EmbeddingBody,
    Endpoint.POOLING: PoolBody,
    Endpoint.CLASSIFY: ClassifyBody,
    **dict.fromkeys((Endpoint.SCORE, "/score"), ScoreBody),
    **dict.fromkeys((Endpoint.RERANK, "/rerank", "/v2/rerank"), RerankBody),
}


def _listed(items: Items) -> list[Item]:
    return items if isinstance(items, list) else [items]


def _random(prompt: bytes) -> Random:
    return Random(blake2b(prompt, digest_size=8).digest())


def _score(prompt: bytes) -> float:
    return _random(prompt).random()
