"""Learns the step-time model of a replica from the counters it publishes."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from extproc.fleet.view import Floats
from extproc.predict.step import StepModel

_WINDOWS = (2.0, 4.0)
"""Seconds. Prompt tokens are counted when their prefill ends, so a window must be long beside a
prefill: on a real vLLM, windows of 1, 2 and 4 s had a median error of 5.4, 4.5 and 3.8%."""
_COMPLETE = 0.8
"""A window may be shorter than it should by this factor."""
_MEMORY = 60.0
"""Seconds in which what was learned loses two thirds of its weight."""
_REACTION = 3.0
"""Seconds in which a change of speed as a whole is taken over by two thirds."""
_PRIOR = 0.001
"""Weight of the profile it starts from, in windows: enough to keep what the counters do not tell
apart, little beside what they do. Of 0.03, 0.01, 0.003 and 0.001 the last had the lowest error on
a real vLLM, from three different profiles."""
_MOST_SCALE = 10.0
"""The speed as a whole stays within a factor of this of the coefficients."""
_ROUNDS = 8
"""Of coordinate descent at each poll; it starts from the last solution."""


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """What one poll read, at one time."""

    at: float
    """Seconds, on the poller's clock."""
    steps: float
    computed_tokens: float
    """Prompt tokens prefilled, cached ones not counted."""
    generated_tokens: float
    in_flight: int
    """Requests running and waiting."""
    kv_tokens: float
    """In use."""


class Calibration:
    """Step-time model of one replica, learned from polls alone.

    A window between two polls in which the replica was never seen idle took
    ``c0·steps + c_prefill·computed + c_batch·generated + c_kv·Σ(KV tokens of each step)``: every
    term is a difference of counters. Recursive least squares on relative errors, no coefficient
    below zero, older windows forgotten. What the counters do not determine keeps the proportions
    of the profile it starts from. Beside the coefficients a single scale follows the speed as a
    whole within seconds: a throttled card, a noisy neighbour.
    """

    def __init__(self, start: StepModel) -> None:
        """Starts from a profile, or from what was learned before."""
        self._start = start
        # Coefficients are counted in units of the start, so that all are near one.
        self._unit = np.array([start.c0, start.c_prefill, start.c_batch, start.c_kv])
        self._solution = np.ones(4)
        self._normal = np.zeros((4, 4))
        self._right = np.zeros(4)
        self._scale = 1.0
        self._polls: deque[EngineCounts] = deque()
        self._last: EngineCounts | None = None

    @property
    def model(self) -> StepModel | None:
        """The step-time model as learned so far; None before the first window is complete."""
        if not self._normal.any():
            return None
        c0, prefill, batch, kv = (self._solution * self._unit).tolist()
        # Attention leaves no trace in the counters: it is taken to differ as the prefill does.
        attention = self._start.c_att * float(self._solution[1])
        return StepModel(c0, prefill, batch, kv, attention).slowed(self._scale)

    def poll(self, counts: EngineCounts) -> None:
        """Learns from one more poll."""
        elapsed = counts.at - self._last.at if self._last is not None else 0.0
        if counts.in_flight == 0 or (self._last is not None and counts.steps < self._last.steps):
            self._polls.clear()  # a gap without work, or a restart: no window may span it
        self._last = counts
        if counts.in_flight == 0:
            return
        self._polls.append(counts)
        while counts.at - self._polls[0].at > _WINDOWS[-1]:
            self._polls.popleft()
        self._forget(elapsed)
        for seconds in _WINDOWS:
            self._learn(seconds, elapsed)
        self._solve()

    def _forget(self, elapsed: float) -> None:
        keep = np.exp(-elapsed / _MEMORY)
        self._normal *= keep
        self._right *= keep

    def _learn(self, seconds: float, elapsed: float) -> None:
        end = self._polls[-1].at
        polls = [poll for poll in self._polls if end - poll.at <= seconds]
        took = end - polls[0].at
        if took < seconds * _COMPLETE or polls[-1].steps == polls[0].steps:
            return
        terms = _terms(polls) * self._unit
        if seconds == _WINDOWS[0]:
            self._follow(took / float(self._solution @ terms), elapsed)
        relative = terms / took
        self._normal += np.outer(relative, relative)
        self._right += relative

    def _follow(self, ratio: float, elapsed: float) -> None:
        share = 1.0 - np.exp(-elapsed / _REACTION)
        bounded = min(max(ratio, 1 / _MOST_SCALE), _MOST_SCALE)
        self._scale *= float((bounded / self._scale) ** share)

    def _solve(self) -> None:
        """Coordinate descent towards the non-negative least squares solution."""
        overall = (self._right.sum() + _PRIOR) / (self._normal.sum() + _PRIOR)
        normal = self._normal + _PRIOR * np.eye(4)
        right = self._right + _PRIOR * overall
        for _ in range(_ROUNDS):
            for k in range(4):
                others = normal[k] @ self._solution - normal[k, k] * self._solution[k]
                self._solution[k] = max((right[k] - others) / normal[k, k], 0.0)


def _terms(polls: Sequence[EngineCounts]) -> Floats:
    """Steps, computed and generated tokens, and KV tokens summed over the steps."""
    first, last = polls[0], polls[-1]
    kv = sum(
        (after.steps - before.steps) * (after.kv_tokens + before.kv_tokens) / 2
        for before, after in pairwise(polls)
    )
    return np.array(
        [
            last.steps - first.steps,
            last.computed_tokens - first.computed_tokens,
            last.generated_tokens - first.generated_tokens,
            kv,
        ]
    )
