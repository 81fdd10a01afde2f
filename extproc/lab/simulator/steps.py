"""Sequences, the steps in which an engine computes them, and what comes of a step."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from math import sqrt
from typing import NamedTuple


class Histogram:
    """Counts of values by upper bound, and their sum."""

    def __init__(self, bounds: Items[float]) -> None:
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self.counts = [0] * (len(self.bounds) + 1)
        """Values from bound to bound; the last entry counts those above all."""

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[int]:
        """Values up to each bound; the last entry counts them all."""
        return list(accumulate(self.counts))


class FinishReason(StrEnum):
    """Why a sequence ended, as vLLM counts it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt, what will be generated for it, and what became of it.

    Times are the caller's, in seconds; None until it happened.
    """

    id: int
    prompt_tokens: int
    output_tokens: int
    """Tokens it will generate. 0: only its prompt is computed, as for an embedding."""
    hashes: Items[int] = ()
    """Hashes of its full blocks, prompt first, as far as they are known. Blocks of the prompt can
    be hit once they are scheduled, blocks of the output once the sequence has ended."""
    adapter: str = ""  # LoRA adapter that it is computed with; empty: none
    content: bytes = b""  # its tokens, four bytes each, as far as they are to be told
    priority: int = 0  # the lower goes first, where the engine goes by it
    reason: FinishReason = FinishReason.STOP  # how it will end; `ABORT` once it was aborted

    arrived: float | None = None
    admitted: float | None = None
    first_token: float | None = None  # end of its prefill
    finished: float | None = None
    generated: int = 0
    """Tokens generated up to its end or last preemption; ``Engine.generated`` knows the latest."""
    cached_tokens: int = 0  # prompt tokens found in the prefix cache when it was first admitted
    preemptions: int = 0

    computed: int = 0  # engine's: tokens in KV cache, while it prefills
    held: list[int] = field(default_factory=list)  # engine's: hashed blocks it uses
    blocks: int = 0  # engine's: blocks it has, while it prefills
    offset: int = 0  # engine's: tokens in KV cache minus engine steps, constant while it decodes
    last_step: int = 0  # engine's: the step after which it has generated all, while it decodes

    @property
    def rank(self) -> tuple[int, float, int]:
        """Sort key of an engine that schedules by priority: the lowest is admitted first."""
        return self.priority, self.arrived or 0.0, self.id

    @property
    def context(self) -> int:
        """Tokens to be computed before it can go on: prompt and what was generated so far."""
        return self.prompt_tokens + self.generated


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps over the same decoding sequences: each takes a little longer than the one before.

    All end times are computed from its start, so that it does not matter in how many pieces it
    is run.
    """

    starts_at: float
    first_step: int
    step_time: float
    growth: float

    def end(self, step: int) -> float:
        """When step number ``step`` ends."""
        steps = step - self.first_step + 1
        return self.starts_at + steps * (self.step_time + self.growth * (steps - 1) / 2)

    def last_until(self, until: float) -> int:
        """The last step that ends by ``until``, which must be finite."""
        time = max(until - self.starts_at, 0.0)
        linear = self.step_time - self.growth / 2
        steps = int(2 * time / (linear + sqrt(linear * linear + 2 * self.growth * time)))
        step = self.first_step + steps - 1
        while self.end(step) > until:
            step -= 1
        while self.end(step + 1) <= until:
            step += 1
        return step


ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Bounds of vLLM's histogram of tokens per step."""


@dataclass(slots=True)
class Step:
    """Work in progress: one step, or several steps of decoding alone."""

    starts_at: float
    ends_at: float
    waiting: int  # sequences it left waiting
    steps: int = 1
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    """Prompt tokens computed in it, by sequence."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a step, or of several steps of decoding alone."""

    ends_at: float
    steps: int
    decoded: list[Sequence]  # generated one token in each step
    accepted: dict[int, int]  # what drafts gave them on top, by sequence id
    prefilled: list[Sequence]
    """Ended their prefill, and with it generated one token, if they generate any."""
    first: list[Sequence]
    """Those of them that did so for the first time: not to compute again what preemption took."""
    finished: list[Sequence]


class Gauges(NamedTuple):
    """Gauges of a replica: vLLM sets them when a step ends, not between."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    deferred: int = 0
    """Of those waiting, the ones that wait for the adapters of others to leave the batch."""
    adapters: Items[str] = ()  # those with a sequence that has a token and goes on


@dataclass(slots=True)
class Counters:
    """Totals since the start, counted when vLLM counts them."""

    prompt_tokens: int = 0  # counted when a prefill ends, cached ones included
    cached_tokens: int = 0
    first_tokens: int = 0  # sequences whose first prefill has ended
    generated_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    """Draft tokens accepted; vLLM counts also those that are cut since the sequence ends."""
    preemptions: int = 0
    prefix_queries: int = 0  # tokens looked up in the prefix cache, counted at admission
    prefix_hits: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    """Sequences that ended, by reason; vLLM does not count those whose client hung up."""
    iteration_tokens: Histogram = field(default_factory=lambda: Histogram(ITERATION_TOKENS))
    """Tokens of each step of which a sequence got something: prompt tokens computed, when their
    prefill ends in it, and tokens generated."""

    @property
    def steps(self) -> int:
        """Steps as vLLM counts them: one that only begins or continues prefills does not count."""
        return self.iteration_tokens.count
