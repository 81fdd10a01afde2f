"""Simulation of a trace on the fleet of a fleet file, under a policy or under the oracle."""

from collections.abc import Sequence as PySequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

import numpy as np

from benchmarks.fleet import FleetEvent, FleetFile
from benchmarks.oracle import Oracle
from benchmarks.trace import ID_TOKENS, TracedRequest
from extproc.config import Config, HoldSettings, RouteSettings
from extproc.fleet.fleet import Fleet
from extproc.lab.replay import Traced, simulation
from extproc.lab.replay.machine import Machine, MachinePoller
from extproc.lab.replay.routers import Arrival, RouterNode, Routers, VirtualClock
from extproc.lab.simulator.engine import Engine
from extproc.lab.simulator.steps import Sequence
from extproc.predict.estimator import FleetPrior
from extproc.replica_state import ReplicaState
from extproc.request.endpoint import Endpoint
from extproc.request.objective import NO_OBJECTIVE, Objective
from extproc.request.prefix import Prefix
from extproc.request.profile import RequestProfile

KNOWN = ("lengths", "coefficients")
STREAMED = 0.5  # share of the requests
MODEL = "model"
_MAX_MODEL_LEN = 131_072  # tokens; less if the KV cache is smaller
_INTERVAL = 0.2  # seconds between two scrapes, as configured by default
_PICKERS_INTERVAL = 0.05  # default of llm-d's picker and of AIBrix
_NO_HOLD = HoldSettings(longest_s=0.0)
_HOLD = HoldSettings(longest_s=3600.0)  # refuses no request: comparisons need all answers
_URGENT = Objective("urgent", priority=1)


def poll_interval(policy: str) -> float:
    """Seconds between two scrapes of a replica: the default of the router that has this policy,
    such as llm-d's picker."""
    return _PICKERS_INTERVAL if policy in ("queue_kv", "least_kv") else _INTERVAL


