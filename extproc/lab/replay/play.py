"""A scene, played: by the router as it would decide, or with every request where it went."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import partial
from random import Random

import numpy as np
from msgspec import structs

from extproc.fleet.fleet import Fleet
from extproc.fleet.members import ModelNames
from extproc.lab.replay.machine import Machine
from extproc.lab.replay.polling import Watch
from extproc.lab.replay.routers import Node, Routers
from extproc.lab.replay.scene import Asked, Member, Scene, Turn
from extproc.lab.replay.served import Arrival, Traced, VirtualClock
from extproc.lab.replay.simulation import Simulation
from extproc.lab.simulator.engine import Engine
from extproc.lab.simulator.steps import Sequence
from extproc.predict.calibration import Typical
from extproc.predict.inputs import Floats
from extproc.predict.lengths import OutputLengths

_JITTER_S = 0.02
"""No traffic comes twice to the millisecond: so much later, drawn, requests come in a replay."""


@dataclass(frozen=True, slots=True)
class Played:
    """What came of each request of a scene, in its order; not a number where it was not served.

    Times are since it came, or where it is forced to go where and when it went since it was sent.
    """

    ttft_s: Floats
    completion_s: Floats
    replicas: Items[str]  # that served it; empty: none


def play(
    scene: Scene, seed: int, forced: bool = False, show: Callable[[float], None] = lambda _: None
) -> Played:
    """Plays a scene.

    Args:
        scene: what is played.
        seed: of the policy's draws, and of when requests come to the hundredth of a second.
        forced: each request goes where and when it went.
        show: told the share that is done, now and then.

    Raises:
        ValueError: the replicas cannot carry it.
    """
    simulation = _Replay(scene, seed, forced)
    ttft, completion = (np.full(len(scene.requests), np.nan) for _ in range(2))
    jitter = Random(f"{seed} jitter")
    later = (
        # from when it was sent, or from about when it came
        replace(one, at=one.at + (one.waited_s if forced else _JITTER_S * jitter.random()))
        for one in scene.requests
    )
    requests = sorted(later, key=lambda one: one.at)
    replicas = [""] * len(requests)
    for done, served in enumerate(simulation.run(requests)):
        asked = served.traced
        assert isinstance(asked, Asked)
        ttft[asked.index] = served.ttft
        completion[asked.index] = served.completion
        replicas[asked.index] = served.replica
        show(done / len(requests))
    return Played(ttft, completion, replicas)


class _Replay(Simulation):
    def __init__(self, scene: Scene, seed: int, forced: bool) -> None:
        clock, random, typical = VirtualClock(), Random(seed), Typical()
        self._forced = forced
        config = scene.config
        machines = {name: _machine(name, one) for name, one in scene.members.items()}
        interval_s = config.poll.interval_s
        watches = {
            name: Watch(machines[name], one.turns[0].state, None, typical, interval_s, random)
            for name, one in scene.members.items()
        }
        events = [
            (turn.at, partial(self._turn, machines[name], watches[name], turn))
            for name, one in scene.members.items()
            for turn in one.turns
        ]
        node = Node(
            Fleet(OutputLengths(), clock, clock, ModelNames(config.route.models)),
            config.route.policy,
            random,
            clock,
            config.hold,
            config.serve.chunks_per_s,
            config.route.session_cost_s,
        )
        hold = config.hold.longest_s > 0.0 and not forced
        routers = Routers([node], None, clock, random)
        every = watches.values()
        super().__init__(machines, every, routers, clock, interval_s, hold, events)

    def _arrival(self, number: int, traced: Traced) -> Arrival:
        assert isinstance(traced, Asked)
        profile, sequences = traced.profile, partial(_sequences, traced)
        among = frozenset({traced.replica}) if self._forced else None
        return Arrival(number, traced, profile, profile.objective, sequences, among)

    def _turn(self, machine: Machine, watch: Watch, turn: Turn) -> None:
        machine.runs_at(turn.step)
        always = {"healthy": True, "draining": False} if self._forced else {}
        watch.told = structs.replace(turn.state, **always)


def _sequences(asked: Asked, block_size: int) -> list[Sequence]:
    hashes = asked.hashes(block_size) if asked.profile.prompts == 1 else []
    prompt = asked.prompt_tokens // max(asked.profile.prompts, 1)
    return [
        Sequence(0, max(prompt, 1), asked.output_tokens, hashes, priority=-asked.profile.priority)
        for _ in range(asked.profile.parts)
    ]


def _machine(name: str, member: Member) -> Machine:
    state = member.state
    engine = partial(
        Engine,
        block_size=state.block_size,
        prefix_caching=state.prefix_caching,
        by_priority=state.by_priority,
    )
    return Machine(name, member.hardware, engine)
