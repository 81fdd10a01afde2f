"""Oracle: decides by the formula of production, from facts that production cannot know."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from math import inf
from random import Random

import numpy as np
from msgspec import structs

from extproc.fleet.prefix_index import PrefixHits
from extproc.lab.replay.machine import Machine
from extproc.lab.replay.routers import (
    Arrival,
    RouterEvent,
    RouterNode,
    Routers,
    Served,
    VirtualClock,
)
from extproc.lab.simulator.steps import Sequence
from extproc.predict.completion import Prediction, predict
from extproc.predict.correction import Corrections
from extproc.predict.inputs import Candidates, FleetView, Floats, Sequences, most
from extproc.request.profile import RequestProfile
from extproc.route.decision import Choice, Decision, Situation
from extproc.route.policies import lowest

WEIGHTS = (0.5, 1.0, 2.0)
"""Weights of the cost to others that the oracle tries. Weights of 0 and ¼ and the policy's own rule
were compared, too: 1 had the lowest mean completion, to within 0.2%, in three cells of four, and 2
in the fourth."""


class Oracle(Routers):
    """Router that sees the current state of every engine and the length of every answer.

    Chooses the replica with the lowest ``completion + weight·cost to others + avoidable
    prefill``. A further term for evicted blocks gained nothing in ``agents`` and
    ``mooncake-synthetic`` on eight A100, even with all later prompts known.
    """

    def __init__(
        self, machines: Mapping[str, Machine], weight: float, clock: VirtualClock, seed: int
    ) -> None:
        super().__init__([], None, clock, Random(seed))
        self._machines = machines
        self._weight = weight
        self._corrections = Corrections(clock())
        self._rows = {name: row for row, name in enumerate(machines)}
        self._corrections.clear(len(machines) - 1)
        self._stretch = np.ones(len(machines))

    def decide(self, arrival: Arrival) -> Decision | None:
        """Decides on a request, whose output bound must be the length of its answer."""
        profile = arrival.profile
        output = profile.output_bound or 0
        tokens = profile.prompt_tokens + output - 1
        machines = [
            machine
            for machine in self._machines.values()
            if machine.works and machine.engine.capacity >= tokens
        ]
        if not machines:
            return None
        block_sizes = {machine.engine.pool.block_size for machine in machines}
        prefixes = {size: arrival.sequences(size)[0].hashes for size in block_sizes}
        exact = [
            _Exact.of(machine, profile, prefixes[machine.engine.pool.block_size])
            for machine in machines
        ]
        if self._corrections.due(self._clock()):
            self._stretch = self._corrections.ratios(self._clock())
        stretch = self._stretch[[self._rows[machine.name] for machine in machines]]
        view = _view(machines, exact, stretch)
        cached = _floats(state.cached for state in exact)
        held = PrefixHits(cached, cached, np.zeros(len(exact), np.bool_))
        sequences = _sequences(exact)
        prediction = predict(profile, float(output), view, sequences, held.cached)
        prediction = self._with_step_ends(prediction, machines)
        situation = Situation(profile, view, held, prediction, output, sequences, self._random, {})
        cost_to_others = self._weight * prediction.cost_to_others
        scores = prediction.completion + cost_to_others + prediction.avoidable
        first = lowest(scores, self._random)
        reason = f"finishes in {prediction.completion[first]:.2f} s"
        choice = Choice("oracle", first, scores, lambda _: reason)
        second = None if choice.second is None else view.ids[choice.second]
        return Decision(situation, choice, second)

    def notify(self, served: Served, event: RouterEvent) -> None:
        """Learns from an answer by how much requests that came later delayed its decoding. Ignores
        other events: the oracle sees the engines."""
        decision = served.decision
        answered = event is RouterNode.ended and served.finished is not None
        if answered and served.replica == decision.replica:
            pace = decision.forecast().decode_time_per_token
            predicted = pace * (served.sequence.output_tokens - 1)
            actual = max(served.completion - decision.predicted_ttft, 0.0)
            self._corrections.observe(self._rows[served.replica], predicted, actual, self._clock())

    def _with_step_ends(self, prediction: Prediction, machines: Items[Machine]) -> Prediction:
        """Adds the time that each engine's current step still takes to the predicted times."""
        ends = [machine.step_ends_at for machine in machines]
        rest = np.array([0.0 if end == inf else end - self._clock() for end in ends])
        return structs.replace(
            prediction,
            admission=prediction.admission + rest,
            ttft=prediction.ttft + rest,
            completion=prediction.completion + rest,
        )


