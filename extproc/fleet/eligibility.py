"""Which replicas may be used, what excludes one, and what ends that.

Envoy calls this outlier detection, panic threshold and slow start.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import numpy as np

from extproc.fleet.members import ModelNames, Staleness
from extproc.ground.clock import Clock
from extproc.predict.inputs import Candidates, Excluded, FleetView, Floats
from extproc.replica_state import STALE_AFTER_S, ReplicaState

_HELD_UP_S = 1.0  # seconds without an answer to anything after which requests go elsewhere
_STUCK_S = 10.0  # seconds in which nothing moves in an engine with work: longer than any step
_FROZEN_S = 2.0  # seconds after which gauges count for nothing, where no known request is there
_TRIAL_S = 5.0  # seconds between two trials of a replica that is stalled or not healthy
_FULL_S = 1.0  # seconds for which an engine that steps and answers 503 counts as full
_MOST_EJECTED = 0.5  # share of the members, at least one
_LOOK_EVERY_S = 1.0  # seconds between two looks for those
_TOLERATED = 3  # failures in a row before a replica is ejected
_FIRST_EJECTION_S = 1.0  # every failure that follows doubles the ejection
_LONGEST_EJECTION_S = 30.0
_MOST_DOUBLINGS = 5
_REMEMBERED_S = 2 * _LONGEST_EJECTION_S  # longer than until the next trial of a failing replica
_AT_FIRST = 4
"""Requests a new replica may have in flight: enough to be measured by, within seconds, and few
enough to bear it where it is ten times slower than its profile says."""
_REMEMBERED_ROWS = 200_000  # entries of remembered candidates, of all models: some 10 MB
_MOST_REMEMBERED = 1_000  # candidates, however few rows they have
_UNDER_WAY_S = 1.0  # seconds for which an answer may be on its way
_FULL = "its engine answered that it is full"
_FAILING = "it failed several requests in a row"
_HELD_UP = f"it takes connections, and has answered none for {_HELD_UP_S:g} s"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a replica gets no request; the texts are for docs/operations/troubleshoot.md."""

    name: str
    set_by: str
    cleared_by: str
    longest: str
    trial: str  # request that may end it
    most: str  # largest share of the replicas
    covers_all: bool = False  # holds even where it leaves no replica


ASLEEP = Reason(
    "asleep",
    "a poll: the engine sleeps",
    "a poll: the engine is awake",
    "as long as it sleeps",
    "none",
    "all",
    covers_all=True,
)
UNHEALTHY = Reason(
    "unhealthy",
    "a scrape that failed, or two in a row without an answer",
    "a scrape that succeeds; for 5 s, an answer to a request of this router",
    "until either",
    f"one request every {_TRIAL_S:g} s, if no other replica is usable and this one accepts "
    "connections",
    "all",
    covers_all=True,
)
OTHER_MODEL = Reason(
    "other model",
    "a list of models without the one asked for",
    "a list with it",
    "until then",
    "none",
    "all, if any replica lists the model; else none",
)
STALLED = Reason(
    "stalled",
    f"no answer to any scrape for {_HELD_UP_S:g} s; no news for {STALE_AFTER_S:g} s while other "
    f"replicas are heard of; nothing moving for {_STUCK_S:g} s in an engine with work",
    "an answer; news; anything that moves, or no requests",
    "until then",
    f"one request every {_TRIAL_S:g} s, unless no scrape is answered",
    "all but one",
)
FAILING = Reason(
    "failing",
    f"{_TOLERATED} requests in a row that failed there alone",
    "an answer below 500",
    f"{_FIRST_EJECTION_S:g} s, twice as long after each failed trial, at most "
    f"{_LONGEST_EJECTION_S:g} s",
    "one request after that time",
    "half, at least one replica",
)
FULL = Reason(
    "full",
    "503 or a retry, while the engine steps",
    "time",
    f"{_FULL_S:g} s",
    "any request after that time",
    "all but one",
)
DRAINING = Reason(
    "draining",
    "`extproc replicas drain`; Kubernetes or DNS that takes it away",
    "`extproc replicas undrain`; being named again",
    "until then",
    "none",
    "all but one",
)
NEW = Reason(
    "new",
    f"joining measured replicas: {_AT_FIRST} requests at a time, and one more for each that ended",
    "the first measured second or two of work",
    "until then",
    "every request within that number",
    "all but one",
)
REASONS = ASLEEP, UNHEALTHY, OTHER_MODEL, STALLED, FAILING, FULL, DRAINING, NEW


