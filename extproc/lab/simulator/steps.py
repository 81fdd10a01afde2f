"""Sequences, the steps in which an engine computes them, and the results of a step."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from typing import NamedTuple


class Histogram:
    """Counts of values by upper bound, and the sum of the values."""

    def __init__(self, bounds: Items[float]) -> None:
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self.counts = [0] * (len(self.bounds) + 1)  # by bucket; the last is above all bounds

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[int]:
        return list(accumulate(self.counts))


class FinishReason(StrEnum):
    """Reason why a sequence ended, as in vLLM's metrics."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(slots=True, eq=False)
class Sequence:
    """Prompt, tokens to generate, and progress of a sequence; times are on the caller's clock."""

    id: int
    prompt_tokens: int
    output_tokens: int  # to generate; 0: only the prompt is computed, as for an embedding
    # Hashes of the full blocks of prompt and output, as far as they are known. Other sequences can
    # share blocks of the prompt once scheduled, and blocks of the output after this sequence's end.
    hashes: Items[int] = ()
    adapter: str = ""  # LoRA adapter; empty: none
    content: bytes = b""  # encoded tokens; empty without KV events
    priority: int = 0  # lower is admitted first, in an engine that schedules by priority
    reason: FinishReason = FinishReason.STOP

    arrived: float | None = None
    admitted: float | None = None
    first_token: float | None = None  # end of the prefill
    finished: float | None = None
    generated: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache at the first admission
    preemptions: int = 0

    # Set by the engine:
    computed: int = 0  # tokens in KV cache
    held: list[int] = field(default_factory=list)  # hashes of blocks in use
    blocks: int = 0  # number of blocks in use; outdated while the sequence decodes

    @property
    def context(self) -> int:
        """Tokens to compute before the next token: the prompt and the generated tokens."""
        return self.prompt_tokens + self.generated


@dataclass(frozen=True, slots=True)
class DecodeSteps:
    """Consecutive steps of the same decoding sequences. Each step is longer than the step before,
    because contexts grow."""

    starts_at: float
    first_step: int
    step_time: float
    growth: float

    def end(self, step: int) -> float:
        steps = step - self.first_step + 1
        return self.starts_at + steps * (self.step_time + self.growth * (steps - 1) / 2)


# Buckets of vLLM's histogram of tokens per step.
ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(slots=True)
class Step:
    """Step in progress."""

    starts_at: float
    ends_at: float
    waiting: int  # sequences that were not admitted
    chunks: list[tuple[Sequence, int]]  # with their prompt tokens


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Results of a step."""

    ends_at: float
    decoded: list[Sequence]  # generated a token
    accepted: dict[int, int]  # additional tokens from drafts, by sequence id
    prefilled: list[Sequence]  # ended their prefill, and generated a token, if any
    first: list[Sequence]  # sequences of `prefilled` without an earlier first token
    finished: list[Sequence]


class Gauges(NamedTuple):
    """Gauges of a replica, which vLLM sets at the end of a step."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    deferred: int = 0  # waiting sequences whose adapter found no slot
    adapters: Items[str] = ()  # of decoding sequences


@dataclass(slots=True)
class Counters:
    """Totals since the start, increased at the moments at which vLLM increases its counters."""

    prompt_tokens: int = 0  # counted at the end of a prefill, including cached tokens
    cached_tokens: int = 0
    first_tokens: int = 0  # sequences whose first prefill has ended
    generated_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0  # drafted tokens; as in vLLM also beyond the end of a sequence
    preemptions: int = 0
    # Tokens looked up and tokens found in the prefix cache, counted when a sequence is admitted;
    # with `old_counters` at each attempt to admit the sequence.
    prefix_queries: int = 0
    prefix_hits: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # by reason, without aborted sequences
    # Generated plus computed prompt tokens of each step that decoded or ended a prefill.
    iteration_tokens: Histogram = field(default_factory=lambda: Histogram(ITERATION_TOKENS))

    @property
    def steps(self) -> int:
        """Steps as vLLM counts them. Steps that neither decode nor end a prefill do not count."""
        return self.iteration_tokens.count
