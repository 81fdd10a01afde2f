"""What an engine does in a step, and what comes of it."""

from collections import Counter
from dataclasses import dataclass, field

from extproc.simulator.histogram import Histogram
from extproc.simulator.sequence import Sequence

ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Bounds of vLLM's histogram of tokens per step."""


@dataclass(slots=True)
class Step:
    """Work in progress: one step, or several steps of decoding alone."""

    starts_at: float
    ends_at: float
    steps: int = 1
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    """Prompt tokens computed in it, by sequence."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step, or several steps of decoding alone, brought about."""

    ends_at: float
    steps: int
    decoded: list[Sequence]
    """Generated one token in each step."""
    prefilled: list[Sequence]
    """Ended their prefill, and with it generated one token, if they generate any."""
    finished: list[Sequence]


@dataclass(slots=True)
class Counters:
    """Totals since the start, counted when vLLM counts them."""

    prompt_tokens: int = 0
    """Counted when a prefill ends, cached ones included."""
    cached_tokens: int = 0
    first_tokens: int = 0
    """Sequences whose first prefill has ended."""
    generated_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    """Tokens looked up in the prefix cache, counted at admission."""
    prefix_hits: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    iteration_tokens: Histogram = field(default_factory=lambda: Histogram(ITERATION_TOKENS))
