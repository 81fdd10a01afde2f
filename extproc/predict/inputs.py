"""State of the fleet at one moment, as predictions and policies read it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from extproc.predict.step import USUAL_BATCH

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

# Every decision creates `Sequences` and `FleetView`; no code changes them once a policy reads them.
# `Sequences` is a `Struct`, because C code fills it faster than a constructor in Python.


def least(values: Floats) -> float:
    """Returns ``values.min()``; for about a dozen values, five times as fast as numpy."""
    return values.item(values.argmin())


def most(values: Floats) -> float:
    """Returns ``values.max()``, as fast as :func:`least`."""
    return values.item(values.argmax())


class Sequences(Struct, eq=False):
    """Sequences in flight on the candidates; an entry stands for ``weight`` equal sequences."""

    replica: Indices  # candidate that computes the sequences: an index into the view's arrays
    weight: Floats
    context: Floats  # KV tokens of each sequence, once its prompt is prefilled
    remaining: Floats  # tokens that each sequence is still expected to generate
    priority: Floats  # higher goes first; infinite if the priority is not known


NO_SEQUENCES = Sequences(np.zeros(0, np.intp), *np.zeros((4, 0)))


@dataclass(frozen=True, slots=True)
class Excluded:
    """Replica of the pool that may not get the request now, and the reason; a part of the JSON of
    decisions."""

    replica: str  # ip:port
    name: str = ""
    why: str = ""  # the reason in a few words, for people


@dataclass(frozen=True, eq=False)
class Candidates:
    """Replicas that may serve a model. They rarely change, so decisions share one object."""

    rows: Indices  # row of each replica in the fleet's table
    ids: list[str]  # ``ip:port`` of each replica
    names: list[str]  # name of each replica in the configuration
    profiles: list[str]  # name of each replica's hardware profile
    models: Sequence[str] = ()  # name of the model on each replica
    adapters: Sequence[str] = ()
    """For each replica the LoRA adapter that the request needs there, or ""; (): none anywhere."""
    excluded: tuple[Excluded, ...] = ()
    only_some: bool = False  # some members serve the model, healthy or not, and others do not
    everywhere: frozenset[str] = frozenset()  # names under which every member serves the model

    @cached_property
    def row_set(self) -> frozenset[int]:
        """The rows as a set, which the queued requests share: a thousand rows take 64 kB."""
        return frozenset(self.rows.tolist())


class Columns:
    """State of each replica: those columns of the fleet's table that a view copies."""

    requests: Floats  # this router's requests in flight; in a view, all known requests
    queued: Floats  # those of ``requests`` without a first token
    joining: Floats  # uncached prompt tokens of the queued requests, prefilled or not
    enqueued: Floats  # prompt tokens sent to the replica since its row was set up
    prefilled: Floats  # those of ``enqueued`` that the replica has prefilled
    external: Floats  # sequences that two polls in a row counted, but that no router has reported
    external_backlog: Floats  # prompt tokens of external requests in the replica's queue
    polled_waiting: Floats  # requests in the replica's queue at the last poll
    polled_kv_usage: Floats  # fraction of the KV cache in use at the last poll
    by_priority: Floats  # 1: the highest priority goes first, and the lowest is preempted first
    batch: Floats  # sequences decoding
    kv_used: Floats  # KV tokens of the sequences decoding
    kv_capacity: Floats
    token_budget: Floats
    max_num_seqs: Floats
    longest_prompt: Floats  # tokens that fit into the model's context and the KV cache
    decode_step: Floats  # seconds of a step that only decodes the current batch
    tokens_per_step: Floats  # for each sequence: above 1 with speculative decoding
    stretch: Floats  # actual ÷ predicted decode time of recent requests
    c0: Floats  # this column and the three below: coefficients of :class:`StepModel`
    c_prefill: Floats
    c_batch: Floats
    c_kv: Floats


def usual_step(costs: Columns, at: int) -> float:
    """Returns the seconds of a decode step with ``USUAL_BATCH`` on replica ``at``, a single figure
    for its speed; 0 before the first poll."""
    sequences, kv_tokens = USUAL_BATCH
    loaded = costs.c_batch.item(at) * sequences + costs.c_kv.item(at) * kv_tokens
    return costs.c0.item(at) + loaded


class FleetView(Columns):
    """Candidates for a request and their state: arrays with an entry for each candidate."""

    waiting: Floats  # requests without a first token or in the replica's queue, whichever is more
    backlog: Floats  # prompt tokens sent and not yet prefilled
    taken: Floats  # KV tokens in use, and those that the backlog will use
    outside_steps: tuple[float, float, float] = 0.0, 0.0, 0.0
    """Coefficients x, y and z of the delay of first tokens beyond the engine's steps
    (:class:`~extproc.predict.correction.FirstTokens`)."""
    overtaken: Floats | None = None
    """Prompt tokens of requests of lower priority in each replica's queue: the request overtakes
    them, and ``backlog`` leaves them out. None: no candidate schedules by priority."""

    def __init__(self, candidates: Candidates, columns: Iterable[tuple[str, Floats]]) -> None:
        self.candidates = candidates
        self.rows, self.ids, self.names = candidates.rows, candidates.ids, candidates.names
        self.excluded = candidates.excluded
        self.adapters = candidates.adapters
        self.__dict__.update(columns)

    @property
    def kv_usage(self) -> Floats:
        """Fraction of the KV cache in use by sequences that decode; queued prompts do not count."""
        return np.minimum(self.kv_used / self.kv_capacity, 1.0)

    def __len__(self) -> int:
        return len(self.ids)
