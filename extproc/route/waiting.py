"""A queued request, and what it costs a replica."""

from collections.abc import Callable

from extproc.predict.completion import work
from extproc.request.profile import RequestProfile
from extproc.route.backlog import Place
from extproc.route.order import due_at
from extproc.route.reasons import seconds
from extproc.route.room import full_at
from extproc.route.router import Decision

ANEW_S = 0.2  # seconds between two decisions about a request, unless a replica has more room


class Waiting:
    """A queued request."""

    number = 0  # by arrival; the queue gives it
    unserved_since: float | None = None  # no replica may be used

    def __init__(
        self,
        profile: RequestProfile,
        decision: Decision | None,
        since: float,
        decide: Callable[[Place], Decision | None],
        go: Callable[[Decision | Exception | None], None],
    ) -> None:
        """Take over a request that arrived at ``since``.

        Args:
            profile: the request.
            decision: made at the arrival; None where no replica can be used.
            since: seconds, on the queue's clock.
            decide: decides as of now, for the request's place in the queue.
            go: dispatches the request; an exception refuses it, None gives it up. Raises nothing.
        """
        self.profile = profile
        self.tenant, self.model = profile.tenant, profile.model
        self.priority = profile.objective.priority
        self.since = since
        self.decide = decide
        self.go = go
        self.cost = 0.0  # replica-seconds, as of the arrival
        decode = 0.0
        self.why = "no replica serves it now"  # for people
        if decision is not None:
            self.cost = cost(decision)
            decode = decision.prediction.decode.item(decision.choice.first)
            self.why = _why(decision)
        self.due = due_at(since, profile.objective.due_s(decode), self.cost)
        self.decided(decision, since)

    def decided(self, decision: Decision | None, now: float) -> None:
        """Note that the request waits on, and for which replica."""
        self.decided_at = now
        self.unserved_since = None if decision else self.unserved_since or now
        self.replica, self.tokens = "", 0.0
        self.row: int | None = None
        self.retry_at = now + ANEW_S
        self.usable = self.declined = frozenset[int]()
        if decision is None:
            return
        view, prediction = decision.situation.view, decision.prediction
        first = decision.choice.first
        self.retry_at = now + max(prediction.queue.item(first), ANEW_S)
        self.usable = frozenset(view.rows.tolist())
        self.declined = frozenset(view.rows[prediction.queue <= 0.0].tolist())
        self.replica, self.row = decision.replica, view.rows.item(first)
        kept_free = 1.0 - full_at(self.priority, decision.among_others)
        self.tokens = _tokens(decision) - prediction.cached.item(first)  # of KV cache
        self.tokens += kept_free * view.kv_capacity.item(first)
        if prediction.yielded is not None:
            prompt = self.profile.prompt_tokens - prediction.cached.item(first)
            self.tokens = max(self.tokens - prediction.yielded.item(first), prompt)

    def place(self, depth: float, last_chance: bool = False) -> Place:
        """Place in the queue; ``depth`` is the share of its tenant's requests that go before."""
        key = self.model, self.priority, self.tenant, self.since, self.due
        return Place(*key, self.row, depth, last_chance)

    def declines(self, row: int, now: float) -> bool:
        """Return True if the last decision, at most 0.2 s ago, passed a replica with room over."""
        return row in self.declined and self.decided_at > now - ANEW_S


def _why(decision: Decision) -> str:
    name = decision.situation.view.names[decision.choice.first]
    return f"{name} is expected to have room for it in {seconds(decision.wait_s)}"


def cost(decision: Decision) -> float:
    """Replica-seconds of a request: for how long it keeps the replica chosen busy by itself."""
    view, first = decision.situation.view, decision.choice.first
    return work(decision.profile, decision.prediction, view, first)


def _tokens(decision: Decision) -> float:
    profile = decision.profile
    return profile.prompt_tokens + profile.sequences * decision.prediction.output_tokens
