"""Step times of recorded replicas, fitted to the whole record.

A router's estimate follows the last seconds of work. The sum of its terms is right, but single
coefficients are often wrong by tens of percent, which matters only under another load. The record
has more: the counters of the replicas every ten seconds, and for each stream the time from its
first token to its end, with a step for each token. Streams with and without concurrent requests
separate the cost of a step from the cost of prompts, even if the mix of work is the same in all
intervals of the counters.
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

_SHORTEST_INTERVAL_S = 9.0  # long enough that prompts counted only when prefilled matter little
_LEAST_WORK_S = 0.5  # in an interval
_PRIOR = 1e-3  # weight of the profile relative to ten seconds of work
_COUNTER_WEIGHT = 0.1  # relative to a second of streams, which are what the replay reproduces
_FITS, _ROUNDS = 8, 50
_CAUCHY, _EXACT = 4.0, 1e-6
"""Cauchy's weights: an interval counts half if its squared logarithm of actual ÷ expected time is
four times the median. Differences below a thousandth do not reduce the weight."""
_LEAST_EXPECTED = 1e-3  # share of the actual time
_SMOOTHED_S = 60.0  # the speed at a time is that of the work within a minute before and after
_SHORTEST_S = 1e-6  # shortest time over which an amount is spread


@dataclass(frozen=True, slots=True)
class _Interval:
    middle: float
    work: Work


def step_times(
    lines: Mapping[str, Sequence[ReplicaLine]], requests: Sequence[RequestLine]
) -> dict[str, list[StepModel]]:
    """Return the step times of each replica at each line with a state.

    The coefficients of a replica change only by a common factor.
    """
    served = defaultdict[str, list[RequestLine]](list)
    for request in requests:
        served[request.replica].append(request)
    found = {}
    for replica, each in lines.items():
        known = ((line.at, line.state) for line in each if line.state is not None)
        states = [convert({"scraped_at": at} | state, ReplicaState) for at, state in known]
        streams, counted = _intervals(states, served[replica]) if replica in served else ([], [])
        if streams or counted:
            model = _fitted(states[-1].profile, streams, counted)
            costs = np.array(coefficients(model))
            near = _near([state.scraped_at for state in states], counted)
            slowness = _slowness(near, counted, costs)
            found[replica] = [model.slowed(factor) for factor in slowness.tolist()]
        else:  # without work the record has only the routers' estimates
            found[replica] = [
                state.learned or profile_or_default(state.profile).step for state in states
            ]
    return found


def _intervals(
    states: Sequence[ReplicaState], requests: Sequence[RequestLine]
) -> tuple[list[_Interval], list[_Interval]]:
    """Intervals of a replica's work, one list from its streams and one from its counters."""
    rows = [
        (
            line.at + line.queued_s,
            line.ttft_s or 0.0,
            line.seconds,
            line.prompt_tokens,
            line.output_tokens,
            max(line.sequences, 1),
            line.ttft_s is not None and line.stream and not line.cut and line.output_tokens > 1,
        )
        for line in requests
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

    def interval(start: float, end: float, steps: float, *tokens: float) -> _Interval:
        busy_s = busy(start, end)
        terms = (steps, *tokens, steps * kv(start, end) / (busy_s or 1.0))
        return _Interval((start + end) / 2.0, Work(busy_s, terms))

    scraped = np.array([state.scraped_at for state in states])
    preemptions = np.array([state.preemptions for state in states], float)

    def preempted(*span: float) -> bool:
        return bool(np.ptp(np.interp(span, scraped, preemptions)))

    streams = [
        interval(start, end, count, prefilled(start, end), generated(start, end))
        for start, end, count in np.array([first, ended, steps - 1.0]).T[seen > 0.0].tolist()
        if end > start and not preempted(start, end)
    ]
    counted, before = [], states[0]
    for state in states[1:]:
        if state.scraped_at - before.scraped_at < _SHORTEST_INTERVAL_S:
            continue
        increase = map(sub, _counts(state), _counts(before))
        found = interval(before.scraped_at, state.scraped_at, *increase)
        worked = found.work.terms[0] > 0.0 and found.work.seconds >= _LEAST_WORK_S
        if worked and state.healthy and before.healthy:
            counted.append(replace(found, work=found.work.times(_COUNTER_WEIGHT)))
        before = state
    return streams, counted


class _Total:
    """Integral over time of several amounts, each spread evenly from a start to an end."""

    def __init__(self, starts: Floats, ends: Floats, amounts: Floats) -> None:
        ends = np.maximum(ends, starts + _SHORTEST_S)
        rates = amounts / (ends - starts)
        times, changes = np.append(starts, ends), np.append(rates, -rates)
        order = times.argsort()
        self._times, rates = times[order], changes[order].cumsum()
        self._until = np.append(0.0, (rates[:-1] * np.diff(self._times)).cumsum())

    def __call__(self, start: float, end: float) -> float:
        """Return the amount that was added between two times."""
        before, after = np.interp((start, end), self._times, self._until)
        return float(after - before)


def _together(starts: Floats, ends: Floats) -> tuple[Floats, Floats, Floats]:
    """Union of intervals as disjoint pieces. Returns starts, ends and lengths."""
    order = starts.argsort()
    reached = np.maximum.accumulate(ends[order])
    begun = np.maximum(starts[order], np.append(starts.min(), reached[:-1]))
    pieces = np.maximum(reached - begun, 0.0)
    return begun, begun + pieces, pieces


def _counts(state: ReplicaState) -> tuple[float, float, float]:
    """Counters of steps, prompt tokens prefilled and tokens generated."""
    prefilled = state.prompt_tokens - state.cached_tokens
    return state.steps, prefilled, state.generated_tokens - state.accepted_tokens


def _fitted(profile: str, streams: Sequence[_Interval], counted: Sequence[_Interval]) -> StepModel:
    """Non-negative least squares at the mean speed of the record.

    Errors are divided by the geometric mean of actual and expected time, so that slowing down and
    speeding up count alike.
    """
    units = np.array(coefficients(profile_or_default(profile).step))
    intervals = [*streams, *counted]
    near = _near([interval.middle for interval in intervals], counted)
    rows = relative([interval.work for interval in intervals], units.tolist())
    seconds = np.array([[interval.work.seconds] for interval in intervals]) / _SHORTEST_INTERVAL_S
    solution = [float(seconds.sum() / (rows[:, :4] * seconds).sum())] * 4
    for _ in range(_FITS):
        terms = rows.copy()
        terms[:, :4] *= _slowness(near, counted, units * solution)[:, None]
        expected = np.maximum(terms[:, :4] @ solution, _LEAST_EXPECTED)[:, None]
        distance = np.log(expected) ** 2
        outlier = distance / (_CAUCHY * np.median(distance) + _EXACT)
        weights = seconds / expected / (1.0 + outlier)
        equations = (terms[:, :4] * weights).T @ terms
        *sums, actual = equations.sum(axis=0).tolist()
        ratio = actual / sum(sums)
        for _ in range(_ROUNDS):
            descend(equations, [_PRIOR] * 4, [ratio] * 4, solution)
    return StepModel(*(units * solution).tolist())


def _near(times: Sequence[float], counted: Sequence[_Interval]) -> tuple[Indices, Indices]:
    """Begin and end of the slice of ``counted`` near each time; without intervals near, the nearest
    interval."""
    middles, at = np.array([interval.middle for interval in counted]), np.array(times)
    nearest = ((middles[1:] + middles[:-1]) / 2.0).searchsorted(at)
    begin = np.minimum(middles.searchsorted(at - _SMOOTHED_S), nearest)
    end = np.maximum(middles.searchsorted(at + _SMOOTHED_S, "right"), nearest + 1)
    return begin, end


def _slowness(near: tuple[Indices, Indices], counted: Sequence[_Interval], costs: Floats) -> Floats:
    """Slowness of the replica near each time, relative to its mean over the record."""
    begin, end = near
    if not counted:
        return np.ones(len(begin))
    expected = np.array([interval.work.terms for interval in counted]) @ costs
    totals = np.cumsum([[interval.work.seconds for interval in counted], expected], axis=1)
    totals = np.pad(totals, ((0, 0), (1, 0)))
    actual, expected = totals[:, end] - totals[:, begin]
    slowness: Floats = actual / expected * (totals[1, -1] / totals[0, -1])
    return slowness
