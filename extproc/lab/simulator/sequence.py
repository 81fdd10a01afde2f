"""One prompt on its way through an engine."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import StrEnum


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
    adapter: str = ""
    """LoRA adapter that it is computed with; empty: none."""
    content: bytes = b""
    """Its tokens, four bytes each, as far as they are to be told."""
    priority: int = 0
    """The lower goes first, where the engine goes by it."""
    reason: FinishReason = FinishReason.STOP
    """How it will end; ``ABORT`` once it was aborted."""

    arrived: float | None = None
    admitted: float | None = None
    first_token: float | None = None
    """End of its prefill."""
    finished: float | None = None
    generated: int = 0
    """Tokens generated up to its end or last preemption; ``Engine.generated`` knows the latest."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when it was first admitted."""
    preemptions: int = 0

    computed: int = 0
    """Engine's: tokens in KV cache, while it prefills."""
    held: list[int] = field(default_factory=list)
    """Engine's: hashed blocks it uses."""
    blocks: int = 0
    """Engine's: blocks it has, while it prefills."""
    offset: int = 0
    """Engine's: tokens in KV cache minus engine steps, constant while it decodes."""
    last_step: int = 0
    """Engine's: the step after which it has generated all, while it decodes."""

    @property
    def rank(self) -> tuple[int, float, int]:
        """Where the engine goes by priority, the lowest is admitted first and preempted last."""
        return self.priority, self.arrived or 0.0, self.id

    @property
    def context(self) -> int:
        """Tokens to be computed before it can go on: prompt and what was generated so far."""
        return self.prompt_tokens + self.generated
