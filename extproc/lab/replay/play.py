"""Play of a scene: the router decides, or each request goes to its recorded replica."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from random import Random

import numpy as np
from msgspec import structs

from extproc.lab.replay import Traced
from extproc.lab.replay.machine import Machine, MachinePoller
from extproc.lab.replay.routers import Arrival, RouterNode, Routers, VirtualClock
from extproc.lab.replay.scene import ReplayReplica, ReplayRequest, ReplicaPhase, Scene
from extproc.lab.replay.simulation import Simulation
from extproc.lab.simulator.engine import Engine
from extproc.lab.simulator.steps import Sequence
from extproc.predict.estimator import FleetPrior
from extproc.predict.inputs import Floats

_JITTER_S = 0.02  # longest random delay of a request: real arrivals vary, too


@dataclass(frozen=True, slots=True)
class Played:
    """Seconds since a request's arrival; if recorded or forced, since dispatch. NaN: unknown."""

    ttft_s: Floats
    completion_s: Floats
    replicas: Items[str]  # replica that served each request; empty: none


def play(
    scene: Scene, seed: int, forced: bool = False, show: Callable[[float], None] = lambda _: None
) -> Played:
    """Play a scene; ``forced``: dispatch served requests at their recorded times and replicas.

    ``seed`` seeds the policy and the jitter; ``show`` is called with the share of ended requests,
    and with 1 at the end.

    Raises:
        ValueError: the replicas are overloaded.
    """
    simulation = _Replay(scene, seed, forced)
    ttft, completion = (np.full(len(scene.requests), np.nan) for _ in range(2))
    jitter = Random(f"{seed} jitter")
    if forced:
        dispatched = (request for request in scene.requests if request.replica)
        delayed = [replace(each, at=each.at + each.queued_s) for each in dispatched]
    else:
        delayed = [
            replace(each, at=each.at + _JITTER_S * jitter.random()) for each in scene.requests
        ]
    requests = sorted(delayed, key=attrgetter("at"))
    replicas = [""] * len(scene.requests)
    for done, served in enumerate(simulation.run(requests)):
        assert isinstance(served.traced, ReplayRequest)
        index = served.traced.index
        ttft[index], completion[index] = served.ttft, served.completion
        replicas[index] = served.replica
        show(done / len(requests))
    show(1.0)
    return Played(ttft, completion, replicas)


class _Replay(Simulation):
    def __init__(self, scene: Scene, seed: int, forced: bool) -> None:
        clock, random, prior = VirtualClock(), Random(seed), FleetPrior()
        self._forced = forced
        config = scene.config
        machines = {name: _machine(name, replica) for name, replica in scene.replicas.items()}
        interval_s = config.poll.interval_s
        pollers = {
            name: MachinePoller(
                machines[name], replica.phases[0].state, None, prior, interval_s, random
            )
            for name, replica in scene.replicas.items()
        }
        events = [
            (phase.at, partial(self._change, machines[name], pollers[name], phase))
            for name, replica in scene.replicas.items()
            for phase in replica.phases
        ]
        queueing = config.hold.longest_s > 0.0 and not forced
        routers = Routers([RouterNode(config, random, clock)], None, clock, random)
        super().__init__(machines, pollers.values(), routers, clock, interval_s, queueing, events)

    def _arrival(self, number: int, traced: Traced) -> Arrival:
        assert isinstance(traced, ReplayRequest)
        profile, among = traced.profile, frozenset({traced.replica}) if self._forced else None
        sequences = partial(_sequences, traced)
        return Arrival(number, traced, profile, profile.objective, sequences, among)

    def _change(self, machine: Machine, poller: MachinePoller, phase: ReplicaPhase) -> None:
        machine.runs_at(phase.step)
        usable = {"healthy": True, "ready": True, "asleep": False} if self._forced else {}
        poller.base = structs.replace(phase.state, **usable)


def _sequences(request: ReplayRequest, block_size: int) -> list[Sequence]:
    profile, output = request.profile, request.output_tokens
    hashes = request.hashes(block_size) if profile.prompts == 1 else []
    prompt = max(request.prompt_tokens // max(profile.prompts, 1), 1)
    return [
        Sequence(0, prompt, output, hashes, priority=-profile.priority)
        for _ in range(profile.parts)
    ]


def _machine(name: str, replica: ReplayReplica) -> Machine:
    state = replica.state
    engine = partial(
        Engine,
        block_size=state.block_size,
        prefix_caching=state.prefix_caching,
        by_priority=state.by_priority,
    )
    return Machine(name, replica.hardware, engine)
