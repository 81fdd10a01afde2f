"""Scene of a replay: requests, replicas and configuration of a record, possibly changed."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from random import Random
from statistics import fmean, median
from typing import Any

import numpy as np
from msgspec import structs

from extproc.config import Config
from extproc.lab.replay import Traced
from extproc.lab.replay.recorded import Recorded
from extproc.observe.record import OF_PROFILE, ReplicaLine, RequestLine, keys_of
from extproc.predict.step import HardwareProfile, StepModel, profile_or_default
from extproc.replica_state import ReplicaState
from extproc.request.endpoint import Endpoint
from extproc.request.objective import Objective
from extproc.request.prefix import Keys, Prefix
from extproc.request.profile import RequestProfile

_JOINED_S = 5.0  # a replica whose first line comes later joined after the record's start


@dataclass(frozen=True, slots=True)
class ReplayRequest(Traced):
    """Request of a record, to be replayed."""

    index: int  # position among all requests of the record
    profile: RequestProfile
    keys: Keys  # of the prompt and, if a later prompt shows them, of the answer
    unit: float  # tokens per key, equal for all requests for a model
    replica: str  # replica that served the request; empty: the router refused it
    queued_s: float
    ttft_s: float  # since the dispatch; NaN if the router did not see the first token
    completion_s: float  # since the dispatch; NaN if the router did not see the end

    def hashes(self, block_size: int) -> list[int]:
        """Return the hashes of the KV blocks. Equal beginnings of prompts have equal hashes."""
        ends = np.arange(1, int(len(self.keys) * self.unit / block_size) + 1) * block_size
        units = np.minimum(np.ceil(ends / self.unit).astype(int), len(self.keys)) - 1
        hashes: list[int] = (self.keys[units] + ends.astype(np.uint64)).tolist()
        return hashes


@dataclass(frozen=True, slots=True)
class ReplicaPhase:
    """State of a replica from time ``at`` until its next phase."""

    at: float
    state: ReplicaState

    @property
    def step(self) -> StepModel:
        """Step times that the router had learned, or else those of the hardware profile."""
        return self.state.learned or profile_or_default(self.state.profile).step


@dataclass(frozen=True, slots=True)
class ReplayReplica:
    """Recorded replica: its hardware and limits, and its states over time."""

    hardware: HardwareProfile
    phases: tuple[ReplicaPhase, ...]  # the first begins at 0

    @property
    def state(self) -> ReplicaState:
        return self.phases[-1].state

    def with_state(self, **fields: object) -> "ReplayReplica":
        phases = (
            replace(phase, state=structs.replace(phase.state, **fields)) for phase in self.phases
        )
        return replace(self, phases=tuple(phases))

    def on(self, hardware: HardwareProfile, step: StepModel | None) -> "ReplayReplica":
        """Return the replica on other hardware. ``step``: step times there; None: those of the
        profile."""
        longest = self.state.max_model_len
        moved = self.with_state(
            profile=hardware.name,
            kv_tokens=hardware.kv_tokens,
            learned=step,
            max_model_len=None if longest is None else min(longest, hardware.kv_tokens),
        )
        return replace(moved, hardware=hardware)


@dataclass(frozen=True, slots=True)
class Scene:
    """Input of a replay: requests, replicas and configuration."""

    config: Config  # of the router
    replicas: Mapping[str, ReplayReplica]  # by `ip:port`
    requests: Sequence[ReplayRequest]
    lasts_s: float

    @property
    def names(self) -> dict[str, str]:
        """``ip:port`` of each replica by its name, sorted. A replica without a name is named by its
        address. If several replicas have a name, one that is healthy at the end gets the name."""
        found = dict[str, str]()
        for address, replica in sorted(
            self.replicas.items(), key=lambda item: not item[1].state.healthy
        ):
            name = replica.state.name
            found[address if not name or name in found else name] = address
        return dict(sorted(found.items()))

    @property
    def present(self) -> dict[str, str]:
        """The part of :attr:`names` that is healthy at the end; all if no replica is. A replica
        that has left the pool, such as a pod that was replaced, is not healthy then."""
        names = self.names
        healthy = {name: at for name, at in names.items() if self.replicas[at].state.healthy}
        return healthy or names


def scene_of(recorded: Recorded) -> Scene:
    """Return the scene of a record.

    Raises:
        ValueError: a part of the record cannot be replayed.
    """
    began = recorded.start.at
    # A simulated step gives a sequence one token, so output lengths are converted to steps.
    per_step = {
        name: fmean(line.tokens_per_step for line in lines if line.state is not None)
        for name, lines in recorded.replicas.items()
    }
    lines = sorted(recorded.requests + recorded.refused, key=attrgetter("at"))
    requests = list(_requests(lines, began, per_step))
    replicas = {name: _replica(lines, began) for name, lines in recorded.replicas.items()}
    lasts_s = max(line.at + line.seconds for line in recorded.requests) - began
    return Scene(Config.model_validate(recorded.start.config), replicas, requests, lasts_s)


def _requests(
    lines: Sequence[RequestLine], began: float, per_step: Mapping[str, float]
) -> Iterator[ReplayRequest]:
    keys = [keys_of(line.keys) for line in lines]
    units = {
        model: median(line.unit for line in lines if line.model == model and line.unit)
        for model in {line.model for line in lines if line.unit}
    }
    with_answers = list(keys)  # a conversation's next prompt has the keys of the answer
    last = dict[int, int]()
    for index, line in enumerate(lines):
        if (before := last.get(line.previous_key)) is not None:
            known = keys[index][: int(line.previous_tokens / max(line.unit, 1.0))]
            with_answers[before] = max(with_answers[before], known, key=len)
        if line.whole:
            last[line.whole] = index
    steps_of = _Lengths(lines, per_step)
    for index, line in enumerate(lines):
        end_seen = line.replica and (line.complete or (line.stream and not line.cut))
        yield ReplayRequest(
            index=index,
            at=line.at - began,
            prompt_tokens=max(line.prompt_tokens, 1),
            output_tokens=max(steps_of(line), 1) if line.sequences else 0,
            profile=_profile(line, keys[index]),
            keys=with_answers[index],
            unit=units.get(line.model, 1.0),
            replica=line.replica,
            queued_s=line.queued_s,
            ttft_s=np.nan if line.ttft_s is None else line.ttft_s,
            completion_s=line.seconds if end_seen else np.nan,
        )


class _Lengths:
    """Lengths of answers in decode steps. A refused request has no answer: its length is that
    of a random served request for the same model, preferably with the same endpoint and
    ``stream``."""

    def __init__(self, lines: Sequence[RequestLine], per_step: Mapping[str, float]) -> None:
        self._per_step = per_step
        self._random = Random(0)
        self._alike = defaultdict[tuple[object, ...], list[int]](list)
        for line in lines:
            if line.replica and line.sequences:
                for kind in self._kinds(line):
                    self._alike[kind].append(self(line))

    def __call__(self, line: RequestLine) -> int:
        if line.replica:
            return round(line.output_tokens / self._per_step[line.replica])
        alike = (self._alike[kind] for kind in self._kinds(line) if kind in self._alike)
        steps = self._random.choice(next(alike, [1]))
        return steps if line.output_bound is None else min(steps, line.output_bound)

    @staticmethod
    def _kinds(line: RequestLine) -> list[tuple[object, ...]]:
        return [(line.model, line.endpoint, line.stream), (line.model,)]


def _profile(line: RequestLine, keys: Keys) -> RequestProfile:
    targets = line.ttft_target_s, line.tpot_target_s, line.completion_target_s
    same: dict[str, Any] = {name: getattr(line, name) for name in OF_PROFILE}
    tokens = line.estimated_tokens
    return RequestProfile(
        **same | {"endpoint": Endpoint(line.endpoint)},
        prompt_tokens=tokens,
        prompt_bytes=0,
        tenant=line.tenant,
        objective=Objective(line.objective, line.priority, False, *targets),
        prefix=Prefix(keys, line.unit, tokens, line.whole, line.previous_key, line.previous_tokens),
    )


def _replica(lines: Sequence[ReplicaLine], began: float) -> ReplayReplica:
    limits = [line for line in lines if line.state is not None][-1]
    states = [line.state for line in lines if line.state is not None]
    last = states[-1]
    # Before the first measurement the router used a profile; the replay uses measured steps.
    measured = next((state.learned for state in states if state.measured), states[0].learned)
    states = [
        state if state.measured else structs.replace(state, learned=measured) for state in states
    ]
    if max(state.engines for state in states) > 1:
        raise ValueError(
            f"{last.name or last.id} is a data-parallel server: such a record cannot be replayed"
        )
    profile = profile_or_default(last.profile)
    hardware = replace(
        profile,
        step=states[0].learned or profile.step,
        kv_tokens=last.kv_tokens or profile.kv_tokens,
        token_budget=int(limits.token_budget),
        max_num_seqs=max(state.max_num_seqs for state in states) or int(limits.max_num_seqs),
    )
    state, known = states[0], iter(states)
    phases = []
    for line in lines:
        state = structs.replace(state, healthy=False) if line.state is None else next(known)
        phases.append(ReplicaPhase(max(line.at - began, 0.0), state))
    if phases[0].at > _JOINED_S:  # the replica joined after the start
        absent = structs.replace(phases[0].state, healthy=False)
        phases.insert(0, replace(phases[0], at=0.0, state=absent))
    return ReplayReplica(hardware, tuple(phases))