@dataclass(frozen=True, slots=True)
class _Exact:
    context: Floats  # KV tokens by sequence; prompts count even if not computed yet
    remaining: Floats  # tokens still to be generated, by sequence
    backlog: float  # prompt tokens to be computed after the step in progress
    cached: float  # tokens of the new prompt in the prefix cache

    @classmethod
    def of(cls, machine: Machine, profile: RequestProfile, prefix: Items[int]) -> "_Exact":
        engine = machine.engine
        sequences = [*engine.decoding, *engine.queued]
        generated = np.array([sequence.generated for sequence in sequences], float)
        prompts = np.array([sequence.prompt_tokens for sequence in sequences], float)
        outputs = np.array([sequence.output_tokens for sequence in sequences], float)
        pool = engine.pool
        hits = pool.cached(prefix, (profile.prompt_tokens - 1) // pool.block_size)
        return cls(
            prompts + generated,
            outputs - generated,
            float(_backlog(machine, engine.queued)),
            float(hits * pool.block_size),
        )


def _backlog(machine: Machine, queued: Iterable[Sequence]) -> int:
    step, pool = machine.engine.step, machine.engine.pool
    in_step = sum(chunk for _, chunk in step.chunks) if step else 0
    tokens = 0
    for sequence in queued:
        hits = 0
        if sequence.hashes and not sequence.computed:
            hits = pool.cached(sequence.hashes, (sequence.context - 1) // pool.block_size)
        tokens += sequence.context - max(sequence.computed, hits * pool.block_size)
    return max(tokens - in_step, 0)


def _view(machines: Items[Machine], exact: Items[_Exact], stretch: Floats) -> FleetView:
    engines = [machine.engine for machine in machines]
    models = [engine.step_model for engine in engines]
    names = [machine.name for machine in machines]

    def of_engines(name: str) -> Floats:
        return _floats(getattr(engine, name) for engine in engines)

    def of_steps(name: str) -> Floats:
        return _floats(getattr(model, name) for model in models)

    running, waiting, kv_usage, capacity = map(
        of_engines, ("running", "waiting", "kv_usage", "capacity")
    )
    speculations = [engine.speculation for engine in engines]
    backlog = _floats(state.backlog for state in exact)
    drafts = _floats(drafting.tokens if drafting else 0 for drafting in speculations)
    kv_used = kv_usage * capacity
    c0, c_prefill = of_steps("c0"), of_steps("c_prefill")
    # Verifying a draft costs as much as the prefill of the same number of tokens.
    c_batch = of_steps("c_batch") + drafts * c_prefill
    c_kv = of_steps("c_kv") + drafts * of_steps("c_att")
    columns = {
        "requests": running + waiting,
        "waiting": waiting,
        "polled_waiting": waiting,
        "polled_kv_usage": kv_usage,
        "backlog": backlog,
        "taken": kv_used + backlog,
        "batch": running,
        "kv_used": kv_used,
        "kv_capacity": capacity,
        "token_budget": of_engines("token_budget"),
        "max_num_seqs": of_engines("max_num_seqs"),
        "longest_prompt": capacity,
        "c0": c0,
        "c_prefill": c_prefill,
        "c_batch": c_batch,
        "c_kv": c_kv,
        "decode_step": c0 + c_batch * running + c_kv * kv_used,
        "tokens_per_step": _floats(
            drafting.tokens_per_step if drafting else 1 for drafting in speculations
        ),
        "stretch": stretch,
        "by_priority": np.zeros(len(machines)),
    }
    profiles = [machine.profile.name for machine in machines]
    candidates = Candidates(np.arange(len(machines)), names, names, profiles)
    view = FleetView(candidates, columns.items())
    view.outside_steps = 0.0, most(of_steps("frontend")), 0.0
    return view


def _sequences(exact: Items[_Exact]) -> Sequences:
    counts = [len(state.context) for state in exact]
    return Sequences(
        replica=np.repeat(np.arange(len(exact)), counts),
        weight=np.ones(sum(counts)),
        context=np.concatenate([state.context for state in exact]),
        remaining=np.concatenate([state.remaining for state in exact]),
        priority=np.zeros(sum(counts)),
    )


def _floats(values: Iterable[float]) -> Floats:
    return np.fromiter(values, dtype=np.float64)
