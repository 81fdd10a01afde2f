"""Stretches of an engine's work whose beginning and end the counters tell exactly, and the least
squares that learn step times from them."""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add, mul, sub
from typing import NamedTuple

import numpy as np

from extproc.predict.inputs import Floats
from extproc.predict.step import StepModel

SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Lengths of the windows. Short ones tell apart what differs from moment to moment, long ones are
exact."""
_SHORTEST, _LONGEST = 0.8, 1.3  # a window may be shorter or longer than it should by this factor
_WARMING_UP = 10.0  # steps of an engine's life that tell nothing: it compiles kernels for them
_FALLEN = 0.9
"""Computed tokens below this fraction of what they were: a counter showed nonsense. (They may dip a
little where cached tokens are counted before the prompt they belong to.)"""
_DECODING = 0.95
"""Share of the tokens that a batch without prefill would have generated, from which on there was
none: a sequence in prefill generates nothing."""


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """What one poll read, at one time."""

    at: float  # seconds, on the poller's clock
    steps: float
    computed_tokens: float  # prompt tokens prefilled, cached ones not counted
    generated_tokens: float  # without drafted ones: as many as sequences took part in steps
    in_flight: int  # requests running and waiting
    kv_tokens: float  # in use
    finished: float = 0.0  # requests finished


Terms = tuple[float, ...]
"""Steps, prompt tokens prefilled, tokens generated, and KV tokens summed over the steps. Of four
numbers Python makes a sum in a quarter of the time that numpy takes."""
_NOTHING: Terms = (0.0, 0.0, 0.0, 0.0)


class Work(NamedTuple):
    """What an engine did in a stretch of time without a pause."""

    seconds: float
    terms: Terms

    def times(self, factor: float) -> "Work":
        return Work(self.seconds * factor, tuple([term * factor for term in self.terms]))

    def plus(self, more: "Work") -> "Work":
        return Work(self.seconds + more.seconds, tuple(map(add, self.terms, more.terms)))


class Windows:
    """Finds, poll by poll, the stretches that a step-time model can be learned from.

    vLLM counts the tokens of a prompt when its prefill ends. A stretch that ends in the middle of a
    prefill took time for tokens that are not counted yet, and taking the count as it is makes
    prefill look cheap and steps dear: by tens of percent where prompts are long. So a stretch
    begins and ends at polls that are settled: a prompt has just been counted, or none is in
    prefill. And it holds no pause: the engine is never seen idle, nor can it have been in between.
    """

    def __init__(self) -> None:
        self._last: EngineCounts | None = None
        self._now = _NOTHING  # terms since the last pause
        self._settled: deque[tuple[float, Terms]] = deque()  # when, and the terms until then

    def poll(self, counts: EngineCounts) -> list[Work]:
        """The stretches that end with this poll; the first is that since the last settled one."""
        last, self._last = self._last, counts
        if last is None or _paused(last, counts):
            self._now = _NOTHING
            self._settled.clear()
            return []
        step = _terms(last, counts)
        self._now = tuple(map(add, self._now, step))
        if not _settled(last, step):
            return []
        found = self._stretches(counts.at)
        self._settled.append((counts.at, self._now))
        return found

    def interrupted(self) -> None:
        """A poll failed: nothing is known of the time from the last one to the next."""
        self._last = None

    def _stretches(self, end: float) -> list[Work]:
        while self._settled and end - self._settled[0][0] > SECONDS[-1] * _LONGEST:
            self._settled.popleft()
        if not self._settled:
            return []
        chosen = [self._settled[-1]]
        for seconds in SECONDS:
            nearest = self._nearest(end - seconds)
            fits = _SHORTEST <= (end - nearest[0]) / seconds <= _LONGEST
            if fits and all(nearest is not other for other in chosen[1:]):
                chosen.append(nearest)
        return [Work(end - at, tuple(map(sub, self._now, terms))) for at, terms in chosen]

    def _nearest(self, wanted: float) -> tuple[float, Terms]:
        after = bisect_left(self._settled, (wanted,))
        if after in (0, len(self._settled)):
            return self._settled[max(after - 1, 0)]
        earlier, later = self._settled[after - 1], self._settled[after]
        return earlier if wanted - earlier[0] <= later[0] - wanted else later


def warms_up(before: float, after: float) -> bool:
    """Whether what an engine did from one count of its steps to another tells nothing, for some of
    them were its first; one that counts no steps is not known to."""
    return before < _WARMING_UP and after > 0.0


def _paused(last: EngineCounts, counts: EngineCounts) -> bool:
    """Whether the engine restarted, was idle, or may have been in between, or a counter fell."""
    return (
        warms_up(last.steps, counts.steps)
        or counts.steps < last.steps
        or counts.generated_tokens < last.generated_tokens
        or counts.computed_tokens < last.computed_tokens * _FALLEN
        or counts.in_flight == 0
        or counts.finished - last.finished >= last.in_flight
    )


def _terms(last: EngineCounts, counts: EngineCounts) -> Terms:
    steps = counts.steps - last.steps
    return (
        steps,
        counts.computed_tokens - last.computed_tokens,
        counts.generated_tokens - last.generated_tokens,
        steps * (last.kv_tokens + counts.kv_tokens) / 2,
    )


def _settled(last: EngineCounts, terms: Terms) -> bool:
    steps, computed, generated, _ = terms
    return computed > 0 or (steps > 0 and generated >= _DECODING * steps * last.in_flight)


_ROUNDS = 4  # of coordinate descent each time; it starts from the last solution


def coefficients(model: StepModel) -> Terms:
    """Seconds for one of each term of :class:`~extproc.predict.windows.Work`."""
    return model.c0, model.c_prefill, model.c_batch, model.c_kv


def relative(works: Sequence[Work], units: Sequence[float]) -> Floats:
    """Stretches of work, a row each: its terms in units of the coefficients, and 1, all divided by
    the seconds it took."""
    rows = np.array([(*work.terms, work.seconds) for work in works])
    scaled: Floats = rows * [*units, 1.0] / rows[:, -1:]
    return scaled


def descend(
    equations: Floats, weights: Sequence[float], centers: Sequence[float], solution: list[float]
) -> None:
    """Improves a solution in place.

    Args:
        equations: normal equations, with the right side as the last column.
        weights: of what each coefficient is taken to be beside them.
        centers: what each is taken to be.
        solution: the coefficients; none gets below zero.
    """
    rows, pulls = equations.tolist(), list(map(mul, weights, centers))
    for _ in range(_ROUNDS):
        for k, row in enumerate(rows):
            missing = row[-1] + pulls[k] - sum(map(mul, row, solution)) - weights[k] * solution[k]
            better = solution[k] + missing / (row[k] + weights[k])
            solution[k] = better if better > 0.0 else 0.0
