"""Plays recorded requests through the simulator's engine, under a virtual clock."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from math import inf

from benchmarks.fit.recording import Limits, Request
from extproc.predict.hardware import HardwareProfile
from extproc.predict.step import StepModel
from extproc.simulator.engine import Engine
from extproc.simulator.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Timing:
    """How fast a server is."""

    step: StepModel
    frontend_s: float = 0.0
    """Seconds from the client until the engine has the request: HTTP, checks, and the way between
    vLLM's processes. A step that begins meanwhile begins without it."""


def replay(requests: Items[Request], timing: Timing, limits: Limits) -> list[Request]:
    """The same requests, as the simulator would have served them."""
    engine = Engine(_profile(timing.step, limits), limits.block_size)
    sequences = [
        Sequence(number, request.prompt_tokens, request.output_tokens)
        for number, request in enumerate(requests)
    ]
    for request, sequence in zip(requests, sequences, strict=True):
        reaches_engine = request.at_s + timing.frontend_s
        engine.advance(reaches_engine)
        engine.add(sequence, reaches_engine)
    engine.advance(inf)
    return [_served(*pair) for pair in zip(requests, sequences, strict=True)]


def _served(request: Request, sequence: Sequence) -> Request:
    assert sequence.first_token is not None
    assert sequence.finished is not None
    return replace(
        request,
        ttft_s=sequence.first_token - request.at_s,
        completion_s=sequence.finished - request.at_s,
    )


def _profile(step: StepModel, limits: Limits) -> HardwareProfile:
    return HardwareProfile(
        name="recorded",
        step=step,
        kv_tokens=limits.kv_tokens,
        token_budget=limits.token_budget,
        max_num_seqs=limits.max_num_seqs,
        source="learned from a recording",
    )
