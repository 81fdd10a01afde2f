"""Learns the step times of a replica from requests that it served alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, exp, log
from operator import mul

import numpy as np

from extproc.predict.step import StepModel
from extproc.predict.windows import SECONDS, Work, coefficients, descend, relative

_MEMORY = 3.0
"""Seconds of such work in which what was seen loses two thirds of its weight: a few answers, each
of them exact. A throttled card is known after one or two."""
_IDLE_MEMORY = 30.0  # the same for seconds of any kind: one that was slow for long is tried again
_KNOWN = 1e-5
"""Weight of what is known from elsewhere, in the windows of the longest kind that step times are
learned from: it keeps what these requests do not tell apart. Counters of short requests tell the
speed as a whole, and of what it consists they hardly do: with a weight of 1e-3 the prompts of a
model that is dear to prefill stay too cheap by half for hundreds of requests."""
_FRONTEND = 10.0
"""So many times as much counts that a request takes no time outside the engine, for nobody else
tells: with prompts that are all alike it is the prompt that is dear."""
_FRONTEND_S, _MOST_FRONTEND_S = 0.01, 0.03
"""Seconds that it takes, about, and at most: what takes longer was an accident."""
_FEW, _DOUBTED = 3, 0.5
"""Fewer requests than that may be slow by an accident, the first ones of a server that warms up: so
much is what is known from elsewhere worth beside them. Else such a server gets no second one."""
_CHANGE = 0.1
"""Change of what the counters teach, as a logarithm, that does the same: it is news. It is none
where prompts are dearer here than in the profile, and steps are not, and work of another mix shows
another speed."""
_CERTAIN = 1e6  # weight of what is not to be learned
_MOST = 10.0  # nothing departs from what is expected by more, but by an accident
_SURE = 0.1  # weight from which on a replica's speed is known: 1.6 seconds of work
_LITTLE = 1e-5  # weight below which nothing is known
_LEAST = 0.1
"""A coefficient that was learned to be less than this part of its profile's counts as that part
when it is asked how far another one is away from it."""


class Firsthand:
    """Step times by the requests that a router saw a replica serve one at a time.

    The counters tell how fast a replica works in stretches of a second and more without a pause;
    one that serves short requests now and then has none. Of such a request itself the router knows
    the work and the time. Both are brought into one estimate: least squares on relative errors as
    in :class:`~extproc.predict.calibration.Calibration`, with what the counters taught (or the
    profile) as one more observation.
    """

    def __init__(self, profile: StepModel, now: float) -> None:
        self._units = (*coefficients(profile), _FRONTEND_S)
        self._equations = np.zeros((5, 6))
        self._solution = [1.0, 1.0, 1.0, 1.0, 0.0]
        self._weight = 0.0  # of what was seen, in windows of the longest kind
        self._counted = 0.0  # the same of what counters saw of it, with several requests at once
        self._requests = 0
        self._told: float | None = None  # how slow the replica was said to be the last time
        self._at = now

    def observe(self, works: Sequence[Work], now: float) -> None:
        """A request was served; its first token and the rest may be told apart."""
        self._fade(now)
        rows = relative(works, self._units)
        seconds = np.array([[work.seconds] for work in works])
        self._requests += 1
        self._keep(exp(-float(seconds.sum()) / _MEMORY))
        self._weight += float(seconds.sum()) / SECONDS[-1]
        # A replica that became slow counts as much as one that became fast: divided by the
        # geometric mean of actual and expected time, errors are nearly logarithmic.
        expected = np.clip(rows[:, :-1] @ np.array(self._solution), 1 / _MOST, _MOST)
        weights = seconds / expected[:, None] / SECONDS[-1]
        self._equations += (rows[:, :-1] * weights).T @ rows

    def counted(self, seconds: float, now: float) -> None:
        """It worked for several requests at once for so long, without a pause: that is what
        counters tell best, and these requests not at all."""
        self._fade(now)
        self._counted += seconds / SECONDS[-1]

    def sure(self, now: float) -> bool:
        self._fade(now)
        return self._weight > _SURE and self._requests >= _FEW

    def model(self, known: StepModel, now: float) -> StepModel:
        """What agrees best with what was seen here and what is known from elsewhere.

        Args:
            known: step times as learned from counters, or the profile's.
            now: seconds.
        """
        self._fade(now)
        believed = (*coefficients(known), known.frontend)
        centers = [one / unit for one, unit in zip(believed, self._units, strict=True)]
        told = max(sum(centers) / len(coefficients(known)), _LITTLE)
        self._keep(exp(-abs(self._beyond(told) - self._beyond(self._told or told)) / _CHANGE))
        self._told = told
        if self._weight < _LITTLE:
            self._requests = 0
            return known
        weight = self._counted + (_KNOWN if self._requests >= _FEW else _DOUBTED)
        weights = [weight / max(center, _LEAST) ** 2 for center in centers[:-1]]
        weights.append(weight * _FRONTEND)
        descend(self._equations, weights, centers, self._solution)
        most = _MOST_FRONTEND_S / _FRONTEND_S
        if self._solution[-1] > most:
            weights[-1], centers[-1] = _CERTAIN, most
            descend(self._equations, weights, centers, self._solution)
        c0, prefill, batch, kv, frontend = map(mul, self._solution, self._units)
        return StepModel(c0, prefill, batch, kv, frontend=frontend)

    def _beyond(self, told: float) -> float:
        """By how much, as a logarithm, counters tell of a speed that no mix of work explains."""
        slower = [max(one, _LEAST) for one in self._solution[:2]]
        return log(told / min(max(told, min(slower)), max(slower)))

    def _fade(self, now: float) -> None:
        self._keep(exp((self._at - now) / _IDLE_MEMORY))
        self._at = now

    def _keep(self, part: float) -> None:
        self._equations *= part
        self._weight *= part
        self._counted *= part


@dataclass(frozen=True, slots=True)
class Served:
    """A request that a replica served alone; one sequence at most."""

    prompt_tokens: float
    tokens: float  # generated; 0: its prompt was all there was to do
    seconds: float  # from its dispatch to its end
    ttft: float | None  # seconds to its first token; None where that was not seen


def work_of(served: Served, computed: float, budget: float, tokens_per_step: float) -> list[Work]:
    """What the replica did for it, and as a fifth term how often it took what a request takes
    outside the engine's steps.

    Args:
        served: the request; its first token and the rest are told apart where both were seen.
        computed: prompt tokens that were prefilled.
        budget: prompt tokens of a step, at most.
        tokens_per_step: that a sequence gets.
    """
    seconds, ttft = served.seconds, served.ttft
    later = max(served.tokens - 1.0, 0.0)
    first = Work(ttft or seconds, (ceil(computed / budget), computed, 0.0, 0.0, 1.0))
    steps = later / tokens_per_step
    kv = steps * (served.prompt_tokens + later / 2)
    rest = Work(seconds - (ttft or 0.0), (steps, 0.0, steps, kv, 0.0))
    if not later:
        return [first]
    if ttft is None:
        return [Work(seconds, first.plus(rest).terms)]
    return [first, rest] if rest.seconds > 0.0 else []
