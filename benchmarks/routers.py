"""Routers of the simulation, each with its own ledger, told of requests as in production."""

from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

from benchmarks.clock import VirtualClock
from extproc.fleet.fleet import Fleet
from extproc.fleet.ledger import Ticket
from extproc.fleet.state import ReplicaState
from extproc.request.profile import RequestProfile
from extproc.route.router import Decision, Router


class Node:
    """One router: its decisions, and what it hears of requests, by their number."""

    def __init__(self, fleet: Fleet, policy: str, random: Random) -> None:
        self.fleet = fleet
        self.router = Router(fleet, policy, random)
        self._tickets: dict[int, Ticket] = {}

    def sent(self, number: int, replica: str, profile: RequestProfile) -> None:
        """A request was sent to a replica."""
        self._tickets[number] = self.fleet.dispatch(replica, profile)

    def moved(self, number: int, replica: str) -> None:
        """It is served by another replica than it was sent to."""
        self.fleet.move(self._tickets[number], replica)

    def first_token(self, number: int) -> None:
        """Its first token was seen."""
        self.fleet.first_token(self._tickets[number])

    def ended(self, number: int, prefilled: bool) -> None:
        """Its stream is over."""
        self.fleet.release(self._tickets.pop(number), prefilled)

    def answered(self, replica: str, well: bool) -> None:
        """Response headers came from a replica, or none and an error."""
        if well:
            self.fleet.answered(replica)
        else:
            self.fleet.failed(replica)


News = Callable[[Node], None]


class Deciding(Protocol):
    """Whoever decides: routers as in production, or the oracle."""

    def decide(
        self, number: int, profile: RequestProfile, prefix: Sequence[int]
    ) -> Decision | None:
        """Where a request goes; None where no replica is known to work.

        ``prefix``: hashes of the prompt's blocks.
        """
        ...

    def tell(self, number: int, news: News, private: bool = False) -> None:
        """Tells the router of a request, and the others in time, unless it is ``private``."""
        ...

    def learn(
        self,
        number: int,
        decision: Decision,
        replica: str,
        tokens: int,
        took: float,
        ttft: float | None,
    ) -> None:
        """A response said how many tokens it had, ``took`` seconds after the decision."""
        ...

    def publish(self, state: ReplicaState) -> None:
        """A poll's news of a replica."""
        ...

    def deliver(self, until: float) -> None:
        """Lets arrive what was under way between routers, each at its time."""
        ...


class Routers:
    """Routers that share polls, and with a lag what they do; requests are dealt at random."""

    def __init__(
        self, nodes: Sequence[Node], share_lag: float | None, clock: VirtualClock, random: Random
    ) -> None:
        """``share_lag``: seconds until the others hear what one does; None: never."""
        self.nodes = nodes
        self._share_lag = share_lag
        self._clock = clock
        self._random = random
        self._owner: dict[int, Node] = {}
        self._under_way: deque[tuple[float, Node, News]] = deque()

    def decide(
        self, number: int, profile: RequestProfile, prefix: Sequence[int]
    ) -> Decision | None:
        """The decision of a router drawn at random."""
        owner = self._owner[number] = self._random.choice(self.nodes)
        return owner.router.decide(profile)

    def tell(self, number: int, news: News, private: bool = False) -> None:
        """Tells the router of a request at once."""
        owner = self._owner[number]
        news(owner)
        if self._share_lag is not None and not private:
            at = self._clock() + self._share_lag
            self._under_way += [(at, node, news) for node in self.nodes if node is not owner]

    def learn(
        self,
        number: int,
        decision: Decision,
        replica: str,
        tokens: int,
        took: float,
        ttft: float | None,
    ) -> None:
        """Its own router learns from it."""
        self._owner[number].router.learn(decision, replica, tokens, took, ttft)

    def publish(self, state: ReplicaState) -> None:
        """Reaches every router at once."""
        for node in self.nodes:
            node.fleet.put(state)

    def deliver(self, until: float) -> None:
        """In the order it was sent: it all takes equally long."""
        while self._under_way and self._under_way[0][0] <= until:
            self._clock.time, node, news = self._under_way.popleft()
            news(node)
