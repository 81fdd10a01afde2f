"""Condition of one replica: what its polls, its answers and its failures say about it."""

from dataclasses import dataclass, field
from math import inf

from extproc.fleet.ejection import Ejection
from extproc.replica_state import STALE_AFTER_S, ReplicaState

HUNG_S = 1.0  # time without any answer after which requests go elsewhere
STUCK_S = 10.0  # time in which nothing moves in an engine with work: longer than any step
TRIAL_S = 5.0  # time between two trials of a replica that is stalled or not healthy
FULL_S = 1.0  # time for which an engine that steps and answers 503 counts as full
AT_FIRST = 4
"""Requests that a new replica may have in flight: enough to measure its speed within seconds, and
few enough to be harmless if it is ten times slower than its profile says."""
_FROZEN_S = 2.0  # frozen gauges stand still this long, both before and after they prove wrong
_ANSWER_TRAVEL_S = 1.0  # time for which an answer may be on its way
_STALE = f"no update for {STALE_AFTER_S:.0f} s, while other replicas had updates"
_STUCK = f"nothing moved in its engine for {STUCK_S:.0f} s, though it has requests"


@dataclass(slots=True)
class Condition:
    """Health of a replica as a router knows it; times are in seconds on the fleet's clock."""

    state: ReplicaState  # last polled
    scraped_at: float  # last scrape that succeeded
    moved_at: float  # when a figure of its engine last changed
    models: frozenset[str] = field(init=False)  # of ``state``, like ``adapters``
    adapters: frozenset[str] = field(init=False)
    refuted_at: float = inf  # first poll that misses a prefilled prompt sent after ``moved_at``
    frozen: bool = False
    """True: its gauges do not move, and are wrong. They show requests though the replica has none,
    or they miss a prefilled prompt sent after they last moved."""
    stalled: str = ""  # why the replica counts as stalled; empty: it does not
    new: bool | None = None  # True: slow start; None: not healthy yet
    ended: int = 0  # requests that ended on the replica while it was new
    answered_at: float = -inf  # last sign of an answer to a request of this router
    full_until: float = -inf
    unhealthy_at: float = inf  # first poll that found the replica not healthy
    trial_at: float = inf  # next trial while the replica is stalled or not healthy
    ejection: Ejection = field(default_factory=Ejection)

    def __post_init__(self) -> None:
        self._read_facts(self.moved_at)

    # -- polls ------------------------------------------------------------------------------

    def polled(
        self, state: ReplicaState, age: float, now: float, idle: bool, prefilled_sent_at: float
    ) -> bool:
        """Takes a polled state; returns True if the choice of candidates may change.

        The last two arguments reveal frozen figures. Either a prompt was prefilled that this router
        sent at ``prefilled_sent_at``, but no counter has moved since before then; response headers
        and errors alone do not prove a prefill. Or the gauges show requests, but the replica is
        ``idle``, because no router knows of any: vLLM up to 0.10.1 leaves its gauges unchanged if
        all requests are aborted at once (vllm#22545).
        """
        before, self.state, polled_at = self.state, state, now - age
        if is_scraped := state.scraped_at != before.scraped_at:
            self.scraped_at = polled_at
        if _figures(state) != _figures(before):
            self.moved_at, self.refuted_at, self.frozen = now, inf, False
        elif is_scraped:
            # A page without counters counts no prompt, so it proves nothing.
            if prefilled_sent_at - self.moved_at >= _FROZEN_S and state.prompt_tokens:
                self.refuted_at = min(self.refuted_at, now)
            wrong_since = self.moved_at if idle and _has_work(state) else self.refuted_at
            self.frozen = polled_at - wrong_since >= _FROZEN_S
        changes = _facts(state) != _facts(before)
        if changes:
            self._read_facts(now)
        return changes

    def check_stall(self, stale: bool, now: float) -> bool:
        """Determines whether the replica is stalled; returns True if that changes. ``stale``: as
        :meth:`~extproc.fleet.members.Staleness.stale` finds it."""
        before, self.stalled = self.stalled, ""
        unmoved_s = self.scraped_at - self.moved_at
        if stale:
            self.stalled = _STALE
        elif _has_work(self.state) and not self.frozen and unmoved_s > STUCK_S:
            self.stalled = _STUCK
        if self.stalled and not before:
            self.trial_at = now + TRIAL_S
        return self.stalled != before

    def _read_facts(self, now: float) -> None:
        state = self.state
        self.models, self.adapters = frozenset(state.models), frozenset(state.adapters)
        if state.healthy:
            self.unhealthy_at = inf
        elif self.unhealthy_at == inf:
            self.unhealthy_at, self.trial_at = now, now + TRIAL_S
            self.ejection = Ejection()  # or it would use up the limit of ejected replicas

    # -- reasons, as text for people; empty: the reason does not apply -----------------------

    def unhealthy(self, now: float) -> str:
        answered = self.answered_at - self.unhealthy_at > _ANSWER_TRAVEL_S
        if self.state.healthy or (answered and now - self.answered_at < STALE_AFTER_S):
            return ""
        return self.state.problem or "not healthy"

    def hung_or_stalled(self, now: float, trials: bool) -> str:
        """Returns why the replica counts as hung or stalled, or an empty string. ``trials``: a
        stalled replica that is due for a trial does not count as stalled."""
        if is_hung(self.state):
            return f"accepts connections, but has answered nothing for {HUNG_S:g} s"
        return "" if trials and now >= self.trial_at else self.stalled

    def slow_start(self, requests: float) -> str:
        limit = AT_FIRST + self.ended
        if not self.new or requests < limit:
            return ""
        return f"new, and its speed not measured yet: at most {limit} requests at a time"

    # -- further questions ------------------------------------------------------------------

    def steps(self, now: float, within: float = FULL_S) -> bool:
        """Returns True if the engine runs requests and made progress in the last ``within``
        seconds."""
        busy = self.state.running > 0 and self.state.healthy
        return busy and not self.frozen and now - self.moved_at < within

    def may_be_tried(self, now: float) -> bool:
        """Returns True if the replica may get a request as a trial though it is not healthy."""
        state = self.state
        out_of_service = state.asleep or state.draining or state.refuses
        return not out_of_service and now >= self.trial_at

    def ends(self) -> tuple[float, ...]:
        """Returns the times at which a reason to exclude the replica ends, or a trial may begin."""
        answered = self.answered_at + STALE_AFTER_S if not self.state.healthy else -inf
        return self.ejection.until, self.full_until, self.trial_at, answered


def is_hung(state: ReplicaState) -> bool:
    """Returns True if the replica has answered no scrape for ``HUNG_S``."""
    return state.unanswered_s >= HUNG_S


def _facts(state: ReplicaState) -> tuple[object, ...]:
    """Returns the parts of a state on which the choice of candidates depends."""
    served = state.models, state.adapters, state.listed
    health = state.healthy, state.problem, state.asleep, is_hung(state)
    return *served, *health, state.ready, state.draining, state.name, state.profile


def _has_work(state: ReplicaState) -> bool:
    return bool(state.running or state.waiting)


def _figures(state: ReplicaState) -> tuple[float, ...]:
    """Returns figures of which an engine at work changes at least one in each step.

    A step that prefills only a part of a prompt changes KV usage, but no counter of vLLM.
    """
    counters = state.steps, state.prompt_tokens, state.generated_tokens, state.first_tokens
    return *counters, state.kv_usage, state.running, state.waiting
