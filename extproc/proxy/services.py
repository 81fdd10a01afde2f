"""Parts of a router that its streams share, with the budgets of messages that the router reads."""

from collections import deque
from dataclasses import dataclass, field, replace
from random import Random
from socket import gethostname
from typing import Any

from extproc.config import Config
from extproc.fleet.fleet import Fleet
from extproc.fleet.members import ModelNames
from extproc.ground.address import split_address
from extproc.ground.clock import Clock
from extproc.observe.changes import Exclusions, Onsets, Presence
from extproc.observe.decision_log import MOST_RESULTS, ObservedPool
from extproc.observe.history import Average
from extproc.observe.metrics import Demand, RouterMetrics
from extproc.observe.recorder import Recorder
from extproc.observe.traces import Traces
from extproc.predict.lengths import OutputLengths
from extproc.proxy.body_memory import BodyMemory
from extproc.request.tokens import TokenCounter
from extproc.route.queue import Queue
from extproc.route.router import Router

RESERVED_FOR_ADAPTERS = 0.5  # fraction of the chunk budget for streams that load an adapter
CHUNKS_SAVED_S = 60.0
"""Seconds for which unspent chunks add up: after a quiet time the router reads whole responses."""
_RESPONSES_PER_S = 100.0  # so a replica with 1% of the requests shows a response each second


class Budget:
    """Token bucket: fills at a rate per second, up to a limit."""

    def __init__(self, per_s: float, saved_s: float) -> None:
        self._per_s = per_s
        self._limit = self._left = per_s * saved_s
        self._as_of = 0.0

    def takes(self, now: float, amount: float, reserved: float = 0.0) -> bool:
        """Spends ``amount`` and returns True, or returns False if too little is left.

        The budget must hold at least 1, and more than ``reserved`` (a fraction of the limit).
        Afterwards the budget may be negative. ``now``: seconds.
        """
        self._left = min(self._left + (now - self._as_of) * self._per_s, self._limit)
        self._as_of = now
        if self._left < 1.0 or self._left <= reserved * self._limit:
            return False
        self._left -= amount
        return True

    def spend(self, amount: float) -> None:
        self._left -= amount


@dataclass(frozen=True, slots=True, kw_only=True)
class Services(ObservedPool):
    """Parts of a router that serve one pool. Pools share all parts except those that
    :func:`parts_of_pool` creates."""

    tokens: TokenCounter
    metrics: RouterMetrics
    random: Random
    chunks: Budget
    """Budget of the chunks of streams that the router reads; each costs about 0.2 ms of CPU.
    Envoy sends all chunks of a response or none: it accepts ``mode_override`` only in replies to
    headers. So the router decides at the response's headers, by the expected number of chunks."""

    demand: Demand
    traces: Traces | None = None  # None: no spans
    recorder: Recorder | None = None  # None: no record of the traffic
    body_memory: BodyMemory = field(default_factory=BodyMemory)
    responses: Budget
    """Budget of responses that Envoy forwards. A response's headers are one of a request's three
    messages, and delay the first token. Without them the ledger knows when the request ends, but
    not whether it failed or which replica served a retry. Envoy accepts ``mode_override`` only in
    replies to headers, so the router decides before it has chosen a replica."""

    def of_pool(self, config: Config) -> "Services":
        """Returns the parts for another pool of the same router."""
        return replace(self, **parts_of_pool(config, self.random, self.clock, self.wall))


def routing(config: Config, random: Random, clock: Clock, wall: Clock) -> tuple[Queue, Router]:
    """Creates the queue and the router of a pool, with a fleet that has no replicas yet."""
    _, port = split_address(config.serve.listen)
    address = f"{gethostname()}:{port}"
    route = config.route
    fleet = Fleet(OutputLengths(), clock, wall, ModelNames(route.models), address)
    queue = Queue(fleet, config.hold)
    return queue, Router(fleet, route.policy, random, route.session_cost_s, queue.backlog)


def parts_of_pool(config: Config, random: Random, clock: Clock, wall: Clock) -> dict[str, Any]:
    """Creates the fields of :class:`Services` that pools do not share.

    Raises:
        OSError: the folder of ``record.path`` cannot be used.
    """
    queue, router = routing(config, random, clock, wall)
    folder = config.record.path
    return {
        "config": config,
        "queue": queue,
        "router": router,
        "responses": Budget(_RESPONSES_PER_S, 1.0),
        "results": deque(maxlen=MOST_RESULTS),
        "external": Average(clock),
        "envoy_faults": {},
        "exclusions": Exclusions(),
        "onsets": Onsets(wall),
        "routers": Presence("routers", config.pool),
        "pollers": Presence("pollers", config.pool),
        "demand": Demand(clock),
        "recorder": None if folder is None else Recorder(config, folder, router.fleet, clock, wall),
    }
