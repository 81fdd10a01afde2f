"""The mix of requests of demo, chaos and benchmarks: what people send, or a part of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log
from random import Random
from typing import Any

_BYTES_PER_TOKEN = 4
_CHAT_SHARE = 0.7  # the others are completions
_STREAMED_SHARE = 0.6
_BOUNDS = (1024, 2048, 4096)
"""Callers rarely know how long an answer will be: bounds are far above it."""
_UNBOUNDED_SHARE = 0.5  # chats without any bound

_VOCABULARY = (
    "about after again before between could every first found great house large little might "
    "never other people place right should small sound spell still study their there these thing "
    "think three through under water where which while world would write"
)
_WORDS = _VOCABULARY.split()


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal token counts, within limits."""

    median: float
    spread: float
    least: int
    most: int

    def draw(self, random: Random) -> int:
        length = round(random.lognormvariate(log(self.median), self.spread))
        return min(max(length, self.least), self.most)


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests alike."""

    name: str
    share: float
    prompt: Lengths
    output: Lengths
    bounds: Sequence[int] = _BOUNDS
    unbounded_share: float = _UNBOUNDED_SHARE  # of its chats
    known: bool = False
    """Whether its bound is what it generates, and the model cannot end it before."""


KINDS = (
    Kind("chat", 0.60, Lengths(120, 0.8, 10, 1000), Lengths(90, 0.6, 5, 400)),
    Kind("document", 0.25, Lengths(2500, 0.5, 800, 6000), Lengths(60, 0.5, 10, 200)),
    Kind("essay", 0.15, Lengths(60, 0.5, 10, 200), Lengths(300, 0.3, 150, 500)),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One request to send."""

    at_s: float  # seconds after the first request of its run
    kind: str
    output_tokens: int  # what the simulated replica shall answer; the request does not say
    path: str
    _body: dict[str, Any]
    _prompt: str

    @property
    def stream(self) -> bool:
        return bool(self._body["stream"])

    def body(self, run: str) -> dict[str, Any]:
        """The JSON body; in another ``run``, no prefix cache knows its prompt."""
        prompt = f"{run}: {self._prompt}"
        if self.path == "/v1/completions":
            return {**self._body, "prompt": prompt}
        return {**self._body, "messages": [{"role": "user", "content": prompt}]}


def samples(
    model: str, rate: float, random: Random, kinds: Sequence[Kind] = KINDS
) -> Iterator[Sample]:
    """Requests without end, at ``rate`` per second on average, arriving independently."""
    at = 0.0
    while True:
        yield _sample(model, at, random, kinds)
        at += random.expovariate(rate)


def _sample(model: str, at: float, random: Random, kinds: Sequence[Kind]) -> Sample:
    kind = random.choices(kinds, [kind.share for kind in kinds])[0]
    chat = random.random() < _CHAT_SHARE
    body: dict[str, Any] = {"model": model, "stream": random.random() < _STREAMED_SHARE}
    bound = random.choice(kind.bounds)
    if not chat or random.random() >= kind.unbounded_share:
        body["max_tokens"] = bound
    if body["stream"] and random.random() < 0.5:
        body["stream_options"] = {"include_usage": True}
    output_tokens = kind.output.draw(random)
    if kind.known:
        body |= {"max_tokens": output_tokens, "ignore_eos": True}
    tokens = kind.prompt.draw(random)
    return Sample(
        at_s=at,
        kind=kind.name,
        output_tokens=output_tokens,
        path="/v1/chat/completions" if chat else "/v1/completions",
        _body=body,
        _prompt=" ".join(random.choices(_WORDS, k=tokens))[: tokens * _BYTES_PER_TOKEN],
    )
