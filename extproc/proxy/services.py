"""The parts of a router that its exchanges share, and the budgets of what they read and hold."""

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from extproc.config import Config
from extproc.fleet.fleet import Fleet
from extproc.fleet.members import ModelNames
from extproc.ground.clock import Clock
from extproc.observe.decision_log import Accuracy, ObservedPool
from extproc.observe.metrics import Demand, RouterMetrics
from extproc.observe.recorder import Recorder
from extproc.observe.traces import Traces
from extproc.predict.lengths import OutputLengths
from extproc.proxy.body_memory import BodyMemory
from extproc.request.tokens import TokenCounter
from extproc.route.queue import Queue
from extproc.route.router import Router

_RESPONSES_PER_S = 100.0
"""Responses that one pool in one router is told of: a replica that gets a hundredth of the requests
is looked at once a second."""
_CHUNKS_KEPT_S = 60.0
"""Seconds of chunks that were not read and may be later: in a quiet hour whole answers are read."""
_RESERVED = 0.5  # part of the chunks that is kept for streams that teach


class Budget:
    """A rate per second; what is not spent is kept, up to a limit."""

    def __init__(self, per_s: float, most: float) -> None:
        self._per_s = per_s
        self._most = self._left = most
        self._as_of = 0.0

    def left(self, now: float) -> float:
        """Returns what may be spent at ``now`` (seconds); below zero after more was spent."""
        self._left = min(self._left + (now - self._as_of) * self._per_s, self._most)
        self._as_of = now
        return self._left

    def spend(self, amount: float) -> None:
        self._left -= amount


class Watch:
    """All responses while there are few of them, and of many so many a second.

    To be told of a response is one of three messages a request, and holds its first token up. For
    a request whose response is not looked at, the ledger knows its end, but neither which replica
    served it after a retry nor whether it failed.

    Envoy has to be told before the replica is chosen: it takes ``mode_override`` in a reply to
    headers only, and for the choice the body has to come.
    """

    def __init__(self) -> None:
        self._responses = Budget(_RESPONSES_PER_S, _RESPONSES_PER_S)

    def sees(self, now: float, doubtful: bool) -> bool:
        """Tells whether to look at the response to a request that came just now; ``doubtful``: it
        may go to a replica that failed of late. All those are, until that is known to be well or
        gets nothing."""
        if self._responses.left(now) < 1.0:
            return doubtful
        self._responses.spend(1.0)
        return True


class Reader:
    """Reads streamed answers, so many chunks a second, and rather those that load an adapter.

    A chunk is a message to the router and one back, about 0.2 ms of its CPU. Envoy sends all chunks
    of an answer or none: it takes ``mode_override`` in a reply to headers only, and once the router
    has closed its side, Envoy lets the rest pass but the end of the request is not known any more.
    So it is decided when an answer begins, by the length it is expected to have.
    """

    def __init__(self, chunks_per_s: float) -> None:
        self._most = chunks_per_s * _CHUNKS_KEPT_S
        self._chunks = Budget(chunks_per_s, self._most)

    def reads(self, now: float, chunks: float, loads: bool = False) -> bool:
        """Tells whether to read an answer that begins, of so many expected chunks; if so, these are
        paid for. One that ``loads`` an adapter tells how long that takes."""
        if self._chunks.left(now) <= (0.0 if loads else _RESERVED * self._most):
            return False
        self._chunks.spend(chunks)
        return True

    def came(self, chunks: float, expected: float) -> None:
        """An answer that was read is over: it had so many chunks, and not what was expected."""
        self._chunks.spend(chunks - expected)


@dataclass(frozen=True, slots=True, kw_only=True)
class Services(ObservedPool):
    """The parts of a router, for one pool; pools share what :meth:`of_pool` leaves."""

    tokens: TokenCounter
    metrics: RouterMetrics
    random: Random
    reader: Reader
    demand: Demand
    traces: Traces | None = None  # None: no spans are made
    recorder: Recorder | None = None  # of the traffic, where it is recorded
    body_memory: BodyMemory = field(default_factory=BodyMemory)
    watch: Watch = field(default_factory=Watch)

    def of_pool(self, config: Config) -> "Services":
        names = self.fleet.members.names
        parts = parts_of_pool(config, names, self.random, self.clock, self.wall)
        return replace(self, **parts, watch=Watch(), accuracy=Accuracy())


def parts_of_pool(
    config: Config, names: ModelNames, random: Random, clock: Clock, wall: Clock
) -> dict[str, Any]:
    """Fields of :class:`Services` that each pool has of its own.

    Raises:
        OSError: there can be no record.
    """
    fleet, route = Fleet(OutputLengths(), clock, wall, names), config.route
    queue = Queue(fleet, config.hold, clock)
    return {
        "config": config,
        "queue": queue,
        "router": Router(fleet, route.policy, random, route.session_cost_s, queue.backlog),
        "demand": Demand(clock),
        "recorder": recorder_of(config, fleet, clock, wall),
    }


def recorder_of(config: Config, fleet: Fleet, clock: Clock, wall: Clock) -> Recorder | None:
    """Makes the recorder of a pool's traffic if ``record.path`` is set.

    Raises:
        OSError: there can be no record.
    """
    folder = config.record.path
    return None if folder is None else Recorder(config, folder, fleet, clock, wall)
