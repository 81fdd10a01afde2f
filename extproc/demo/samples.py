"""Sample requests: the mix of chats, long prompts and long answers that people send."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import log
from random import Random
from typing import Any

_BYTES_PER_TOKEN = 4
_CHAT_SHARE = 0.7
"""The others are completions."""
_STREAMED_SHARE = 0.6
_BOUNDS = (1024, 2048, 4096)
"""Callers rarely know how long an answer will be: bounds are far above it."""
_UNBOUNDED_SHARE = 0.5
"""Chats without any bound."""

_VOCABULARY = (
    "about after again before between could every first found great house large little might "
    "never other people place right should small sound spell still study their there these thing "
    "think three through under water where which while world would write"
)
_WORDS = _VOCABULARY.split()


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Log-normal token counts, within limits."""

    median: float
    spread: float
    least: int
    most: int

    def draw(self, random: Random) -> int:
        length = round(random.lognormvariate(log(self.median), self.spread))
        return min(max(length, self.least), self.most)


@dataclass(frozen=True, slots=True)
class _Kind:
    name: str
    share: float
    prompt: _Lengths
    output: _Lengths


_KINDS = (
    _Kind("chat", 0.60, _Lengths(120, 0.8, 10, 1000), _Lengths(90, 0.6, 5, 400)),
    _Kind("document", 0.25, _Lengths(2500, 0.5, 800, 6000), _Lengths(60, 0.5, 10, 200)),
    _Kind("essay", 0.15, _Lengths(60, 0.5, 10, 200), _Lengths(300, 0.3, 150, 500)),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One request to send."""

    at_s: float
    """Seconds after the first request of its run."""
    kind: str
    output_tokens: int
    """What the simulated replica shall answer; the request does not say."""
    path: str
    _body: dict[str, Any]
    _prompt: str

    @property
    def stream(self) -> bool:
        """Whether the answer comes token by token."""
        return bool(self._body["stream"])

    def body(self, run: str) -> dict[str, Any]:
        """The JSON body; in another ``run``, no prefix cache knows its prompt."""
        prompt = f"{run}: {self._prompt}"
        if self.path == "/v1/completions":
            return {**self._body, "prompt": prompt}
        return {**self._body, "messages": [{"role": "user", "content": prompt}]}


def samples(model: str, rate: float, random: Random) -> Iterator[Sample]:
    """Requests without end, at ``rate`` per second on average, arriving independently."""
    at = 0.0
    while True:
        yield _sample(model, at, random)
        at += random.expovariate(rate)


def _sample(model: str, at: float, random: Random) -> Sample:
    kind = random.choices(_KINDS, [kind.share for kind in _KINDS])[0]
    chat = random.random() < _CHAT_SHARE
    body: dict[str, Any] = {"model": model, "stream": random.random() < _STREAMED_SHARE}
    bound = random.choice(_BOUNDS)
    if not chat or random.random() >= _UNBOUNDED_SHARE:
        body["max_tokens"] = bound
    if body["stream"] and random.random() < 0.5:
        body["stream_options"] = {"include_usage": True}
    return Sample(
        at_s=at,
        kind=kind.name,
        output_tokens=kind.output.draw(random),
        path="/v1/chat/completions" if chat else "/v1/completions",
        _body=body,
        _prompt=_text(kind.prompt.draw(random), random),
    )


def _text(tokens: int, random: Random) -> str:
    return " ".join(random.choices(_WORDS, k=tokens))[: tokens * _BYTES_PER_TOKEN]
