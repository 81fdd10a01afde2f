"""The fleet at one moment, as policies see it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

# The classes below are made anew for every decision, and are not frozen for that reason alone: it
# would make each take ten times as long, 8 µs of a decision in all. Nobody changes them.


def least(values: Floats) -> float:
    """``values.min()``, in a fifth of the time where there are a dozen of them."""
    return values.item(values.argmin())


def most(values: Floats) -> float:
    """``values.max()``, likewise."""
    return values.item(values.argmax())


@dataclass(slots=True)
class StepCosts:
    """:class:`~extproc.predict.step.StepModel` of every candidate, one array a coefficient."""

    c0: Floats
    c_prefill: Floats
    c_batch: Floats
    c_kv: Floats
    c_att: Floats
    frontend: Floats


@dataclass(slots=True)
class Sequences:
    """What is in flight on the candidates; an entry stands for ``weight`` sequences alike."""

    replica: Indices
    """Which candidate holds it: an index into the view's arrays."""
    weight: Floats
    context: Floats
    """KV tokens each holds, or will hold once its prompt is prefilled."""
    remaining: Floats
    """Tokens each is expected to generate still."""


@dataclass(frozen=True, slots=True)
class Excluded:
    """A replica that was left out."""

    id: str
    name: str
    why: str
    """In a few words, for people."""


@dataclass(slots=True)
class FleetView:
    """The replicas that could serve a request, one entry of each array a replica."""

    rows: Indices
    """Where they stand in the fleet's table."""
    ids: list[str]
    names: list[str]
    requests: Floats
    """In flight: the router's own and those the poll saw beyond them."""
    waiting: Floats
    """Requests that have no token yet, or are in the replica's queue."""
    polled_waiting: Floats
    """Requests in the replica's queue at the last poll."""
    polled_kv_usage: Floats
    """Fraction of the KV cache in use at the last poll."""
    backlog: Floats
    """Prompt tokens sent and not yet prefilled."""
    batch: Floats
    """Sequences decoding."""
    kv_used: Floats
    """KV tokens in use."""
    kv_capacity: Floats
    token_budget: Floats
    max_num_seqs: Floats
    longest_prompt: Floats
    """Tokens that its context and its KV cache can hold."""
    costs: StepCosts
    decode_step: Floats
    """Seconds of a step that only decodes what is in the batch now."""
    tokens_per_step: Floats
    """That a sequence gets: more than one where vLLM decodes speculatively."""
    stretch: Floats
    """Actual ÷ predicted decode time, as of late."""
    excluded: tuple[Excluded, ...] = ()
    """Replicas of the pool that could not serve it now."""
    adapters: Sequence[str] = ()
    """The LoRA adapter that each is asked for, empty for a model that is none; no entries where the
    model is an adapter nowhere."""

    @property
    def kv_usage(self) -> Floats:
        """Fraction of the KV cache in use; the queued prompts are not in it yet."""
        return np.minimum(self.kv_used / self.kv_capacity, 1.0)

    def __len__(self) -> int:
        return len(self.ids)
