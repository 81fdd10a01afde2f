"""The fleet at one moment, as policies see it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from extproc.predict.step import USUAL_BATCH

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

# The classes below are made anew for every decision, and are not frozen for that reason alone: it
# would make each take ten times as long. Nobody changes them.


def least(values: Floats) -> float:
    """``values.min()``, in a fifth of the time where there are a dozen of them."""
    return values.item(values.argmin())


def most(values: Floats) -> float:
    """``values.max()``, likewise."""
    return values.item(values.argmax())


@dataclass(slots=True)
class Sequences:
    """What is in flight on the candidates; an entry stands for ``weight`` sequences alike."""

    replica: Indices  # which candidate holds it: an index into the view's arrays
    weight: Floats
    context: Floats  # KV tokens each holds, or will hold once its prompt is prefilled
    remaining: Floats  # tokens each is expected to generate still
    priority: Floats  # the higher goes first; infinite where it is not known


NO_SEQUENCES = Sequences(np.zeros(0, np.intp), *np.zeros((4, 0)))


@dataclass(frozen=True, slots=True)
class Excluded:
    """A replica that was left out."""

    id: str
    name: str
    why: str  # in a few words, for people


@dataclass(frozen=True, slots=True)
class Candidates:
    """The replicas that may serve a model; they change seldom."""

    rows: Indices  # where they stand in the fleet's table
    ids: list[str]  # ``ip:port`` of each
    names: list[str]  # what the configuration calls them
    adapters: Sequence[str] = ()  # LoRA adapter that each is asked for, ""; (): all for none
    excluded: tuple[Excluded, ...] = ()  # replicas of the pool that could not serve it now
    unknown: bool = False  # all members told all they serve, and none serves this model
    only_some: bool = False  # some members serve the model, healthy or not, and others do not


class Columns:
    """What is known of each replica: the columns of the fleet's table that a view has, too."""

    requests: Floats  # in flight: the router's own; in a view, all that are known of
    queued: Floats  # of these, without a token yet
    joining: Floats  # prompt tokens of these, prefilled or not, without those that were cached
    enqueued: Floats  # prompt tokens sent, in all
    prefilled: Floats  # of these, prefilled
    external: Floats  # sequences that two polls in a row saw and no router told of
    external_backlog: Floats  # prompt tokens of those of them that the replica has not admitted
    polled_waiting: Floats  # requests in the replica's queue at the last poll
    polled_kv_usage: Floats  # fraction of the KV cache in use at the last poll
    by_priority: Floats  # 1: higher priorities go first, and the lowest is preempted first
    batch: Floats  # sequences decoding
    kv_used: Floats  # KV tokens of the sequences decoding
    kv_capacity: Floats
    token_budget: Floats
    max_num_seqs: Floats
    longest_prompt: Floats  # tokens that its context and its KV cache can hold
    decode_step: Floats  # seconds of a step that only decodes what is in the batch now
    tokens_per_step: Floats  # that a sequence gets: more than one where vLLM decodes speculatively
    stretch: Floats  # actual ÷ predicted decode time, as of late
    c0: Floats  # this and the following: StepModel
    c_prefill: Floats
    c_batch: Floats
    c_kv: Floats


def usual_step(costs: Columns, at: int) -> float:
    """Seconds of a decode step with a usual batch, by what is known there: its speed in one figure;
    0 where nothing is known yet."""
    sequences, kv_tokens = USUAL_BATCH
    loaded = costs.c_batch.item(at) * sequences + costs.c_kv.item(at) * kv_tokens
    return costs.c0.item(at) + loaded


class FleetView(Columns):
    """The replicas that could serve a request, one entry of each array a replica."""

    waiting: Floats  # requests that have no token yet, or are in the replica's queue
    backlog: Floats  # prompt tokens sent and not yet prefilled
    taken: Floats  # KV tokens in use, and those that the backlog will use
    beside_steps: tuple[float, float, float] = 0.0, 0.0, 0.0
    """Seconds before a first token that no step shows: for each second of a step, for each request,
    and for each token of its prompt."""
    behind: Floats | float = 0.0  # prompt tokens of requests that let this one pass; not in backlog

    def __init__(self, candidates: Candidates, columns: Iterable[tuple[str, Floats]]) -> None:
        """A view of these, with columns and their names."""
        self.candidates = candidates
        self.rows, self.ids, self.names = candidates.rows, candidates.ids, candidates.names
        self.excluded = candidates.excluded
        self.adapters = candidates.adapters
        self.__dict__.update(columns)

    @property
    def kv_usage(self) -> Floats:
        """Fraction of the KV cache in use; the queued prompts are not in it yet."""
        return np.minimum(self.kv_used / self.kv_capacity, 1.0)

    def __len__(self) -> int:
        return len(self.ids)
