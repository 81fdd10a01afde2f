"""Eligibility of replicas for requests.

Envoy calls the mechanisms health checks, outlier detection, panic threshold and slow start.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import inf
from typing import Any

import numpy as np

from extproc.fleet.condition import FULL_S, TRIAL_S, Condition, is_hung
from extproc.fleet.digest import REQUESTS
from extproc.fleet.ejection import LONGEST_EJECTION_S, Ejection
from extproc.fleet.exclusion_reasons import NEW, REASONS, STALLED, UNHEALTHY, Search
from extproc.fleet.members import ModelNames, Staleness
from extproc.fleet.tables import Replicas
from extproc.ground.clock import Clock
from extproc.predict.inputs import Candidates, Excluded
from extproc.predict.step import profile_or_default
from extproc.replica_state import STALE_AFTER_S, ReplicaState

_MAX_EJECTED = 0.5  # share of the members, at least one member
_STALL_CHECK_S = 1.0  # time between two checks for stalls
_SUSPECT_S = 2 * LONGEST_EJECTION_S  # longer than the time to a failing replica's next trial
_REMEMBERED_ROWS, _FURTHER = 200_000, 20
"""Rows of all remembered candidates, and rows as which the remembered candidates of a model count
beside their own: 10 MB."""


class Eligibility:
    """Finds the replicas that may serve a request: those to which no reason of
    :data:`~extproc.fleet.exclusion_reasons.REASONS` applies.

    Reasons are tried in the order of that table. Some reasons may not exclude the last replica:
    such a reason is skipped if no replica would be left.
    """

    def __init__(
        self, clock: Clock, names: ModelNames, rows: Mapping[str, int], replicas: Replicas
    ) -> None:
        self.staleness = Staleness(clock())
        self._any_stalled = False
        self._new: list[Condition] = []  # members in slow start
        self.rejecting = set[str]()  # last answer from 400 to 499: the last choices for a retry
        self._clock = clock
        self._names = names
        self._rows = rows
        self._replicas = replicas
        self.conditions: dict[str, Condition] = {}  # of each member
        self._failed_at = -inf  # last failure of any replica
        self._stalls_checked_at = clock()
        self._changed = False
        self._next_end = inf  # end of the next exclusion that lasts a fixed time
        self._candidates: dict[tuple[str, frozenset[str] | None, bool], Candidates] = {}

    # -- events -----------------------------------------------------------------------------

    def polled(self, state: ReplicaState, age: float) -> bool:
        """Stores the state from a poll ``age`` seconds ago; returns True if its gauges are
        frozen."""
        now, table, row = self._clock(), self._replicas, self._rows[state.id]
        self.staleness.updated(state.id, now)
        member = self.conditions.get(state.id)
        if member is None:
            member = self.conditions[state.id] = Condition(state, now - age, moved_at=now)
            self._changed = True
        else:
            idle = not table.requests.item(row) + table.peers.item(REQUESTS, row)
            prefilled_sent_at = table.prefilled_sent_at.item(row)
            self._changed |= member.polled(state, age, now, idle, prefilled_sent_at)
        self._set_new(member)
        if now - self._stalls_checked_at >= _STALL_CHECK_S:
            self._stalls_checked_at = now
            stale = set(self.staleness.stale(STALE_AFTER_S))
            for name, each in self.conditions.items():
                self._changed |= each.check_stall(name in stale, now)
            self._any_stalled = any(each.stalled for each in self.conditions.values())
        return member.frozen

    def sent(self, replica: str, response_visible: bool = True) -> None:
        """Notes a dispatched request. The request is a trial if the replica was ejected and the
        response is visible."""
        now, member = self._clock(), self.conditions[replica]
        if member.stalled or not member.state.healthy:
            member.trial_at, self._changed = now + TRIAL_S, True
        if response_visible and member.ejection.pending and not member.ejection.active(now):
            member.ejection.begin_trial(now)
            self._changed = True

    def failed(self, replica: str, unavailable: bool = False) -> float:
        """Counts a failure: the replica answered 5xx, or Envoy retried the request elsewhere.

        Returns the seconds for which the failure ejects the replica; 0: no ejection. While the
        replica is ejected, only the failure of a request on trial counts; while it is unhealthy,
        no failure counts.

        Args:
            replica: ``ip:port``.
            unavailable: the answer was 503, or the router saw no answer. A full engine of vLLM 0.29
                or later answers 503, too (``--max-num-queued-reqs``). So if polls show that the
                engine makes steps, the replica counts as full for ``FULL_S``, and not as failing.
                Otherwise several such answers within ``FULL_S`` count as one failure.
        """
        now, member = self._clock(), self.conditions.get(replica)
        if member is None or not (member.state.healthy and member.ejection.counts(now)):
            return 0.0
        if unavailable and member.steps(now):
            self._changed |= now >= member.full_until
            member.full_until = now + FULL_S
            return 0.0
        if unavailable and now - member.ejection.failed_at < FULL_S:
            return 0.0
        self._failed_at = now
        ejected = sum(other.ejection.pending for other in self.conditions.values())
        most = max(len(self.conditions) * _MAX_EJECTED, 1.0)
        seconds = member.ejection.failed(now, may_eject=ejected + 1 <= most)
        self._changed |= seconds > 0.0
        return seconds

    def succeeded(self, replica: str) -> bool:
        """Notes an answer with a status below 400; returns True if that ends an ejection."""
        self.response_seen(replica)
        self.rejecting.discard(replica)
        member = self.conditions.get(replica)
        if member is None or not member.ejection.failures:
            return False
        recovers = member.ejection.pending
        member.ejection, self._changed = Ejection(), True
        return recovers

    def rejected(self, replica: str) -> None:
        """Notes an answer from 400 to 499, of which the request may be the cause."""
        self.response_seen(replica)
        self.rejecting |= {replica} & self.conditions.keys()

    def response_seen(self, replica: str) -> None:
        """Notes that the replica sent response headers or a part of a response."""
        if (member := self.conditions.get(replica)) is not None:
            now = self._clock()
            before, member.answered_at = member.unhealthy(now), now
            self._changed |= member.unhealthy(now) != before

    def ended(self, replica: str) -> None:
        member = self.conditions.get(replica)
        if member is not None and member.new:
            member.ended += 1

    def restarted(self, replica: str) -> None:
        """Begins slow start anew: the speed of the replica's new process is not known yet."""
        member = self.conditions[replica]
        member.new, member.ended = None, 0
        self._set_new(member)

    def forget(self, replica: str) -> None:
        self.conditions.pop(replica, None)
        self.rejecting.discard(replica)
        self.staleness.forget(replica)
        self._changed = True

    # -- queries ----------------------------------------------------------------------------

    def candidates(
        self,
        model: str,
        among: frozenset[str] | None = None,
        response_visible: bool = True,
        slow_start: bool = False,
    ) -> Candidates:
        """Returns the members that may serve a request for a model, and why the others may not.

        ``among``: members to choose from; None: all. ``response_visible``: as in :class:`Search`.
        ``slow_start``: leave out new members with as many requests as slow start allows.
        """
        now = self._clock()
        if self._changed or now >= self._next_end:
            self._changed = False
            self._candidates.clear()
            self._new = [member for member in self.conditions.values() if member.new]
            ends = (end for member in self.conditions.values() for end in member.ends())
            self._next_end = min((end for end in ends if end > now), default=inf)
        key = model, among, response_visible
        found = self._candidates.get(key)
        if found is None:
            if len(self._candidates) * (len(self.conditions) + _FURTHER) >= _REMEMBERED_ROWS:
                self._candidates.clear()
            found = self._candidates[key] = self._choose(*key)
        return self._without_full(found) if slow_start and self._new else found

    def on_trial(self, candidates: Sequence[str]) -> list[bool]:
        """Returns for each candidate whether it is stalled and due for a trial. The list is empty
        if no member is stalled, or if all candidates are."""
        if not self._any_stalled:
            return []
        stalled = [bool(self.conditions[name].stalled) for name in candidates]
        return [] if all(stalled) else stalled

    def all_members(self) -> Candidates:
        """Returns all members as candidates; ``excluded`` also lists those that get no requests."""
        return self._of(self._rows, {name: why for name, (_, why) in self.exclusions().items()})

    def exclusions(self) -> dict[str, tuple[str, str]]:
        """Returns the members that get no requests, whatever the model: for each, the name of the
        first reason and a text for people. The name is ``stalled`` instead of ``unhealthy`` if the
        member hangs or its machine is gone, but not if it refuses connections."""
        found = dict[str, tuple[str, str]]()
        search = Search(self._clock(), trials=False)
        for reason in REASONS:
            left = [member for name, member in self.conditions.items() if name not in found]
            texts = [(member.state, why) for member in left if (why := reason.why(member, search))]
            if len(texts) <= reason.most * len(left):
                silent = STALLED if reason is UNHEALTHY else reason
                found |= {
                    state.id: ((silent if is_hung(state) else reason).name, text)
                    for state, text in texts
                }
        return found

    def hung(self, after: float) -> set[str]:
        """Returns members that have answered no poll and no request for ``after`` seconds.

        The set is empty while no member answers polls: the poller itself may be cut off.
        """
        now, members = self._clock(), self.conditions.values()
        if not any(member.state.healthy and not member.state.unanswered_s for member in members):
            return set()
        hung = (member for member in members if member.state.unanswered_s >= after)
        return {each.state.id for each in hung if each.answered_at < now - each.state.unanswered_s}

    def can_serve(self, model: str, among: frozenset[str] | None) -> bool:
        """Returns True if a member that lists the model may get a request for it now; False also if
        no member lists the model. ``among``: members to choose from; None: all."""
        usable = self.candidates(model, among).ids
        return any(self._serves(model, self.conditions[name]) for name in usable)

    def adapter(self, replica: str, model: str) -> str:
        """Returns the model's name on a member if the model is a LoRA adapter there, else ""."""
        member = self.conditions[replica]
        name = self._names.known(model, member.models) or ""
        return name if name in member.adapters else ""

    def is_up(self, replica: str) -> bool:
        """Returns True if a member is healthy and not ejected; it may be draining."""
        member = self.conditions.get(replica)
        now = self._clock()
        return member is not None and not (member.unhealthy(now) or member.ejection.active(now))

    def progresses(self, replica: str, within: float) -> bool:
        """Returns True if the replica's engine runs requests and made progress in the last
        ``within`` seconds."""
        member = self.conditions.get(replica)
        return member is not None and member.steps(self._clock(), within)

    @property
    def has_suspects(self) -> bool:
        """True if a member that may get requests failed within the last minute and has not
        succeeded since."""
        now = self._clock()
        return now - self._failed_at < _SUSPECT_S and any(
            now - member.ejection.failed_at < _SUSPECT_S and not member.ejection.active(now)
            for member in self.conditions.values()
        )

    # -- the rules --------------------------------------------------------------------------

    def _without_full(self, found: Candidates) -> Candidates:
        """Leaves out the new candidates that have as many requests as slow start allows.

        These candidates change with almost every request while a pool starts anew, and a search
        among a thousand members takes 7 ms.
        """
        rows, requests = self._rows, self._replicas.all_requests
        search = Search(self._clock(), requests=lambda replica: requests(rows[replica]))
        new = ((rows[each.state.id], each) for each in self._new)
        texts = {row: NEW.why(each, search) for row, each in new if row in found.row_set}
        full = tuple((row, why) for row, why in texts.items() if why)
        return _without(found, full) if NEW.may_exclude(len(full), len(found.ids)) else found

    def _choose(
        self, model: str, among: frozenset[str] | None, response_visible: bool
    ) -> Candidates:
        members = self._rows if among is None else self._rows.keys() & among
        found = usable = [self.conditions[name] for name in members]
        excluded = dict[str, str]()
        others = {name for name, each in self.conditions.items() if not self._serves(model, each)}
        if len(others) == len(self.conditions):
            others = set()  # the model may be missing from the lists
        search = Search(self._clock(), model, others, response_visible)
        for reason in REASONS:
            rejected = {each.state.id: why for each in usable if (why := reason.why(each, search))}
            if reason.may_exclude(len(rejected), len(usable)):
                excluded |= rejected
                usable = [member for member in usable if member.state.id not in rejected]
        if not usable:
            served = [each for each in found if self._serves(model, each)]
            if due := [each for each in served if each.may_be_tried(search.now)]:
                usable = [min(due, key=lambda member: member.trial_at)]
                del excluded[usable[0].state.id]
        ids = [member.state.id for member in usable]
        return self._of(ids, excluded, model, only_some=bool(others))

    def _of(
        self,
        usable: Iterable[str],
        excluded: Mapping[str, str],
        model: str = "",
        only_some: bool = False,
    ) -> Candidates:
        row_of, conditions = self._rows.__getitem__, self.conditions
        ids = sorted(usable, key=row_of)
        states = [conditions[name].state for name in ids]
        adapters = [self.adapter(name, model) for name in ids] if model else []
        listed = (member.models for member in conditions.values())
        without = [conditions[name].state for name in sorted(excluded, key=row_of)]
        return Candidates(
            np.array([row_of(name) for name in ids], dtype=np.intp),
            ids,
            [state.name or state.id for state in states],
            [profile_or_default(state.profile).name for state in states],
            [self._names.named(model, conditions[name].models) for name in ids],
            adapters if any(adapters) else (),
            tuple(Excluded(each.id, each.name or each.id, excluded[each.id]) for each in without),
            only_some,
            frozenset(self._names.served(model)).intersection(*listed),
        )

    def _serves(self, model: str, member: Condition) -> bool:
        """Returns True also for an empty ``model``: the request names none."""
        return not model or self._names.known(model, member.models) is not None

    def _set_new(self, member: Condition) -> None:
        """Begins slow start when a new process is first healthy, if another healthy member is
        measured. Ends slow start when the member itself is measured."""
        was_new = member.new
        if member.state.measured:
            member.new = False
        elif member.state.healthy and member.new is None:
            states = (other.state for other in self.conditions.values())
            member.new = any(other.measured and other.healthy for other in states)
        self._changed |= member.new != was_new


@lru_cache(maxsize=16)
def _without(found: Candidates, excluded: tuple[tuple[int, str], ...]) -> Candidates:
    """Returns the other candidates, as the same object for the same arguments. ``excluded``: row
    and reason of each excluded candidate."""
    places = found.rows.searchsorted([row for row, _ in excluded]).tolist()
    left = np.delete(np.arange(len(found.ids)), places).tolist()
    names = "ids", "names", "profiles", "models", "adapters"
    lists: dict[str, Any] = {name: getattr(found, name) for name in names}
    lists = {name: [*map(of.__getitem__, left)] for name, of in lists.items() if of}
    reasons = zip(places, (why for _, why in excluded), strict=True)
    further = (Excluded(found.ids[place], found.names[place], why) for place, why in reasons)
    return replace(found, rows=found.rows[left], **lists, excluded=(*found.excluded, *further))
