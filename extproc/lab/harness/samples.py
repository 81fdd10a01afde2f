"""Sample requests of the demo, the chaos tests and the benchmarks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log
from random import Random
from typing import Any

_BYTES_PER_TOKEN = 4
_CHAT_SHARE = 0.7  # the other requests are completions
_STREAMED_SHARE = 0.6

_VOCABULARY = (
    "about after again before between could every first found great house large little might "
    "never other people place right should small sound spell still study their there these thing "
    "think three through under water where which while world would write"
)
_WORDS = _VOCABULARY.split()


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal distribution of token counts, limited to ``least``…``most``."""

    median: float
    spread: float
    least: int
    most: int

    def draw(self, random: Random) -> int:
        length = round(random.lognormvariate(log(self.median), self.spread))
        return min(max(length, self.least), self.most)


@dataclass(frozen=True, slots=True)
class SampleKind:
    """Kind of request: its share of all requests, and the distributions of its lengths."""

    name: str
    share: float
    prompt: Lengths
    output: Lengths
    # `max_tokens`: far above the answer, whose length clients rarely know.
    bounds: Sequence[int] = (1024, 2048, 4096)
    unbounded_share: float = 0.5  # share of chats without `max_tokens`
    known: bool = False  # `max_tokens` is the answer's exact length, enforced by `ignore_eos`


KINDS = (
    SampleKind("chat", 0.60, Lengths(120, 0.8, 10, 1000), Lengths(90, 0.6, 5, 400)),
    SampleKind("document", 0.25, Lengths(2500, 0.5, 800, 6000), Lengths(60, 0.5, 10, 200)),
    SampleKind("essay", 0.15, Lengths(60, 0.5, 10, 200), Lengths(300, 0.3, 150, 500)),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """Request, due ``at_s`` seconds after the first request."""

    at_s: float
    kind: str
    output_tokens: int  # answer's length, told to simulated replicas by a header
    path: str
    _body: dict[str, Any]
    _prompt: str

    @property
    def stream(self) -> bool:
        return bool(self._body["stream"])

    def body(self, run: str) -> dict[str, Any]:
        """Return the JSON body; the prompt begins with ``run``, so that runs share no prefix."""
        text = f"{run}: {self._prompt}"
        chat = {"messages": [{"role": "user", "content": text}]}
        return self._body | ({"prompt": text} if self.path == "/v1/completions" else chat)


def samples(
    model: str, rate: float, random: Random, kinds: Sequence[SampleKind] = KINDS
) -> Iterator[Sample]:
    """Yield requests without end: a Poisson process with ``rate`` requests a second."""
    at = 0.0
    while True:
        yield _sample(model, at, random, kinds)
        at += random.expovariate(rate)


def _sample(model: str, at: float, random: Random, kinds: Sequence[SampleKind]) -> Sample:
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
    path = "/v1/chat/completions" if chat else "/v1/completions"
    prompt = " ".join(random.choices(_WORDS, k=tokens))[: tokens * _BYTES_PER_TOKEN]
    return Sample(at, kind.name, output_tokens, path, body, prompt)
