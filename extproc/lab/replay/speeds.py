"""Speeds of the replicas of a record, with hindsight.

A router's own estimate is made for its next decision: it follows the last seconds, and is often
wrong by tens of percent on the parts of a step's time, which matters under another load. The record
has the replicas' counters in stretches of ten seconds, and the time of each stream from its first
token to its end, with a step for each token. Streams, some alone and some not, tell steps from
prompts even if all stretches are alike.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import sub

import numpy as np
from msgspec import convert

from extproc.observe.record import ReplicaLine, RequestLine
from extproc.predict.estimator import coefficients, descend, relative
from extproc.predict.inputs import Floats, Indices
from extproc.predict.step import StepModel, profile_or_default
from extproc.predict.windows import Work
from extproc.replica_state import ReplicaState

_STRETCH_S = 9.0  # least time between two lines: a prompt counts when its prefill ends
_LEAST_S = 0.5  # least seconds of work in a stretch
_PRIOR = 1e-3  # weight of the profile beside ten seconds of work
_COUNTED = 0.1  # weight of counters beside as many seconds of streams, which are replayed
_FITS, _ROUNDS = 8, 50
_ODD, _EXACT = 4.0, 1e-6
"""Cauchy's weights: a stretch counts half if the logarithm of actual ÷ expected time is twice the
median, for it was disturbed. Times that agree to a thousandth are no further apart."""
_LEAST_EXPECTED = 1e-3  # of the time that work took
_SMOOTHED_S = 60.0  # before and after a moment, of the work that tells the speed then
_AT_ONCE_S = 1e-6  # least time in which anything comes


@dataclass(frozen=True, slots=True)
class _Stretch:
    at: float  # its middle
    work: Work


def step_times(
    lines: Mapping[str, Sequence[ReplicaLine]], requests: Sequence[RequestLine]
) -> dict[str, list[StepModel]]:
    """Step times by replica at each of its lines with a state; only their whole changes."""
    served = defaultdict[str, list[RequestLine]](list)
    for one in requests:
        served[one.replica].append(one)
    found = {}
    for replica, of in lines.items():
        told = ((line.at, line.state) for line in of if line.state is not None)
        states = [convert({"scraped_at": at} | state, ReplicaState) for at, state in told]
        streams, counted = _stretches(states, served[replica]) if replica in served else ([], [])
        if streams or counted:
            model = _fitted(states[-1].profile, streams, counted)
            costs = np.array(coefficients(model))
            slower = _slower(_near([one.scraped_at for one in states], counted), counted, costs)
            found[replica] = [model.slowed(factor) for factor in slower.tolist()]
        else:  # no work was seen: as it was believed
            found[replica] = [one.learned or profile_or_default(one.profile).step for one in states]
    return found


def _stretches(
    states: Sequence[ReplicaState], requests: Sequence[RequestLine]
) -> tuple[list[_Stretch], list[_Stretch]]:
    """Stretches of a replica's work by its streams, and by its counters."""
    rows = [
        (
            one.at + one.waited_s,
            one.ttft_s or 0.0,
            one.seconds,
            one.prompt_tokens,
            one.output_tokens,
            max(one.sequences, 1),
            one.ttft_s is not None and one.stream and not one.cut and one.output_tokens > 1,
        )
        for one in requests
    ]
    sent, ttft, seconds, prompt, output, sequences, seen = np.array(rows, float).T
    first, ended = sent + ttft, sent + seconds
    last = states[-1]
    prompt_computed = prompt * (1.0 - last.cached_tokens / (last.prompt_tokens or 1.0))
    steps = output * (1.0 - last.accepted_tokens / (last.generated_tokens or 1.0))
    prefilled = _Total(sent, first, prompt_computed)
    generated = _Total(first, ended, steps * sequences)
    kv = _Total(sent, ended, (prompt + output / 2.0) * sequences * seconds)
    busy = _Total(*_together(sent, ended))

    def stretch(start: float, end: float, steps: float, *tokens: float) -> _Stretch:
        took = busy(start, end)
        terms = (steps, *tokens, steps * kv(start, end) / (took or 1.0))
        return _Stretch((start + end) / 2.0, Work(took, terms))

    scraped = np.array([one.scraped_at for one in states])
    preemptions = np.array([one.preemptions for one in states], float)

    def preempted(*span: float) -> bool:
        """True if the lines tell of a preemption."""
        return bool(np.ptp(np.interp(span, scraped, preemptions)))

    streams = [
        stretch(start, end, count, prefilled(start, end), generated(start, end))
        for start, end, count in np.array([first, ended, steps - 1.0]).T[seen > 0.0].tolist()
        if end > start and not preempted(start, end)
    ]
    counted, before = [], states[0]
    for state in states[1:]:
        if state.scraped_at - before.scraped_at < _STRETCH_S:
            continue
        told = map(sub, _counts(state), _counts(before))
        one = stretch(before.scraped_at, state.scraped_at, *told)
        worked = one.work.terms[0] > 0.0 and one.work.seconds >= _LEAST_S
        if worked and state.healthy and before.healthy:
            counted.append(replace(one, work=one.work.times(_COUNTED)))
        before = state
    return streams, counted


