"""What every exchange works with."""

import random
from dataclasses import dataclass, field, replace

from extproc.config import Config, RouteSettings
from extproc.fleet.fleet import Fleet
from extproc.ground.clock import Clock
from extproc.observe.decision_log import Accuracy, ObservedPool
from extproc.observe.metrics import Demand, RouterMetrics
from extproc.observe.recorder import Recorder
from extproc.observe.traces import Traces
from extproc.predict.lengths import OutputLengths
from extproc.proxy.room import Room
from extproc.proxy.watch import Reader, Watch
from extproc.request.tokens import TokenCounter
from extproc.route.queue import Queue
from extproc.route.router import Router


def router_of(route: RouteSettings, fleet: Fleet, random: random.Random) -> Router:
    """A router as it is configured."""
    return Router(fleet, route.policy, random, route.session_cost_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Services(ObservedPool):
    """The parts of a router, for one pool; pools share what :meth:`of_pool` leaves."""

    tokens: TokenCounter
    metrics: RouterMetrics
    random: random.Random
    reader: Reader
    demand: Demand
    traces: Traces | None = None
    """None: no spans are made."""
    recorder: Recorder | None = None
    """Of the traffic, where it is recorded."""
    room: Room = field(default_factory=Room)
    watch: Watch = field(default_factory=Watch)

    def of_pool(self, config: Config) -> "Services":
        """The same for a pool of its own, with an empty fleet."""
        fleet = Fleet(OutputLengths(), names=self.fleet.members.names)
        router = router_of(config.route, fleet, self.random)
        queue = Queue(fleet, config.hold, self.clock)
        return replace(
            self,
            config=config,
            router=router,
            queue=queue,
            demand=Demand(self.clock),
            recorder=recorder_of(config, fleet, self.clock, self.wall),
            watch=Watch(),
            accuracy=Accuracy(),
        )


def recorder_of(config: Config, fleet: Fleet, clock: Clock, wall: Clock) -> Recorder | None:
    """What records the traffic of a pool, if that is asked for.

    Raises:
        OSError: there can be no record.
    """
    folder = config.record.path
    return None if folder is None else Recorder(config, folder, fleet, clock, wall)
