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

RESERVED = 0.5  # fraction of the chunks that is kept for streams that load an adapter
_CHUNKS_KEPT_S = 60.0
"""Seconds of chunks that were not read and may be later: in a quiet hour whole answers are read."""
_RESPONSES_PER_S = 100.0  # a replica with a hundredth of the requests is looked at once a second


class Budget:
    """A rate per second; what is not spent is kept, up to a limit."""

    def __init__(self, per_s: float, kept_s: float) -> None:
        self._per_s = per_s
        self._most = self._left = per_s * kept_s
        self._as_of = 0.0

    def takes(self, now: float, amount: float, reserved: float = 0.0) -> bool:
        """Spends an amount, though it be more than is left, unless less than 1 is left, or no more
        than the ``reserved`` fraction of the limit. ``now``: seconds."""
        self._left = min(self._left + (now - self._as_of) * self._per_s, self._most)
        self._as_of = now
        if self._left < 1.0 or self._left <= reserved * self._most:
            return False
        self._left -= amount
        return True

    def spend(self, amount: float) -> None:
        self._left -= amount


def chunk_budget(chunks_per_s: float) -> Budget:
    """Chunks of streamed answers that may be read."""
    return Budget(chunks_per_s, _CHUNKS_KEPT_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Services(ObservedPool):
    """The parts of a router, for one pool; pools share what :meth:`of_pool` leaves."""

    tokens: TokenCounter
    metrics: RouterMetrics
    random: Random
    chunks: Budget
    """Chunks of streamed answers that are read. Each is a message to the router and one back, about
    0.2 ms of its CPU. Envoy sends all chunks of an answer or none: it takes ``mode_override`` in a
    reply to headers only, and once the router has closed its side, Envoy lets the rest pass but the
    end of the request is not known any more. So it is decided when an answer begins, by the length
    it is expected to have."""

    demand: Demand
    traces: Traces | None = None  # None: no spans are made
    recorder: Recorder | None = None  # of the traffic, where it is recorded
    body_memory: BodyMemory = field(default_factory=BodyMemory)
    responses: Budget
    """Responses that the router is told of: one of three messages a request, which holds up its
    first token. Of other requests the ledger knows the end, but neither which replica served it
    after a retry nor whether it failed. Envoy has to be told before the replica is chosen: it takes
    ``mode_override`` in a reply to headers only, and for the choice the body has to come."""

    def of_pool(self, config: Config) -> "Services":
        names = self.fleet.members.names
        return replace(self, **parts_of_pool(config, names, self.random, self.clock, self.wall))


def routing(
    config: Config, names: ModelNames, random: Random, clock: Clock, wall: Clock
) -> tuple[Queue, Router]:
    """Queue and router of a pool, over a fleet without replicas."""
    fleet, route = Fleet(OutputLengths(), clock, wall, names), config.route
    queue = Queue(fleet, config.hold, clock)
    return queue, Router(fleet, route.policy, random, route.session_cost_s, queue.backlog)


def parts_of_pool(
    config: Config, names: ModelNames, random: Random, clock: Clock, wall: Clock
) -> dict[str, Any]:
    """Fields of :class:`Services` that each pool has of its own.

    Raises:
        OSError: there can be no record.
    """
    queue, router = routing(config, names, random, clock, wall)
    return {
        "config": config,
        "queue": queue,
        "router": router,
        "responses": Budget(_RESPONSES_PER_S, 1.0),
        "accuracy": Accuracy(),
        "demand": Demand(clock),
        "recorder": recorder_of(config, router.fleet, clock, wall),
    }


def recorder_of(config: Config, fleet: Fleet, clock: Clock, wall: Clock) -> Recorder | None:
    """Makes the recorder of a pool's traffic if ``record.path`` is set.

    Raises:
        OSError: there can be no record.
    """
    folder = config.record.path
    return None if folder is None else Recorder(config, folder, fleet, clock, wall)