@dataclass
class FleetSimulation(simulation.Simulation):
    fleet_file: FleetFile
    policy: str  # name of the policy, or `oracle`
    poll_interval: float | None = None  # seconds between two scrapes; None: by the policy
    seed: int = 0
    know: frozenset[str] = frozenset()  # of `KNOWN`: knowledge that a production router lacks
    profile_error: float = 1.0  # step times of the router's first profile ÷ true step times
    routers: int = 1
    past_router: bool = False  # another sender sends a third of the requests to replicas in turn
    share_lag: float | None = None  # seconds until a digest arrives; None: digests are lost
    weight: float = 1.0  # of the cost to others, for the oracle
    hold: bool = False  # the router queues requests that no replica can take
    urgent: float = 0.0  # share of the requests that overtake others in the queue
    target: Objective = NO_OBJECTIVE  # of the requests that are not urgent
    target_share: float = 1.0  # share of these requests that have the target
    ignore_targets: bool = False  # hides the targets from the router
    tenants: PySequence[float] = ()  # shares of the requests; empty: a single tenant
    adapters: int = 0  # LoRA adapters; the k-th has 1/k as many requests as the model itself
    clock: VirtualClock = field(default_factory=VirtualClock)

    def __post_init__(self) -> None:
        self._random = Random(self.seed)
        self._groups = Random(f"{self.seed} groups")
        self._models = Random(f"{self.seed} adapters")
        self._names = tuple(f"adapter-{number}" for number in range(self.adapters))
        self._shares = [1.0, *(1.0 / number for number in range(1, self.adapters + 1))]
        machines = {name: self._machine(name) for name in self.fleet_file.members}
        poll_s = self.poll_interval or poll_interval(self.policy)
        self.nodes: list[RouterNode] = []
        watches: list[MachinePoller] = []
        routers: Routers
        if self.policy == "oracle":
            self.know = frozenset(KNOWN)
            routers = Oracle(machines, self.weight, self.clock, self.seed)
        else:
            self.nodes = [self._node(number, self.policy) for number in range(self.routers)]
            entries = self.nodes
            if self.past_router:
                other = self._node(self.routers, "round_robin")
                self.nodes, entries = [*entries, other], [*entries, *entries, other]
            prior, dealt = FleetPrior(), Random(self.seed)
            watches = [self._watch(machine, prior, poll_s) for machine in machines.values()]
            routers = Routers(self.nodes, self.share_lag, self.clock, dealt, entries)
        events = [(event.at, partial(self._apply, event)) for event in self.fleet_file.events]
        super().__init__(machines, watches, routers, self.clock, poll_s, self.hold, events)

    @property
    def fleet(self) -> Fleet:
        return self.nodes[0].fleet

    # -- requests ---------------------------------------------------------------------------

    def _arrival(self, number: int, traced: Traced) -> Arrival:
        assert isinstance(traced, TracedRequest)
        streamed = self._random.random() < STREAMED
        known = "lengths" in self.know
        (model,) = self._models.choices((MODEL, *self._names), self._shares)
        profile = RequestProfile(
            Endpoint.CHAT,
            model,
            traced.prompt_tokens,
            traced.prompt_tokens * 4,
            output_bound=traced.output_tokens if known else traced.max_tokens,
            stream=streamed,
            least_output=traced.output_tokens if known else 0,
            prefix=Prefix(np.array(traced.hash_ids, np.uint64), ID_TOKENS, traced.prompt_tokens),
            tenant=self._tenant(),
        )
        objective = self._objective()
        if not (self.ignore_targets and objective.has_target):
            profile.objective = objective
        adapter = model if model in self._names else ""
        sequences = partial(_sequences, traced, objective.priority, adapter)
        return Arrival(number, traced, profile, objective, sequences)

    def _objective(self) -> Objective:
        if self._groups.random() < self.urgent:
            return _URGENT
        if self.target.has_target and self._groups.random() < self.target_share:
            return self.target
        return NO_OBJECTIVE

    def _tenant(self) -> str:
        if not self.tenants:
            return ""
        (number,) = self._groups.choices(range(len(self.tenants)), self.tenants)
        return f"tenant {number + 1}"

    # -- replicas ---------------------------------------------------------------------------

    def _apply(self, event: FleetEvent) -> None:
        machine, now = self.machines[event.replica], self.clock()
        if event.slow is not None:
            machine.slow(event.slow)
        elif event.do == "down":
            machine.goes_down()
            for served in [*self._open.values()]:
                if served.replica == machine.name:
                    self._retry(served)
        elif event.do == "hang":
            machine.hangs(now)
        else:
            machine.comes_up(now)

    def _machine(self, name: str) -> Machine:
        group = self.fleet_file.group(name)
        engine = partial(
            Engine,
            speculation=group.speculation(Random(f"{self.seed} {name}")),
            by_priority=group.scheduling_policy == "priority",
            cold_steps=group.cold_steps,
            old_counters=group.old_counters,
            prefix_caching=group.prefix_caching,
        )
        profile = self.fleet_file.members[name]
        return Machine(name, profile, lambda profile: engine(profile, adapters=group.adapters()))

    def _node(self, number: int, policy: str) -> RouterNode:
        hold = _HOLD if self.hold else _NO_HOLD
        config = Config(route=RouteSettings(policy=policy), hold=hold)
        return RouterNode(config, Random(self.seed + 1000 * number), self.clock)

    def _watch(self, machine: Machine, prior: FleetPrior, poll_s: float) -> MachinePoller:
        profile = self.fleet_file.believed[machine.name]
        assumed = replace(profile, step=profile.step.slowed(self.profile_error))
        believed = None if "coefficients" in self.know else assumed
        capacity = machine.engine.capacity
        configured = ReplicaState(
            id=machine.name,
            name=machine.name,
            profile=profile.name,
            models=(MODEL, *self._names),
            adapters=self._names,
            takes_priority=True,
            by_priority=machine.engine.by_priority,
            max_model_len=min(_MAX_MODEL_LEN, capacity),
            kv_tokens=capacity,
        )
        return MachinePoller(machine, configured, believed, prior, poll_s, Random(self.seed))


def _sequences(
    traced: TracedRequest, priority: int, adapter: str, block_size: int
) -> list[Sequence]:
    lengths = traced.prompt_tokens, traced.output_tokens
    return [Sequence(0, *lengths, traced.block_hashes(block_size), adapter, priority=-priority)]
