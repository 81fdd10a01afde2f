"""Which replicas may be used: all that speaks against one, after how long, and what ends it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf

from extproc.clock import Clock
from extproc.fleet.names import ModelNames
from extproc.fleet.news import SILENT_AFTER_S, News
from extproc.replica_state import ReplicaState

_STUCK_S = 10.0
"""Seconds in which nothing moves in an engine with work: longer than any step."""
_LOOK_EVERY_S = 1.0
"""Seconds between two looks for those."""
_TOLERATED = 3
"""Failures in a row before a replica is left out."""
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_MOST_DOUBLINGS = 5
"""Seconds it is left out, doubling with every failure that follows."""
_REMEMBERED_S = 2 * _LONGEST_PAUSE_S
"""Longer than until the next try of a replica that goes on failing."""
_AT_FIRST = 4
"""Requests a newcomer may have in flight: enough to be measured by, within seconds, and few enough
to bear it where it is ten times slower than its profile says."""


@dataclass(slots=True)
class _Member:
    """What polls tell of one replica."""

    state: ReplicaState
    moved_at: float
    """When its engine was last seen to work, or to have nothing to do."""
    stalled: str = ""
    """Why it looks alive and is not; empty where it does not."""
    settled: bool = False
    """It is no newcomer any more, and was perhaps never one."""


@dataclass(slots=True)
class _Failures:
    """Of requests sent to one replica, in a row, as this router saw them."""

    count: int = 0
    at: float = -inf
    """When the last one was heard of."""
    paused_until: float = -inf
    tried: bool = False
    """A request was sent to it after a pause, whose outcome is not known yet."""


Rule = Callable[[_Member], str]
"""Why a replica may not be used; empty where it may."""


class Eligibility:
    """Tells which replicas may serve a request. Each rule leaves some out, in this order:

    - *not healthy*: its last scrape was refused, failed, was not answered in three timeouts, or its
      engine is dead; until a scrape succeeds. This alone holds even where it leaves none.
    - *does not serve the model*; until it says so. It holds even where it leaves none if any
      replica says it serves the model, for the others would answer 404. If none does, one that
      does not tell its models may, or an adapter is loaded when it is asked for.
    - *stalled*: no news of it for 5 s while there is of others, or nothing moved for 10 s in an
      engine with work; until news comes, or anything moves.
    - *failing*: three requests in a row failed there, as far as this router saw; for a pause, which
      doubles. After it one request tries again, and its outcome decides: Envoy may answer a request
      that failed there from another replica, and long after, so many would try before the first is
      heard of.
    - *draining*; until it is to serve again.
    - *new*, beside others that are measured, with as many requests as a newcomer may have: four,
      and one more for each that ended there, so that it is not flooded where its profile is far
      off. Its first measured stretch of work, a second or two, ends that. Replicas that join before
      any was measured are no newcomers: at the start of a pool all are alike, and somebody has to
      serve.
    """

    def __init__(self, clock: Clock, names: ModelNames) -> None:
        self.news = News(clock())
        self.newcomers: dict[str, int] = {}
        """And the requests that ended there."""
        self._clock = clock
        self._names = names
        self._members: dict[str, _Member] = {}
        self._failures: dict[str, _Failures] = {}
        self._any_measured = False
        self._looked_at = clock()
        self._changed = False
        self._next_end = inf
        """When the next pause ends."""

    # -- what happens -----------------------------------------------------------------------

    def heard(self, state: ReplicaState) -> None:
        """A poll's news of a replica came."""
        now = self._clock()
        self.news.heard(state.id, now)
        known = self._members.get(state.id)
        if known is None:
            self._members[state.id] = known = _Member(state, now)
            self._changed = True
        else:
            if _moved(known.state, state):
                known.moved_at = now
            self._changed |= _said(state) != _said(known.state)
            known.state = state
        self._start_slowly(known)
        if now - self._looked_at >= _LOOK_EVERY_S:
            self._looked_at = now
            self._look_for_stalls()

    def sent(self, replica: str) -> None:
        """A request was sent to it: after a pause that is enough until its outcome is known, or
        was not for as long as the pause."""
        failures = self._failures.get(replica)
        if failures and failures.paused_until > -inf and not self._paused(failures):
            failures.tried = True
            self._pause(failures)

    def failed(self, replica: str) -> None:
        """A request sent to it was answered with a 5xx, or had to be served by another.

        Those that were sent before a pause and fail during it do not count again.
        """
        if replica not in self._members:
            return
        failures = self._failures.setdefault(replica, _Failures())
        if self._paused(failures) and not failures.tried:
            return
        failures.tried = False
        failures.at = self._clock()
        failures.count += 1
        if failures.count >= _TOLERATED:
            self._pause(failures)

    def answered(self, replica: str) -> None:
        """A request sent to it was answered."""
        if self._failures.pop(replica, None) is not None:
            self._changed = True

    def ended(self, replica: str) -> None:
        """A request sent to it is over."""
        if replica in self.newcomers:
            self.newcomers[replica] += 1

    def forget(self, replica: str) -> None:
        """It is no member any more."""
        self.news.forget(replica)
        self.newcomers.pop(replica, None)
        self._members.pop(replica, None)
        self._failures.pop(replica, None)
        self._changed = True

    # -- what follows -----------------------------------------------------------------------

    def changed(self) -> bool:
        """Whether :meth:`admit` may answer otherwise than when this was last asked."""
        now = self._clock()
        if not self._changed and now < self._next_end:
            return False
        self._changed = False
        ends = (one.paused_until for one in self._failures.values())
        self._next_end = min((end for end in ends if end > now), default=inf)
        return True

    def admit(self, replicas: Iterable[str], model: str) -> tuple[list[str], Mapping[str, str]]:
        """Those that may serve a request for the model, and why each other one may not.

        Args:
            replicas: members, ``ip:port``.
            model: as the request names it.
        """
        usable, left_out = list(replicas), dict[str, str]()
        for rule, always in self._rules(model):
            found = ((name, rule(self._members[name])) for name in usable)
            rejected = {name: why for name, why in found if why}
            if always or len(rejected) < len(usable):
                left_out |= rejected
                usable = [name for name in usable if name not in rejected]
        return usable, left_out

    def works(self, replica: str) -> bool:
        """Whether a member is healthy and not failing: it can be asked for what it alone holds."""
        member = self._members.get(replica)
        return member is not None and not (_unhealthy(member) or self._failing(member))

    def too_much(self, replica: str, requests: float) -> str:
        """Why it gets no more, having that many in flight; empty where it may."""
        if replica not in self.newcomers:
            return ""
        limit = _AT_FIRST + self.newcomers[replica]
        if requests < limit:
            return ""
        return f"new, and its speed not measured yet: at most {limit} requests at a time"

    def only_some_serve(self, model: str) -> bool:
        """Whether some members serve the model, healthy or not, and others do not."""
        serving = [self._serves(model, member) for member in self._members.values()]
        return any(serving) and not all(serving)

    def unknown(self, model: str) -> bool:
        """Whether all members, healthy or not, told all they serve, and none this model."""
        members = self._members.values()
        return bool(members) and all(
            member.state.listed and not self._serves(model, member) for member in members
        )

    @property
    def doubtful(self) -> bool:
        """Whether a request that is sent now may go to a replica that failed within the last
        minute, and was not well since."""
        now = self._clock()
        return any(
            now - one.at < _REMEMBERED_S and not self._paused(one)
            for one in self._failures.values()
        )

    # -- the rules --------------------------------------------------------------------------

    def _rules(self, model: str) -> tuple[tuple[Rule, bool], ...]:
        """Each with whether it holds even where it leaves no replica."""
        listed = any(self._serves(model, member) for member in self._members.values())
        return (
            (_unhealthy, True),
            (partial(self._not_serving, model), listed),
            (_stalled, False),
            (self._failing, False),
            (_draining, False),  # last: those draining serve rather than one that is failing
        )

    def _serves(self, model: str, member: _Member) -> bool:
        return self._names.known(model, member.state.models) is not None

    def _not_serving(self, model: str, member: _Member) -> str:
        return "" if self._serves(model, member) else f"does not serve {model!r}"

    def _failing(self, member: _Member) -> str:
        failures = self._failures.get(member.state.id)
        if failures is None or not self._paused(failures):
            return ""
        return "it failed several requests in a row"

    def _paused(self, failures: _Failures) -> bool:
        return self._clock() < failures.paused_until

    def _pause(self, failures: _Failures) -> None:
        doublings = min(failures.count - _TOLERATED, _MOST_DOUBLINGS)
        pause = min(_FIRST_PAUSE_S * 2.0**doublings, _LONGEST_PAUSE_S)
        failures.paused_until = self._clock() + pause
        self._changed = True

    def _look_for_stalls(self) -> None:
        """As of the last news of any."""
        silent = set(self.news.silent(SILENT_AFTER_S))
        for name, member in self._members.items():
            why = ""
            if name in silent:
                why = f"no news of it for {SILENT_AFTER_S:.0f} s, while others were heard of"
            elif self.news.of(name) - member.moved_at > _STUCK_S:
                why = f"nothing moved in its engine for {_STUCK_S:.0f} s, though it has requests"
            self._changed |= why != member.stalled
            member.stalled = why

    def _start_slowly(self, member: _Member) -> None:
        """It counts as joined when it is first healthy."""
        state = member.state
        if state.measured:
            self._any_measured = member.settled = True
            self.newcomers.pop(state.id, None)
        elif state.healthy and not member.settled and self._any_measured:
            self.newcomers.setdefault(state.id, 0)
        elif state.healthy:
            member.settled = True


def _unhealthy(member: _Member) -> str:
    state = member.state
    return "" if state.healthy else state.problem or "not healthy"


def _stalled(member: _Member) -> str:
    return member.stalled


def _draining(member: _Member) -> str:
    return "draining" if member.state.draining else ""


def _said(state: ReplicaState) -> tuple[object, ...]:
    """What a poll says that may change what is answered."""
    return state.healthy, state.problem, state.models, state.name, state.draining


def _moved(before: ReplicaState, after: ReplicaState) -> bool:
    """Whether its engine did anything, or has nothing to do."""
    return not (after.running or after.waiting) or _progress(before) != _progress(after)


def _progress(state: ReplicaState) -> tuple[float, ...]:
    """What moves when an engine works. A step that only prefills part of a prompt is in no counter
    of vLLM, but takes KV blocks."""
    return (
        state.steps,
        state.prompt_tokens,
        state.generated_tokens,
        state.first_tokens,
        state.kv_usage,
        state.running,
        state.waiting,
    )