@dataclass(slots=True)
class _Replica:
    state: ReplicaState
    models: frozenset[str]  # those in ``state``
    adapters: frozenset[str]
    heard_at: float
    moved_at: float  # when its engine was last seen to work, or to have nothing to do
    stalled: str = ""  # why it looks alive and is not; empty where it does not
    new: bool | None = None  # whether it starts slowly; None until it is first healthy
    ended: int = 0  # requests that ended there while it was new
    failures: int = 0  # of requests sent to it, in a row, as this router saw them
    failed_at: float = -inf  # when the last one was heard of
    answered_at: float = -inf  # when something of an answer to one was last seen
    ejected_until: float = -inf
    tried: bool = False  # a trial request after an ejection has no outcome yet
    full_until: float = -inf
    unhealthy_at: float = inf  # since when polls say so
    trial_at: float = inf  # when a request may try it, though it is stalled or not healthy
    frozen: bool = False  # nothing moves in its gauges, and no known request is there


_Rule = Callable[[_Replica], str]  # why a replica may not be used, for people; empty where it may


class Eligibility:
    """Tells which replicas may serve a request: those without a reason in :data:`REASONS`.

    The reasons apply in the order of the table. One that may not cover all replicas is passed over
    where it would leave none.
    """

    def __init__(self, clock: Clock, names: ModelNames, rows: Mapping[str, int]) -> None:
        self.staleness = Staleness(clock())
        self.any_new = False
        self._clock = clock
        self._names = names
        self._rows = rows
        self._replicas: dict[str, _Replica] = {}
        self._any_measured = False
        self._failed_at = -inf
        self._looked_at = clock()
        self._changed = False
        self._next_end = inf  # when the next ejection ends
        self._candidates: dict[tuple[str, frozenset[str] | None, bool], Candidates] = {}

    # -- what happens -----------------------------------------------------------------------

    def heard(self, state: ReplicaState, age: float = 0.0, idle: bool = False) -> None:
        """A poll's news of a replica came, ``age`` seconds after the poll.

        ``idle``: no request is there that this router or another one sent.
        """
        now = self._clock()
        self.staleness.updated(state.id, now)
        one = self._replicas.get(state.id)
        if one is None:
            served = frozenset(state.models), frozenset(state.adapters)
            one = self._replicas[state.id] = _Replica(state, *served, now, now)
            self._changed = True
        else:
            if _moved(one.state, state):
                one.moved_at = now
            if _said(state) != _said(one.state):
                one.models, one.adapters = frozenset(state.models), frozenset(state.adapters)
                self._changed = True
        one.state, one.heard_at = state, now - age
        one.frozen = idle and one.heard_at - one.moved_at >= _FROZEN_S
        if state.healthy:
            one.unhealthy_at = inf
        elif one.unhealthy_at == inf:
            one.unhealthy_at, one.trial_at = now, now + _TRIAL_S
        self._start_slowly(one)
        if now - self._looked_at >= _LOOK_EVERY_S:
            self._looked_at = now
            self._look_for_stalls()

    def sent(self, replica: str, response_visible: bool = True) -> None:
        """Note a request; ``told``: Envoy reports its outcome.

        After an ejection such a request is the only trial until its outcome is known, or until the
        time of the ejection has passed again.
        """
        one = self._replicas[replica]
        if one.stalled or not one.state.healthy:
            one.trial_at, self._changed = self._clock() + _TRIAL_S, True
        if response_visible and _was_ejected(one) and not self._is_ejected(one):
            one.tried = True
            self._eject(one)

    def failed(self, replica: str, unavailable: bool = False) -> None:
        """A request sent to it was answered with a 5xx, or had to be served by another.

        Those that were sent before an ejection and fail during it do not count again.

        Args:
            replica: ``ip:port``.
            unavailable: the answer was 503, or none was seen. So a full engine answers, since vLLM
                0.29 (``--max-num-queued-reqs``): a replica whose engine steps counts as full for a
                moment. Before a poll sees a step, such answers within a second are one failure.
        """
        now, one = self._clock(), self._replicas.get(replica)
        if one is None or (self._is_ejected(one) and not one.tried):
            return
        if unavailable and self._steps(one):
            one.full_until, self._changed = now + _FULL_S, True
            return
        if unavailable and now - one.failed_at < _FULL_S:
            return
        one.tried = False
        one.failed_at = self._failed_at = now
        one.failures += 1
        if one.failures >= _TOLERATED:
            self._eject(one)

    def succeeded(self, replica: str) -> None:
        self.response_seen(replica)
        one = self._replicas.get(replica)
        if one is not None and one.failures:
            one.failures, one.tried = 0, False
            one.failed_at = one.ejected_until = -inf
            self._changed = True

    def response_seen(self, replica: str) -> None:
        if (one := self._replicas.get(replica)) is not None:
            one.answered_at = self._clock()
            self._changed |= not one.state.healthy

    def ended(self, replica: str) -> None:
        one = self._replicas.get(replica)
        if one is not None and one.new:
            one.ended += 1

    def forget(self, replica: str) -> None:
        self._replicas.pop(replica, None)
        self.staleness.forget(replica)
        self._count_new()
        self._changed = True

    # -- what follows -----------------------------------------------------------------------

    def candidates(
        self, model: str, among: frozenset[str] | None = None, response_visible: bool = True
    ) -> Candidates:
        """The members that may serve a request for the model, and why each other one may not; of
        those ``among`` a few, if given. ``told``: whether Envoy tells of its response."""
        now = self._clock()
        if self._changed or now >= self._next_end:
            self._changed = False
            self._candidates.clear()
            ends = (end for one in self._replicas.values() for end in _ends(one))
            self._next_end = min((end for end in ends if end > now), default=inf)
        key = model, among, response_visible
        found = self._candidates.get(key)
        if found is None:
            rows = len(self._candidates) * len(self._replicas)
            if rows >= _REMEMBERED_ROWS or len(self._candidates) >= _MOST_REMEMBERED:
                self._candidates.clear()
            found = self._candidates[model, among, response_visible] = self._choose(
                model, among, response_visible
            )
        return found

    def without_full(self, candidates: Candidates, model: str, requests: Floats) -> Candidates:
        """Without new ones that may get no more for now, unless that is all; ``requests``: by row
        of the fleet's table, those in flight."""
        ids, rows = candidates.ids, candidates.rows.tolist()
        left_out = [self._full(name, requests[row]) for name, row in zip(ids, rows, strict=True)]
        if not any(left_out) or all(left_out):
            return candidates
        chosen = self._of(ids, left_out, model)
        return replace(chosen, excluded=candidates.excluded + chosen.excluded)

    def all_members(self) -> Candidates:
        """All members; ``excluded`` are those that something speaks against, whatever the model and
        how many requests are there."""
        ids = sorted(self._rows, key=self._rows.__getitem__)
        against = self._against()
        reasons = [against[name][1] if name in against else "" for name in ids]
        usable = self._of(ids, [""] * len(ids))
        return replace(usable, excluded=self._of(ids, reasons).excluded)

    def exclusions(self) -> Iterator[tuple[str, str]]:
        """Members that something speaks against, whatever the model: what they are, in one word."""
        return ((name, word) for name, (word, _) in self._against().items())

    def _against(self) -> dict[str, tuple[str, str]]:
        """By member, the first thing that speaks against it: in one word, and for people."""
        rules, found = self._rules("", False, response_visible=True, trials=False), {}
        for name, one in self._replicas.items():
            reasons = ((reason.name, rule(one)) for reason, rule in rules)
            if first := next((reason for reason in reasons if reason[1]), None):
                found[name] = first
        return found

    def hung(self, after: float) -> set[str]:
        """Members that answered nothing for ``after`` seconds, neither polls nor, as far as was
        seen, any request, while another one answers its polls."""
        now, silent, others = self._clock(), set(), False
        for name, one in self._replicas.items():
            unanswered_s = one.state.unanswered_s
            others |= one.state.healthy and not unanswered_s
            if unanswered_s >= after and one.answered_at < now - unanswered_s:
                silent.add(name)
        return silent if others else set()

    def heard_at(self, replica: str) -> float:
        """When the last poll of a member was, of which news came, by the clock."""
        return self._replicas[replica].heard_at

    def favour_idle(self, view: FleetView) -> None:
        """Has idle new ones taken for no slower than the median of the candidates.

        Of a new one only the profile is known, and by that it may look slow: so it is tried at all.
        """
        idle = (view.requests == 0).nonzero()[0].tolist()
        idle = [place for place in idle if self._replicas[view.ids[place]].new]
        if idle:
            for column in (view.decode_step, view.c0, view.c_prefill, view.c_batch, view.c_kv):
                column[idle] = np.minimum(column[idle], np.median(column))

    def can_serve(self, model: str, among: frozenset[str] | None = None) -> bool:
        """Whether one that says it serves the model may be used; of those ``among`` a few, if
        given."""
        usable = self.candidates(model, among).ids
        return any(self._serves(model, self._replicas[name]) for name in usable)

    def adapter(self, replica: str, model: str) -> str:
        """Returns the LoRA adapter that a member is asked for; empty: it has none of that name."""
        one = self._replicas[replica]
        name = self._names.known(model, one.models) or ""
        return name if name in one.adapters else ""

    def works(self, replica: str) -> bool:
        """Whether a member is healthy and not ejected: it can be asked for what it alone holds."""
        one = self._replicas.get(replica)
        return one is not None and not self._unhealthy(one) and not self._is_ejected(one)

    def frozen(self, replica: str) -> bool:
        """Return True if a member's gauges count for nothing: those of vLLM up to 0.10.1 keep their
        last values when all requests are aborted at once, until the engine steps (vllm#22545)."""
        return self._replicas[replica].frozen

    def progresses(self, replica: str, within: float) -> bool:
        """Return True if an engine with work moved within so many seconds."""
        one = self._replicas.get(replica)
        return one is not None and self._steps(one, within)

    @property
    def has_suspects(self) -> bool:
        """Whether a request that is sent now may go to a replica that failed within the last
        minute, and was not well since."""
        now = self._clock()
        return now - self._failed_at < _REMEMBERED_S and any(
            now - one.failed_at < _REMEMBERED_S and not self._is_ejected(one)
            for one in self._replicas.values()
        )

    # -- the rules --------------------------------------------------------------------------

    def _choose(
        self, model: str, among: frozenset[str] | None, response_visible: bool
    ) -> Candidates:
        members = self._rows if among is None else self._rows.keys() & among
        usable, left_out = [self._replicas[name] for name in members], dict[str, str]()
        serving = [self._serves(model, one) for one in self._replicas.values()]
        all_told = all(one.state.listed for one in self._replicas.values())
        for reason, rule in self._rules(model, any(serving), response_visible):
            rejected = {one.state.id: why for one in usable if (why := rule(one))}
            if reason.covers_all or len(rejected) < len(usable):
                left_out |= rejected
                usable = [one for one in usable if one.state.id not in rejected]
        if not usable and (tried := self._on_trial(members, model)):
            del left_out[tried]
        ids = sorted(members, key=self._rows.__getitem__)
        return replace(
            self._of(ids, [left_out.get(name, "") for name in ids], model),
            unknown=bool(serving) and all_told and not any(serving),
            only_some=any(serving) and not all(serving),
        )

    def _on_trial(self, members: Iterable[str], model: str) -> str | None:
        """An unhealthy member that may be tried again, for pools in which none is usable."""
        now = self._clock()
        found = [
            one
            for name in members
            if not (one := self._replicas[name]).state.asleep
            and not one.state.draining
            and not one.state.refuses
            and now >= one.trial_at
            and self._serves(model, one)
        ]
        return min(found, key=lambda one: one.trial_at).state.id if found else None

    def _of(self, ids: Iterable[str], left_out: Iterable[str], model: str = "") -> Candidates:
        found = [(self._replicas[name].state, why) for name, why in zip(ids, left_out, strict=True)]
        usable = [state for state, why in found if not why]
        ids = [state.id for state in usable]
        adapters = [self.adapter(name, model) for name in ids]
        return Candidates(
            np.array([self._rows[name] for name in ids], dtype=np.intp),
            ids,
            [state.name or state.id for state in usable],
            adapters if any(adapters) else (),
            tuple(Excluded(one.id, one.name or one.id, why) for one, why in found if why),
        )

    def _rules(
        self, model: str, listed: bool, response_visible: bool, trials: bool = True
    ) -> tuple[tuple[Reason, _Rule], ...]:
        """The reasons but for NEW, in their order; without a model: whatever it is."""
        other = replace(OTHER_MODEL, covers_all=listed)
        out = self._is_ejected if response_visible else _was_ejected

        def serves(one: _Replica) -> bool:
            return not model or self._serves(model, one)

        return (
            (ASLEEP, lambda one: "its engine sleeps" if one.state.asleep else ""),
            (UNHEALTHY, self._unhealthy),
            (other, lambda one: "" if serves(one) else f"does not serve {model!r}"),
            (STALLED, partial(self._stalled, trials=trials)),
            (FAILING, lambda one: _FAILING if out(one) else ""),
            (FULL, lambda one: _FULL if self._clock() < one.full_until else ""),
            # last: those draining serve rather than one that is ejected
            (DRAINING, lambda one: "draining" if one.state.draining else ""),
        )

    def _unhealthy(self, one: _Replica) -> str:
        """Why a replica is not healthy; empty, too, where this router saw it answer since."""
        answered = one.answered_at - one.unhealthy_at > _UNDER_WAY_S
        if one.state.healthy or (answered and self._clock() - one.answered_at < STALE_AFTER_S):
            return ""
        return one.state.problem or "not healthy"

    def _stalled(self, one: _Replica, trials: bool) -> str:
        if _is_held_up(one.state):
            return _HELD_UP
        return "" if trials and self._clock() >= one.trial_at else one.stalled

    def _steps(self, one: _Replica, within: float = _FULL_S) -> bool:
        """Return True for an engine that has work and moved lately."""
        busy = one.state.running > 0 and one.state.healthy
        return busy and not one.frozen and self._clock() - one.moved_at < within

    def _full(self, replica: str, requests: float) -> str:
        one = self._replicas[replica]
        limit = _AT_FIRST + one.ended
        if not one.new or requests < limit:
            return ""
        return f"new, and its speed not measured yet: at most {limit} requests at a time"

    def _serves(self, model: str, one: _Replica) -> bool:
        return self._names.known(model, one.models) is not None

    def _is_ejected(self, one: _Replica) -> bool:
        return self._clock() < one.ejected_until

    def _eject(self, one: _Replica) -> None:
        if not one.ejected_until > -inf:
            ejected = sum(_was_ejected(other) for other in self._replicas.values())
            if ejected + 1 > max(len(self._replicas) * _MOST_EJECTED, 1.0):
                return
        doublings = min(one.failures - _TOLERATED, _MOST_DOUBLINGS)
        seconds = min(_FIRST_EJECTION_S * 2.0**doublings, _LONGEST_EJECTION_S)
        one.ejected_until = self._clock() + seconds
        self._changed = True

    def _look_for_stalls(self) -> None:
        """As of the last news of any."""
        silent = set(self.staleness.stale(STALE_AFTER_S))
        for name, one in self._replicas.items():
            why = ""
            if name in silent:
                why = f"no news of it for {STALE_AFTER_S:.0f} s, while others were heard of"
            elif one.heard_at - one.moved_at > _STUCK_S and not one.frozen:
                why = f"nothing moved in its engine for {_STUCK_S:.0f} s, though it has requests"
            self._changed |= why != one.stalled
            if why and not one.stalled:
                one.trial_at = self._clock() + _TRIAL_S
            one.stalled = why

    def _start_slowly(self, one: _Replica) -> None:
        """It counts as joined when it is first healthy."""
        was_new = one.new
        if one.state.measured:
            self._any_measured, one.new = True, False
        elif one.state.healthy and one.new is None:
            one.new = self._any_measured
        if one.new != was_new:
            self._count_new()

    def _count_new(self) -> None:
        self.any_new = any(one.new for one in self._replicas.values())


def _was_ejected(one: _Replica) -> bool:
    """Whether it is ejected, or was and has answered nothing since."""
    return one.ejected_until > -inf


def _ends(one: _Replica) -> tuple[float, ...]:
    """When what speaks against a replica ends, or a trial may begin."""
    answered = one.answered_at + STALE_AFTER_S if not one.state.healthy else -inf
    return one.ejected_until, one.full_until, one.trial_at, answered


def _is_held_up(state: ReplicaState) -> bool:
    return state.unanswered_s >= _HELD_UP_S


def _said(state: ReplicaState) -> tuple[object, ...]:
    """What a poll says that may change what is answered."""
    told = state.healthy, state.problem, state.models, state.adapters, state.listed, state.name
    return *told, state.draining, state.asleep, _is_held_up(state)


def _moved(before: ReplicaState, after: ReplicaState) -> bool:
    """Whether its engine did anything, or has nothing to do.

    A step that only prefills part of a prompt is in no counter of vLLM, but takes KV blocks.
    """
    return not (after.running or after.waiting) or any(
        getattr(before, figure) != getattr(after, figure)
        for figure in (
            *("steps", "prompt_tokens", "generated_tokens", "first_tokens"),
            *("kv_usage", "running", "waiting"),
        )
    )
