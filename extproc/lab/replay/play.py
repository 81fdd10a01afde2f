"""Plays a scene: the router decides, or every request goes where and when it went."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import partial
from random import Random

import numpy as np
from msgspec import structs

from extproc.lab.replay.machine import Machine, MachinePoller
from extproc.lab.replay.routers import Arrival, RouterNode, Routers, Traced, VirtualClock
from extproc.lab.replay.scene import ReplayReplica, ReplayRequest, Scene, Turn
from extproc.lab.replay.simulation import Simulation
from extproc.lab.simulator.engine import Engine
from extproc.lab.simulator.steps import Sequence
from extproc.predict.estimator import FleetPrior
from extproc.predict.inputs import Floats

_JITTER_S = 0.02  # drawn delays of the requests: no traffic comes twice to the millisecond


@dataclass(frozen=True, slots=True)
class Played:
    """Times since requests arrived or, if forced, were sent; not a number: not served."""

    ttft_s: Floats
    completion_s: Floats
    replicas: Items[str]  # that served it; empty: none


def play(
    scene: Scene, seed: int, forced: bool = False, show: Callable[[float], None] = lambda _: None
) -> Played:
    """Plays a scene, where and when requests went if it is ``forced``.

    ``seed`` is that of the policy and of small delays. ValueError if replicas cannot carry it.
    """
    simulation = _Replay(scene, seed, forced)
    ttft, completion = (np.full(len(scene.requests), np.nan) for _ in range(2))
    jitter = Random(f"{seed} jitter")
    later = (
        replace(one, at=one.at + (one.waited_s if forced else _JITTER_S * jitter.random()))
        for one in scene.requests
    )
    requests = sorted(later, key=lambda one: one.at)
    replicas = [""] * len(requests)
    for done, served in enumerate(simulation.run(requests)):
        assert isinstance(served.traced, ReplayRequest)
        at = served.traced.index
        ttft[at], completion[at], replicas[at] = served.ttft, served.completion, served.replica
        show(done / len(requests))
    return Played(ttft, completion, replicas)


class _Replay(Simulation):
    def __init__(self, scene: Scene, seed: int, forced: bool) -> None:
        clock, random, prior = VirtualClock(), Random(seed), FleetPrior()
        self._forced = forced
        config = scene.config
        machines = {name: _machine(name, one) for name, one in scene.members.items()}
        interval_s = config.poll.interval_s
        pollers = {
            name: MachinePoller(machines[name], one.turns[0].state, None, prior, interval_s, random)
            for name, one in scene.members.items()
        }
        events = [
            (turn.at, partial(self._turn, machines[name], pollers[name], turn))
            for name, one in scene.members.items()
            for turn in one.turns
        ]
        hold = config.hold.longest_s > 0.0 and not forced
        routers = Routers([RouterNode(config, random, clock)], None, clock, random)
        super().__init__(machines, pollers.values(), routers, clock, interval_s, hold, events)

    def _arrival(self, number: int, traced: Traced) -> Arrival:
        assert isinstance(traced, ReplayRequest)
        profile, among = traced.profile, frozenset({traced.replica}) if self._forced else None
        sequences = partial(_sequences, traced)
        return Arrival(number, traced, profile, profile.objective, sequences, among)

    def _turn(self, machine: Machine, poller: MachinePoller, turn: Turn) -> None:
        machine.runs_at(turn.step)
        always = {"healthy": True, "draining": False} if self._forced else {}
        poller.base = structs.replace(turn.state, **always)


def _sequences(asked: ReplayRequest, block_size: int) -> list[Sequence]:
    hashes = asked.hashes(block_size) if asked.profile.prompts == 1 else []
    prompt = asked.prompt_tokens // max(asked.profile.prompts, 1)
    return [
        Sequence(0, max(prompt, 1), asked.output_tokens, hashes, priority=-asked.profile.priority)
        for _ in range(asked.profile.parts)
    ]


def _machine(name: str, member: ReplayReplica) -> Machine:
    state = member.state
    engine = partial(
        Engine,
        block_size=state.block_size,
        prefix_caching=state.prefix_caching,
        by_priority=state.by_priority,
    )
    return Machine(name, member.hardware, engine)