class _Total:
    """Integral over time of amounts that each come evenly from a start to an end."""

    def __init__(self, starts: Floats, ends: Floats, amounts: Floats) -> None:
        ends = np.maximum(ends, starts + _AT_ONCE_S)
        rates = amounts / (ends - starts)
        times, changes = np.append(starts, ends), np.append(rates, -rates)
        order = times.argsort()
        self._times, rates = times[order], changes[order].cumsum()
        self._until = np.append(0.0, (rates[:-1] * np.diff(self._times)).cumsum())

    def __call__(self, start: float, end: float) -> float:
        """Amount that came between two moments."""
        before, after = np.interp((start, end), self._times, self._until)
        return float(after - before)


def _together(starts: Floats, ends: Floats) -> tuple[Floats, Floats, Floats]:
    """Union of intervals as disjoint pieces: starts, ends and lengths."""
    order = starts.argsort()
    reached = np.maximum.accumulate(ends[order])
    begun = np.maximum(starts[order], np.append(starts.min(), reached[:-1]))
    pieces = np.maximum(reached - begun, 0.0)
    return begun, begun + pieces, pieces


def _counts(state: ReplicaState) -> tuple[float, float, float]:
    """Counters of steps, prompt tokens prefilled and tokens generated."""
    prefilled = state.prompt_tokens - state.cached_tokens
    return state.steps, prefilled, state.generated_tokens - state.accepted_tokens


def _fitted(profile: str, streams: Sequence[_Stretch], counted: Sequence[_Stretch]) -> StepModel:
    """Least squares, none below zero, at the speed that the record has on the whole. Errors are
    divided by the geometric mean of actual and expected time: a replica that became slow counts as
    much as one that became fast."""
    units = np.array(coefficients(profile_or_default(profile).step))
    stretches = [*streams, *counted]
    near = _near([one.at for one in stretches], counted)
    rows = relative([one.work for one in stretches], units.tolist())
    seconds = np.array([[one.work.seconds] for one in stretches]) / _STRETCH_S
    solution = [float(seconds.sum() / (rows[:, :4] * seconds).sum())] * 4
    for _ in range(_FITS):
        seen = rows.copy()
        seen[:, :4] *= _slower(near, counted, units * solution)[:, None]
        expected = np.maximum(seen[:, :4] @ solution, _LEAST_EXPECTED)[:, None]
        apart = np.log(expected) ** 2
        odd = apart / (_ODD * np.median(apart) + _EXACT)
        weights = seconds / expected / (1.0 + odd)
        equations = (seen[:, :4] * weights).T @ seen
        *every, took = equations.sum(axis=0).tolist()
        ratio = took / sum(every)
        for _ in range(_ROUNDS):
            descend(equations, [_PRIOR] * 4, [ratio] * 4, solution)
    return StepModel(*(units * solution).tolist())


def _near(moments: Sequence[float], counted: Sequence[_Stretch]) -> tuple[Indices, Indices]:
    """Slice of the stretches near each moment, or of the nearest: its first, and the next one."""
    at, when = np.array([one.at for one in counted]), np.array(moments)
    nearest = ((at[1:] + at[:-1]) / 2.0).searchsorted(when)
    first = np.minimum(at.searchsorted(when - _SMOOTHED_S), nearest)
    after = np.maximum(at.searchsorted(when + _SMOOTHED_S, "right"), nearest + 1)
    return first, after


def _slower(near: tuple[Indices, Indices], counted: Sequence[_Stretch], costs: Floats) -> Floats:
    """Slowness about each moment, relative to the whole record."""
    first, after = near
    if not counted:
        return np.ones(len(first))
    expected = np.array([one.work.terms for one in counted]) @ costs
    until = np.cumsum([[one.work.seconds for one in counted], expected], axis=1)
    until = np.pad(until, ((0, 0), (1, 0)))
    took, expected = until[:, after] - until[:, first]
    slower: Floats = took / expected * (until[1, -1] / until[0, -1])
    return slower
