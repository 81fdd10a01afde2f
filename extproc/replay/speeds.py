"""How fast the replicas of a record were, told with hindsight.

What a router learned while it ran is made for its next decision: it follows the last seconds, and
of what a step's time consists it is often wrong by tens of percent, which matters as soon as the
load is another. The record has the same counters over all of its time, in stretches of ten seconds,
and knows of every request when it was there.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from extproc.observe.record import Replica, Request
from extproc.predict.fit import coefficients, descend, relative
from extproc.predict.hardware import profile_or_default
from extproc.predict.inputs import Floats
from extproc.predict.step import StepModel
from extproc.predict.windows import Work
from extproc.replica_state import ReplicaState

_STRETCH_S = 9.0
"""Seconds between two lines of a replica that are compared, at least: a prompt counts when its
prefill ends, which blurs shorter ones."""
_LEAST_S = 0.5
"""Seconds of work in one, at least."""
_MOMENTS = 100
"""At which it is looked at who was there."""
_PRIOR = 1e-3
"""Weight of the profile beside ten seconds of work: it keeps what these do not tell apart."""
_ROUNDS = 50
_SMOOTHED_S = 60.0
"""Seconds before and after a moment whose work tells the speed then."""


@dataclass(frozen=True, slots=True)
class _Stretch:
    at: float
    """Its middle."""
    work: Work


def step_times(
    lines: Mapping[str, Sequence[Replica]], requests: Sequence[Request]
) -> dict[str, list[StepModel]]:
    """By replica, the step times at each of its lines that tells of it.

    Of what they consist is the same for all that run on the same hardware, and at all times; how
    long they are on the whole is each one's own, and may change.
    """
    states = {replica: _states(of) for replica, of in lines.items()}
    there = _there(requests)
    stretches = {replica: list(_stretches(of, there[replica])) for replica, of in states.items()}
    alike: dict[str, list[_Stretch]] = defaultdict(list)
    for replica, of in states.items():
        alike[of[-1].profile] += stretches[replica]
    models = {profile: _fitted(profile, found) for profile, found in alike.items()}
    found = {}
    for replica, of in states.items():
        if (model := models[of[-1].profile]) is None:  # no work was seen: as it was believed
            found[replica] = [one.learned or profile_or_default(one.profile).step for one in of]
        else:
            mine = stretches[replica] or alike[of[-1].profile]
            frontend = float(np.mean([one.learned.frontend for one in of if one.learned] or 0.0))
            found[replica] = [_at(one.scraped_at, model, mine, frontend) for one in of]
    return found


def _states(lines: Sequence[Replica]) -> list[ReplicaState]:
    """What lines tell, each at the time it was scraped."""
    told = ((line.at, line.state) for line in lines if line.state is not None)
    return [ReplicaState.model_validate({"scraped_at": at} | state) for at, state in told]


def _there(requests: Sequence[Request]) -> Mapping[str, Floats]:
    """By replica, of each request: when it was sent, when it had ended, its prompt, its answer."""
    rows = defaultdict(list)
    for one in requests:
        sent = one.at + one.waited_s
        tokens = one.output_tokens * max(one.sequences, 1)
        rows[one.replica].append((sent, sent + one.seconds, one.prompt_tokens, tokens))
    none = np.zeros((0, 4))
    return defaultdict(lambda: none, {replica: np.array(of) for replica, of in rows.items()})


def _stretches(states: Sequence[ReplicaState], there: Floats) -> Iterator[_Stretch]:
    before = states[0]
    for state in states[1:]:
        if state.scraped_at - before.scraped_at < _STRETCH_S:
            continue
        steps = state.steps - before.steps
        if steps > 0 and state.healthy and before.healthy:
            busy, kv_tokens = _busy(before.scraped_at, state.scraped_at, there)
            if busy >= _LEAST_S:
                generated, prefilled = (of(state) - of(before) for of in (_generated, _prefilled))
                terms = steps, prefilled, generated, steps * kv_tokens
                yield _Stretch((before.scraped_at + state.scraped_at) / 2, Work(busy, terms))
        before = state


def _generated(state: ReplicaState) -> float:
    return state.generated_tokens - state.accepted_tokens


def _prefilled(state: ReplicaState) -> float:
    return state.prompt_tokens - state.cached_tokens


def _busy(start: float, end: float, there: Floats) -> tuple[float, float]:
    """Seconds in which requests were there, and the KV tokens these had, in the mean."""
    sent, ended, prompt, output = there[(there[:, 0] < end) & (there[:, 1] > start)].T
    moments = np.linspace(start, end, _MOMENTS)[:, None]
    here = (sent <= moments) & (moments < ended)
    part = np.clip((moments - sent) / np.maximum(ended - sent, 1e-6), 0.0, 1.0)
    tokens = ((prompt + output * part) * here).sum(axis=1)
    busy = here.any(axis=1)
    share = float(busy.mean())
    return share * (end - start), float(tokens[busy].mean()) if share else 0.0


def _fitted(profile: str, stretches: Sequence[_Stretch]) -> StepModel | None:
    """Least squares on relative errors, none below zero, as in
    :class:`~extproc.predict.calibration.Calibration`; None where there is nothing to fit."""
    if not stretches:
        return None
    start = profile_or_default(profile).step
    units = coefficients(start)
    works = [one.work for one in stretches]
    rows = relative(works, units)
    weights = np.array([[one.seconds] for one in works]) / _STRETCH_S
    equations = (rows[:, :4] * weights).T @ rows
    *seen, took = equations.sum(axis=0).tolist()
    ratio = took / sum(seen)
    solution = [ratio] * 4
    for _ in range(_ROUNDS):
        descend(equations, [_PRIOR] * 4, [ratio] * 4, solution)
    c0, prefill, batch, kv = (unit * part for unit, part in zip(units, solution, strict=True))
    return StepModel(c0, prefill, batch, kv)


def _at(
    moment: float, model: StepModel, stretches: Sequence[_Stretch], frontend: float
) -> StepModel:
    distance = np.array([abs(one.at - moment) for one in stretches])
    near = (distance <= max(_SMOOTHED_S, distance.min())).nonzero()[0]
    works = [stretches[place].work for place in near]
    terms = np.array([one.terms for one in works]).sum(axis=0)
    factor = sum(one.seconds for one in works) / float(terms @ coefficients(model))
    return replace(model.slowed(factor), frontend=frontend)
