"""Scene of a replay: requests, replicas and configuration, as recorded or changed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

import numpy as np
from msgspec import convert, structs

from extproc.config import Config
from extproc.lab.replay.recorded import Recorded
from extproc.lab.replay.speeds import step_times
from extproc.observe.record import ReplicaLine, RequestLine, keys_of
from extproc.predict.step import HardwareProfile, StepModel, profile_or_default
from extproc.replica_state import ReplicaState
from extproc.request.endpoint import Endpoint
from extproc.request.objective import Objective
from extproc.request.prefix import Keys, Prefix
from extproc.request.profile import RequestProfile

# Fields that a recorded request and its profile share.
_SAME = (
    *("output_bound", "sequences", "stream", "least_output"),
    *("tenant", "prompts", "longest_share", "session"),
)
_JOINED_S = 5.0  # after the start of a record every replica has a line


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """Request of the record."""

    index: int  # among all
    at: float  # seconds from the start
    prompt_tokens: int
    output_tokens: int  # of each of its sequences
    profile: RequestProfile
    held: Keys  # keys of its prompt and, if a later prompt shows them, of its answer
    unit: float  # tokens of each of these, the same in all requests for the model
    replica: str
    waited_s: float
    ttft_s: float  # since it was sent, as the next; not a number if it was not seen
    completion_s: float

    def hashes(self, block_size: int) -> list[int]:
        """Hashes of its blocks, equal for equal beginnings."""
        ends = np.arange(1, int(len(self.held) * self.unit / block_size) + 1) * block_size
        units = np.minimum(np.ceil(ends / self.unit).astype(int), len(self.held)) - 1
        hashes: list[int] = (self.held[units] + ends.astype(np.uint64)).tolist()
        return hashes


@dataclass(frozen=True, slots=True)
class Turn:
    """Speed and state of a replica from some time on."""

    at: float
    step: StepModel
    state: ReplicaState


@dataclass(frozen=True, slots=True)
class ReplayReplica:
    """Replica with its limits and its history."""

    hardware: HardwareProfile
    turns: tuple[Turn, ...]  # the first one from the start

    @property
    def state(self) -> ReplicaState:
        return self.turns[-1].state

    def with_state(self, **fields: object) -> "ReplayReplica":
        turns = (replace(one, state=structs.replace(one.state, **fields)) for one in self.turns)
        return replace(self, turns=tuple(turns))

    def on(self, hardware: HardwareProfile, step: StepModel | None) -> "ReplayReplica":
        """Replica on other hardware, with these step times or those of the profile."""
        capacity = hardware.kv_tokens
        told: dict[str, object] = {"profile": hardware.name, "kv_tokens": capacity, "learned": step}
        if (longest := self.state.max_model_len) is not None:
            told["max_model_len"] = min(longest, capacity)
        turns = self.with_state(**told).turns
        return ReplayReplica(
            hardware, tuple(replace(one, step=step or hardware.step) for one in turns)
        )


@dataclass(frozen=True, slots=True)
class Scene:
    """Input of a replay."""

    config: Config  # of the router
    members: Mapping[str, ReplayReplica]  # by `ip:port`
    requests: Sequence[ReplayRequest]
    lasts_s: float

    @property
    def names(self) -> dict[str, str]:
        """``ip:port`` of each replica by its name or, if another has that, by itself; sorted."""
        found = dict[str, str]()
        for replica, member in self.members.items():
            name = member.state.name
            found[replica if not name or name in found else name] = replica
        return dict(sorted(found.items()))


def scene_of(recorded: Recorded) -> Scene:
    """Scene of a record; raises ValueError if a part of it cannot be replayed."""
    began = recorded.start.at
    try:
        # The engine decodes a token a step: with accepted drafts there are fewer steps.
        per_step = {
            name: fmean(line.tokens_per_step for line in lines if line.state is not None)
            for name, lines in recorded.replicas.items()
        }
        requests = list(_asked(recorded.requests, began, per_step))
        learned = step_times(recorded.replicas, recorded.requests)
        members = {
            name: _member(lines, learned[name], began) for name, lines in recorded.replicas.items()
        }
    except (TypeError, KeyError) as error:
        raise ValueError(f"the record has a line that cannot be understood: {error}") from None
    lasts_s = max(one.at + one.seconds for one in recorded.requests) - began
    return Scene(Config.model_validate(recorded.start.config), members, requests, lasts_s)


# -- requests -------------------------------------------------------------------------------


def _asked(
    lines: Sequence[RequestLine], began: float, per_step: Mapping[str, float]
) -> Iterator[ReplayRequest]:
    keys = [keys_of(line.keys) for line in lines]
    units = {
        model: median(line.unit for line in lines if line.model == model and line.unit)
        for model in {line.model for line in lines if line.unit}
    }
    held = list(keys)
    last = dict[int, int]()
    for index, line in enumerate(lines):
        if (before := last.get(line.asked)) is not None:
            known = keys[index][: int(line.answered / max(line.unit, 1.0))]
            held[before] = max(held[before], known, key=len)
        if line.whole:
            last[line.whole] = index
    for index, line in enumerate(lines):
        seen = line.complete or (line.stream and not line.cut)
        steps = round(line.output_tokens / per_step[line.replica])
        tokens = max(line.prompt_tokens, 1), max(steps, 1) if line.sequences else 0
        unit, profile = units.get(line.model, 1.0), _profile(line, keys[index])
        ttft_s = np.nan if line.ttft_s is None else line.ttft_s
        times = line.waited_s, ttft_s, line.seconds if seen else np.nan
        at, replica = line.at - began, line.replica
        yield ReplayRequest(index, at, *tokens, profile, held[index], unit, replica, *times)


def _profile(line: RequestLine, keys: Keys) -> RequestProfile:
    targets = line.ttft_target_s, line.tpot_target_s, line.completion_target_s
    same: dict[str, Any] = {name: getattr(line, name) for name in _SAME}
    tokens = line.estimated_tokens
    return RequestProfile(
        *(Endpoint(line.endpoint), line.model, tokens, 0),
        objective=Objective(line.objective, line.priority, False, *targets),
        prefix=Prefix(keys, line.unit, tokens, line.whole, line.asked, line.answered),
        **same,
    )


# -- replicas -------------------------------------------------------------------------------


def _member(
    lines: Sequence[ReplicaLine], steps: Sequence[StepModel], began: float
) -> ReplayReplica:
    there = [line for line in lines if line.state is not None]
    states = [convert(line.state, ReplicaState) for line in there]
    last = states[-1]
    if max(state.engines for state in states) > 1:
        raise ValueError(
            f"{last.name or last.id} is a data-parallel server, and those are not replayed"
        )
    profile = profile_or_default(last.profile)
    hardware = replace(
        profile,
        step=steps[0],
        kv_tokens=last.kv_tokens or profile.kv_tokens,
        token_budget=int(there[-1].token_budget),
        max_num_seqs=max(one.max_num_seqs for one in states) or int(there[-1].max_num_seqs),
    )
    step, state = steps[0], states[0]
    known = zip(steps, states, strict=True)
    turns = []
    for line in lines:
        if line.state is None:
            state = structs.replace(state, healthy=False)
        else:
            step, state = next(known)
        turns.append(Turn(max(line.at - began, 0.0), step, state))
    if turns[0].at > _JOINED_S:  # until then it was not there
        gone = structs.replace(turns[0].state, healthy=False)
        turns.insert(0, replace(turns[0], at=0.0, state=gone))
    return ReplayReplica(hardware, tuple(turns))
