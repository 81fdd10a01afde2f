"""What an engine does in a step, and what comes of it."""

from collections import Counter
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import NamedTuple

from extproc.lab.simulator.histogram import Histogram
from extproc.lab.simulator.sequence import Sequence

ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Bounds of vLLM's histogram of tokens per step."""


@dataclass(slots=True)
class Step:
    """Work in progress: one step, or several steps of decoding alone."""

    starts_at: float
    ends_at: float
    waiting: int
    """Sequences it left waiting."""
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
    accepted: dict[int, int]
    """What drafts gave them on top, by sequence id."""
    prefilled: list[Sequence]
    """Ended their prefill, and with it generated one token, if they generate any."""
    first: list[Sequence]
    """Those of them that did so for the first time: not to compute again what preemption took."""
    finished: list[Sequence]


class Gauges(NamedTuple):
    """What a replica shows of its state: vLLM sets its gauges when a step ends, not between."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    deferred: int = 0
    """Of those waiting, the ones that wait for the adapters of others to leave the batch."""
    adapters: Items[str] = ()
    """Those with a sequence that has a token and goes on."""


@dataclass(slots=True)
class Counters:
    """Totals since the start, counted when vLLM counts them."""

    prompt_tokens: int = 0
    """Counted when a prefill ends, cached ones included."""
    cached_tokens: int = 0
    first_tokens: int = 0
    """Sequences whose first prefill has ended."""
    generated_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    """Draft tokens accepted; vLLM counts also those that are cut since the sequence ends."""
    preemptions: int = 0
    prefix_queries: int = 0
    """Tokens looked up in the prefix cache, counted at admission."""
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
