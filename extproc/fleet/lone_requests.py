"""Requests that a replica served alone, and what they tell of its speed."""

from collections.abc import Mapping
from dataclasses import dataclass

from extproc.fleet.tables import Replicas
from extproc.ground.clock import Clock
from extproc.predict.firsthand import Firsthand, Served, work_of
from extproc.predict.step import StepModel, profile_or_default
from extproc.predict.windows import SECONDS, warms_up
from extproc.replica_state import ReplicaState
from extproc.request.profile import RequestProfile

_MOST_KEPT = 32  # requests of a replica that wait for the next poll


@dataclass(frozen=True, slots=True)
class Baseline:
    """What was counted of a replica when it was idle and was sent a request."""

    state: ReplicaState  # as of the last poll
    sent: float  # sequences sent by the router, in all


class LoneRequests:
    """Finds the requests that had a replica to themselves, and learns its step times from them.

    Whether one had is known when it has ended and a poll says that nobody else's were served
    meanwhile; and how much of its prompt was cached.
    """

    def __init__(self, replicas: Replicas, rows: Mapping[str, int], clock: Clock) -> None:
        self._replicas = replicas
        self._rows = rows
        self._clock = clock
        self._now: dict[int, tuple[int, Baseline]] = {}  # by row: the only request there
        self._ended: dict[int, list[tuple[float, Baseline, Served]]] = {}
        self._seen: dict[int, Firsthand] = {}
        self._shared: dict[int, tuple[float, float]] = {}
        """By row: since when polls have seen several requests at once there, and until when."""

    def sent(self, row: int, ticket: int, profile: RequestProfile, state: ReplicaState) -> None:
        """A request was sent to the replica in that row; the ledger has it.

        One with images or audio tells nothing: to fetch and to encode these takes long, too.
        """
        replicas = self._replicas
        beside = (
            replicas.requests.item(row) > 1
            or replicas.peers_requests.item(row)
            or replicas.unattributed.item(row) > 0.0
        )
        if beside or profile.fetches:
            self._now.pop(row, None)
        else:
            self._now[row] = ticket, Baseline(state, replicas.sent.item(row) - profile.parts)

    def moved(self, row: int, ticket: int, to: int) -> None:
        """The request is on the replica in the row ``to`` now, and what was there is not alone."""
        self.left(row, ticket)
        if row != to:
            self._now.pop(to, None)

    def left(self, row: int, ticket: int) -> Baseline | None:
        """The request has ended, or moved; what was before it, if it was alone."""
        return self._now.pop(row)[1] if self._is_alone(row, ticket) else None

    def served(self, replica: str, before: Baseline, served: Served) -> None:
        """What became of one that was alone there; the next poll tells if it was, and nothing does
        of a replica that is no member any more."""
        if (row := self._rows.get(replica)) is not None:
            kept = self._ended.setdefault(row, [])
            if len(kept) < _MOST_KEPT:
                kept.append((self._clock(), before, served))

    def teaches(self, row: int, ticket: int) -> bool:
        """Whether the request is alone so far, on a replica whose speed is not known yet."""
        seen = self._seen.get(row)
        return self._is_alone(row, ticket) and not (seen and seen.sure(self._clock()))

    def polled(self, row: int, state: ReplicaState, asked_at: float) -> None:
        self._see_shared(row, state, asked_at)
        if ended := self._ended.get(row):
            told = [one for one in ended if one[0] <= asked_at]
            self._ended[row] = ended[len(told) :]
            for _, before, served in told:
                self._learn(row, state, before, served)

    def step(self, row: int, state: ReplicaState) -> StepModel:
        """The step times of a replica, by these requests and by what the poller learned."""
        known = state.learned or profile_or_default(state.profile).step
        seen = self._seen.get(row)
        return known if seen is None else seen.model(known, self._clock())

    def clear(self, row: int) -> None:
        for kept in (self._now, self._ended, self._seen, self._shared):
            kept.pop(row, None)

    def _is_alone(self, row: int, ticket: int) -> bool:
        return row in self._now and self._now[row][0] == ticket

    def _see_shared(self, row: int, state: ReplicaState, now: float) -> None:
        """Tells how long polls have seen several requests at once there, from the second second on:
        the counters tell of stretches that long."""
        since, until = self._shared.get(row, (now, now))
        if state.running < 2 or not state.measured or not 0.0 <= now - until < SECONDS[0]:
            self._shared.pop(row, None)
            return
        self._shared[row] = since, now
        if now - since > SECONDS[0] and (seen := self._seen.get(row)):
            seen.counted(now - until, self._clock())

    def _learn(self, row: int, state: ReplicaState, before: Baseline, served: Served) -> None:
        replicas, firsts = self._replicas, state.first_tokens - before.state.first_tokens
        prompts = state.prompt_tokens - before.state.prompt_tokens
        cached = state.cached_tokens - before.state.cached_tokens
        if not 0.0 <= firsts <= replicas.sent[row] - before.sent or cached < 0.0:
            return  # somebody else's were served, too, or by another process
        if warms_up(before.state.steps, state.steps):
            return
        share = cached / prompts if prompts > 0.0 else 0.0
        computed = max(served.prompt_tokens * (1.0 - share), 1.0)
        budget, per_step = replicas.token_budget.item(row), replicas.tokens_per_step.item(row)
        told = work_of(served, computed, budget, per_step)
        works = [work for work in told if work.seconds > 0.0]  # else the clock is too coarse
        if works:
            seen, now = self._seen.get(row), self._clock()
            if seen is None:
                seen = self._seen[row] = Firsthand(profile_or_default(state.profile).step, now)
            seen.observe(works, now)
