"""A request that waits, and whether a replica could carry it."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from extproc.request.errors import Refusal
from extproc.route.router import Decision

_FULL = 0.945
"""KV pressure from which on a replica can carry no other request: what it has is still growing."""
_AMONG_OTHERS = 0.02
"""So much less where other routers send there, too: for some milliseconds nobody knows of it."""
_RESERVE = 0.035
"""So much more for requests of a higher priority: some room is left for those that come."""


@dataclass(frozen=True, slots=True)
class Carried:
    """A request on the replica that was chosen for it."""

    replica: str
    """``ip:port``."""
    tokens: float
    """KV tokens that have to be free there for it."""


class Waiting:
    """A request that waits."""

    __slots__ = (
        *("candidates", "carried", "cost", "deadline", "decide", "decided_at", "go"),
        *("model", "passed_over", "priority", "since", "tenant"),
    )

    def __init__(
        self,
        decision: Decision,
        since: float,
        decide: Callable[[], Decision | None],
        go: Callable[[Decision | Refusal | None], None],
        priority: int = 0,
        deadline: float = inf,
    ) -> None:
        """One that waits from now on.

        Args:
            decision: the one that was made when it came.
            since: when that was.
            decide: decides as of now; None where no replica can be used.
            go: sends or refuses it.
            priority: higher goes first.
            deadline: when it should have its first token.
        """
        self.tenant = decision.profile.tenant
        self.model = decision.profile.model
        self.cost = cost(decision)
        """As it was when it came."""
        self.since = since
        self.decide = decide
        self.go = go
        self.priority = priority
        self.deadline = deadline
        self.decided(decision, since)

    def decided(self, decision: Decision, now: float) -> None:
        """It was decided anew."""
        ids, prediction = decision.situation.view.ids, decision.prediction
        full = full_at(decision, self.priority)
        room = (prediction.kv_pressure < full) & (prediction.admission <= 0.0)
        with_room = frozenset(ids[place] for place in room.nonzero()[0].tolist())
        self.candidates = frozenset(ids)
        self.passed_over = with_room - {decision.replica}
        self.carried = carried(decision, full)
        self.decided_at = now


def full_at(decision: Decision, priority: int) -> float:
    """The KV pressure from which on a replica can carry no other request."""
    less = 0.0 if decision.news_age is None else _AMONG_OTHERS
    return _FULL - less + (_RESERVE if priority > 0 else 0.0)


def fits(decision: Decision, priority: int) -> bool:
    """Whether the replica chosen can carry the request to its end beside what is there.

    It goes, too, where nothing is that could end, and where what others sent is not known.
    """
    first, prediction = decision.choice.first, decision.prediction
    pressure, admission = prediction.kv_pressure.item(first), prediction.admission.item(first)
    if pressure < full_at(decision, priority) and not admission:
        return True
    return not decision.situation.view.requests.item(first) or decision.stale


def carried(decision: Decision, full: float) -> Carried:
    """The request on the replica chosen, which is full at that KV pressure."""
    first = decision.choice.first
    reserve = (1.0 - full) * decision.situation.view.kv_capacity.item(first)
    cached = decision.prediction.cached.item(first)
    return Carried(decision.replica, _tokens(decision) - cached + reserve)


def cost(decision: Decision) -> float:
    """Seconds of a whole replica: its share of the KV cache, for as long as it is there."""
    first, prediction = decision.choice.first, decision.prediction
    seconds = prediction.completion.item(first) - prediction.admission.item(first)
    return _tokens(decision) / decision.situation.view.kv_capacity.item(first) * seconds


def _tokens(decision: Decision) -> float:
    """KV tokens that it has at its end."""
    profile = decision.profile
    return profile.prompt_tokens + profile.sequences * decision.prediction.output_tokens
