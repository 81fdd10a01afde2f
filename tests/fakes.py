"""A clock that a test moves, builders of fleets, states and requests, and decisions."""

from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar

from extproc.fleet.fleet import Fleet
from extproc.fleet.members import ModelNames
from extproc.predict.lengths import OutputLengths
from extproc.predict.step import StepModel
from extproc.replica_state import ReplicaState
from extproc.request.endpoint import Endpoint
from extproc.request.profile import RequestProfile
from extproc.route.decision import Decision
from extproc.route.router import Router
from extproc.route.waiting import Place

MODEL = "llama"
A10, A100, H100 = "llama-8b-a10", "llama-3-8b-a100", "llama-8b-h100"
_POLLS = count()


@dataclass
class ManualClock:
    """Clock that moves only by :meth:`advance`."""

    time: float = 100.0

    def __call__(self) -> float:
        return self.time

    def advance(self, seconds: float) -> None:
        self.time += seconds


class CountedName(str):
    """Name that counts how often such names are compared."""

    compared: ClassVar[int] = 0

    def __eq__(self, other: object) -> bool:
        CountedName.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def fleet_of(clock: ManualClock, *profiles: str, names: ModelNames | None = None) -> Fleet:
    """Returns a fleet of idle replicas ``10.0.0.1:8000``, … with these hardware profiles."""
    fleet = Fleet(OutputLengths(), clock, wall=clock, names=names)
    for number, profile in enumerate(profiles, start=1):
        fleet.put(state(number, profile, clock))
    return fleet


def excluded(fleet: Fleet) -> dict[str, str]:
    """Returns the reason for each replica that is not a candidate."""
    return {each.replica: each.why for each in fleet.view(MODEL).excluded}


def replica(number: int) -> str:
    return f"10.0.0.{number}:8000"


def state(
    number: int,
    profile: str,
    clock: ManualClock,
    **figures: float | str | bool | tuple[object, ...] | dict[str, float],
) -> ReplicaState:
    fields: dict[str, Any] = {
        "id": replica(number),
        "name": f"r{number}",
        "profile": profile,
        "models": (MODEL,),
        "listed": bool(figures.get("models", True)),
        "max_model_len": 65_536,
        "measured": True,
        "scraped_at": clock() + next(_POLLS) * 1e-9,  # differs for each poll
    } | figures
    if isinstance(learned := fields.get("learned"), dict):
        fields["learned"] = StepModel(**learned)
    return ReplicaState(**fields)


def chat(prompt: int, bound: int | None = None, sequences: int = 1) -> RequestProfile:
    return RequestProfile(Endpoint.CHAT, MODEL, prompt, prompt * 4, bound, sequences)


def embedding(prompt: int) -> RequestProfile:
    return RequestProfile(Endpoint.EMBEDDINGS, MODEL, prompt, prompt * 4, 0, 0)


def decided(router: Router, profile: RequestProfile, place: Place | None = None) -> Decision:
    """Returns the router's decision; fails if no replica is a candidate."""
    decision = router.decide(profile, place=place)
    assert decision is not None
    return decision
