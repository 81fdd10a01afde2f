"""Embeddings, pooling, classes, scores and ranks: prompts are computed, nothing is decoded.

Vectors and scores are drawn from the prompt alone: the same one gets the same answer everywhere.
"""

from abc import ABC, abstractmethod
from array import array
from base64 import b64encode
from hashlib import blake2b
from math import hypot
from random import Random
from typing import Any, ClassVar, Literal, Self

from pydantic import AliasChoices, Field, model_validator

from extproc.simulator import tokens
from extproc.simulator.endpoints.base import Body, Prompts, encode_prompts
from extproc.simulator.errors import RequestError

EMBEDDING_DIMENSIONS = 64

Item = str | dict[str, Any]
Items = Item | list[Item]


class PoolingBody(Body, ABC):
    """A request that only computes prompts."""

    @property
    @abstractmethod
    def prompts(self) -> list[bytes]:
        """The encoded prompts."""

    @abstractmethod
    def reply(self, id_: str, model: str, created: int) -> dict[str, Any]:
        """The reply, once all prompts are computed."""

    def usage(self) -> dict[str, int]:
        """Tokens of all prompts."""
        total = sum(tokens.count(prompt) for prompt in self.prompts)
        return {"prompt_tokens": total, "total_tokens": total, "completion_tokens": 0}


class EmbeddingBody(PoolingBody):
    """A vector for each input."""

    id_prefix: ClassVar = "embd"
    result: ClassVar = "embedding"
    field: ClassVar = "embedding"

    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"

    @property
    def prompts(self) -> list[bytes]:
        """Each input."""
        return encode_prompts(self.input)

    def reply(self, id_: str, model: str, created: int) -> dict[str, Any]:
        """The vectors, in the order of the inputs."""
        vectors = [_vector(prompt) for prompt in self.prompts]
        encoded: list[Any] = [
            b64encode(array("f", vector).tobytes()).decode()
            if self.encoding_format == "base64"
            else vector
            for vector in vectors
        ]
        return {
            "id": f"{self.id_prefix}-{id_}",
            "object": "list",
            "created": created,
            "model": model,
            "data": [
                {"index": index, "object": self.result, self.field: vector}
                for index, vector in enumerate(encoded)
            ],
            "usage": self.usage(),
        }


class PoolBody(EmbeddingBody):
    """The same, in the words of ``/pooling``."""

    id_prefix: ClassVar = "pool"
    result: ClassVar = "pooling"
    field: ClassVar = "data"


class ClassifyBody(PoolingBody):
    """One of two classes for each input."""

    input: Prompts

    @property
    def prompts(self) -> list[bytes]:
        """Each input."""
        return encode_prompts(self.input)

    def reply(self, id_: str, model: str, created: int) -> dict[str, Any]:
        """The classes, in the order of the inputs."""
        scores = [_score(prompt) for prompt in self.prompts]
        return {
            "id": f"classify-{id_}",
            "object": "list",
            "created": created,
            "model": model,
            "data": [
                {
                    "index": index,
                    "label": f"LABEL_{round(score)}",
                    "probs": [1 - score, score],
                    "num_classes": 2,
                }
                for index, score in enumerate(scores)
            ],
            "usage": self.usage(),
        }


class ScoreBody(PoolingBody):
    """How well texts fit: one to many, or pair by pair. Each pair is one prompt."""

    left: Items = Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))
    right: Items = Field(validation_alias=AliasChoices("text_2", "documents", "items", "data_2"))

    @model_validator(mode="after")
    def _in_pairs(self) -> Self:
        left, right = len(_listed(self.left)), len(_listed(self.right))
        if not left or not right:
            raise ValueError("At least one text of each kind is needed")
        if left not in (1, right):
            raise ValueError("Input lengths must be either 1:1, 1:N or N:N")
        return self

    @property
    def prompts(self) -> list[bytes]:
        """Each pair."""
        right = _listed(self.right)
        left = _listed(self.left)
        pairs = zip(left * (len(right) if len(left) == 1 else 1), right, strict=True)
        return [tokens.encode_content([one, other]) for one, other in pairs]

    def reply(self, id_: str, model: str, created: int) -> dict[str, Any]:
        """The scores, in order."""
        return {
            "id": f"score-{id_}",
            "object": "list",
            "created": created,
            "model": model,
            "data": [
                {"index": index, "object": "score", "score": _score(prompt)}
                for index, prompt in enumerate(self.prompts)
            ],
            "usage": self.usage(),
        }


class RerankBody(PoolingBody):
    """Which documents fit a query best."""

    query: Item
    documents: Items
    top_n: int = Field(default=0, ge=0)

    @property
    def prompts(self) -> list[bytes]:
        """The query with each document."""
        documents = _listed(self.documents)
        if not documents:
            raise RequestError("at least one document is needed", "documents")
        return [tokens.encode_content([self.query, document]) for document in documents]

    def reply(self, id_: str, model: str, created: int) -> dict[str, Any]:
        """The best documents first."""
        documents = _listed(self.documents)
        scores = [_score(prompt) for prompt in self.prompts]
        best = sorted(range(len(documents)), key=lambda index: -scores[index])
        return {
            "id": f"rerank-{id_}",
            "model": model,
            "usage": self.usage(),
            "results": [
                {
                    "index": index,
                    "document": {"text": _text(documents[index])},
                    "relevance_score": scores[index],
                }
                for index in best[: self.top_n or None]
            ],
        }


def _listed(items: Items) -> list[Item]:
    return items if isinstance(items, list) else [items]


def _text(item: Item) -> str | None:
    return item if isinstance(item, str) else None


def _random(prompt: bytes) -> Random:
    return Random(blake2b(prompt, digest_size=8).digest())


def _score(prompt: bytes) -> float:
    return _random(prompt).random()


def _vector(prompt: bytes) -> list[float]:
    rng = _random(prompt)
    vector = [rng.gauss(0, 1) for _ in range(EMBEDDING_DIMENSIONS)]
    length = hypot(*vector)
    return [value / length for value in vector]
