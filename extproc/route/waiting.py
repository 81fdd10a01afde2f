"""Queued request, and its place among the others."""

from collections.abc import Callable
from math import expm1, inf, log

from extproc.request.profile import RequestProfile
from extproc.route.decision import Decision
from extproc.route.reasons import seconds
from extproc.route.room import full_at

ANEW_S = 0.2  # seconds between two decisions about a request, unless a replica gets more room
OVERTAKEN_S = 3.0
"""Bound B of *Bounded overtaking* (:mod:`extproc.route.queue`). With 10 s the mean time to first
token is shorter, but the p99 of simulated overload (azure-2023-conv ×2.4) is 1.4 times as long."""
_GAMMA = 2.0  # 1/s; with 1 or 4 the slowest requests of simulated overloads take longer

Key = tuple[int, str]  # priority and tenant


def key_of(profile: RequestProfile) -> Key:
    """Return priority and tenant. Tenants of one priority share fairly."""
    return profile.objective.priority, profile.tenant


class Place:
    """Place of a request among the queued ones.

    Requests of a tenant go in the order of ``due``, which is early for requests with a near target
    or a low cost. ``due`` is at most B = ``OVERTAKEN_S`` after the arrival, so only requests that
    arrive within B seconds can overtake. Without a target, ``due`` is B seconds after the arrival,
    minus the boost of the policy γ-Boost, whose response times have the lightest tail (Yu and
    Scully, 2024)::

        boost = min(B, -log(1 - exp(-γ · cost)) / γ)
    """

    row: int | None = None  # of the replica that the request waits for, in the fleet's table
    last_chance = False  # True: the request starts wherever it can now, or is refused

    def __init__(self, profile: RequestProfile, since: float, decode_s: float, cost: float) -> None:
        """``since``: arrival. ``decode_s``: predicted decode time. ``cost``: replica-seconds."""
        self.profile = profile
        self.model = profile.model
        self.line = self.model, False  # True: the request waits for one replica alone
        self.key = self.priority, self.tenant = key_of(profile)
        self.since = since
        self.cost = cost
        boost = -log(-expm1(-_GAMMA * cost)) / _GAMMA if cost > 0.0 else inf
        later = min(profile.objective.due_s(decode_s), OVERTAKEN_S - boost)
        self.due = since + max(later, 0.0)


class Waiting(Place):
    """Queued request."""

    number = 0  # by arrival; set by the queue
    unserved_since: float | None  # since when no replica may serve the request

    def __init__(
        self,
        profile: RequestProfile,
        decision: Decision | None,
        since: float,
        decide: Callable[[Place], Decision | None],
        resolve: Callable[[Decision | Exception | None], None],
    ) -> None:
        """Create the queue's entry for a request that arrived at ``since``, by the queue's clock.

        Args:
            decision: decision at the arrival; None: no replica may serve the request.
            decide: makes a new decision, given the request's place in the queue.
            resolve: ends the wait: dispatches the request as decided, refuses the request with an
                exception, or gives up (None: no replica serves the request). Raises nothing.
        """
        decode_s = cost = 0.0
        self.unserved_since = None if decision else since
        self.why = "no replica can serve it now"  # for people
        if decision is not None:
            view, first = decision.situation.view, decision.choice.first
            decode_s, cost = decision.prediction.decode.item(first), decision.work_s
            wait = seconds(decision.wait_s)
            self.why = f"{view.names[first]} is expected to have room for it in {wait}"
        super().__init__(profile, since, decode_s, cost)
        self.decide = decide
        self.resolve = resolve
        self.wait_on(decision, since)

    def wait_on(self, decision: Decision | None, now: float) -> None:
        """Record what the request waits for: the replica of ``decision``; None: any replica that
        serves the request."""
        self.decided_at = now
        self.replica, self.row, self.tokens = "", None, 0.0
        self.retry_at = now + ANEW_S
        self.line = self.model, decision is not None and decision.choice.bound
        self.usable = self._declined = frozenset[int]()  # rows of the fleet's table
        if decision is None:
            return
        view, prediction = decision.situation.view, decision.prediction
        first, profile = decision.choice.first, decision.profile
        self.cost = self.cost or decision.work_s
        self.replica, self.row = decision.replica, view.rows.item(first)
        self.retry_at = now + max(decision.wait_s, ANEW_S)
        self.usable = view.candidates.row_set
        self._declined = frozenset(view.rows[prediction.queue <= 0.0].tolist())
        prompt = profile.prompt_tokens - decision.cached
        reserve = 1.0 - full_at(self.priority, decision.situation.among_others)
        self.tokens = prompt + profile.sequences * prediction.output_tokens  # of KV cache
        self.tokens += reserve * view.kv_capacity.item(first)
        if prediction.preemptible is not None:
            self.tokens = max(self.tokens - prediction.preemptible.item(first), prompt)

    def could_use(self, row: int) -> bool:
        """Return True if the request would start on this replica once the replica has room."""
        return row in self.usable and row not in self._declined

    def declines(self, row: int, now: float) -> bool:
        """Return True if a decision within the last 0.2 s chose to wait although this replica had
        room."""
        return row in self._declined and self.decided_at > now - ANEW_S
