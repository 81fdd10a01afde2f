"""Compares a recording with its simulation.

No latency of a run is used to simulate it. Step times are measured on the requests of
:func:`bursts`: lone prompts tell the cost of a prompt token, of attention and of the front end,
answers generated together that of a step, a sequence in it and its KV cache. Or they are learned
from the counters of the run, as a router learns them.
"""

import gzip
import zlib
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import asdict, dataclass, replace
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from benchmarks.trace import TracedRequest
from extproc.lab.replay.figures import distribution
from extproc.lab.simulator.engine import Engine
from extproc.lab.simulator.steps import Sequence
from extproc.predict.estimator import Estimator
from extproc.predict.inputs import Floats
from extproc.predict.step import PROFILES, HardwareProfile, StepModel
from extproc.predict.windows import EngineCounts


@dataclass(frozen=True, slots=True)
class Limits:
    max_num_seqs: int
    token_budget: int  # `max_num_batched_tokens`
    block_size: int  # tokens in a KV block
    kv_tokens: int  # tokens the KV cache holds


@dataclass(frozen=True, slots=True)
class Request:
    at_s: float  # when it was sent, in seconds from the first of its run
    prompt_tokens: int
    output_tokens: int  # generated; the request asked for exactly so many
    ttft_s: float
    completion_s: float


@dataclass(frozen=True, slots=True)
class Run:
    name: str
    requests: list[Request]  # in the order they were sent
    polls: list[EngineCounts]  # times are in seconds from the first request


@dataclass(frozen=True, slots=True)
class Recording:
    about: dict[str, str]  # where it comes from: server, model, machine, date
    limits: Limits
    calibration: Run  # of :func:`benchmarks.fit.replay.bursts`
    runs: list[Run]


_FILE = TypeAdapter(Recording)


def write_recording(recording: Recording, path: Path) -> None:
    """Writes a recording as JSON, compressed if the name ends in ``.gz``."""
    text = _FILE.dump_json(recording)
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def read_recording(path: Path) -> Recording:
    """Recording in a file; raises OSError or a ValueError that names the file."""
    text = path.read_bytes()
    try:
        return _FILE.validate_json(gzip.decompress(text) if path.suffix == ".gz" else text)
    except (gzip.BadGzipFile, zlib.error, EOFError, ValidationError) as error:
        raise ValueError(f"{path} is no recording: {error}") from None


MEASURED, LEARNED = "measured", "learned"  # where step times come from
TIMES = ("ttft", "completion")

_LONE = (16, 64, 128, 256, 512, 1024, 2048) * 2  # tokens of the prompts
_TOGETHER = ((2, 32), (4, 32), (8, 32), (16, 32), (8, 512), (16, 256))  # sequences, prompts
# Sequences, and tokens of the prompt and of the answer of each.
_BURSTS = (*((1, prompt, 16) for prompt in _LONE), *((*burst, 64) for burst in _TOGETHER))
_START = PROFILES["llama-8b-a10"].step  # assumed, wrongly, before anything was measured


@dataclass(frozen=True, slots=True)
class Simulated:
    step: StepModel
    requests: list[Request]
    comparisons: dict[str, dict[str, Any]]
    """Figures by kind of time: ``real``, ``simulated``, their ``errors`` (0.1: 10% too long), and
    ``request_error``, the median of the requests' absolute errors."""


@dataclass(frozen=True, slots=True)
class Fitted:
    run: Run
    simulated: dict[str, Simulated]  # with step times from :data:`MEASURED` and :data:`LEARNED`

    def to_json(self) -> dict[str, Any]:
        requests = [asdict(request) for request in self.run.requests]
        simulated = {name: asdict(one) for name, one in self.simulated.items()}
        return {"name": self.run.name, "requests": requests, "simulated": simulated}


def fit(recorded: Recording) -> list[Fitted]:
    calibrated = measured(recorded.calibration.requests)
    return [
        Fitted(
            run,
            {
                MEASURED: _simulate(run, calibrated, recorded.limits),
                LEARNED: _simulate(run, learned(run.polls), recorded.limits),
            },
        )
        for run in recorded.runs
    ]


def bursts() -> list[list[TracedRequest]]:
    """Bursts for an idle server, each to be sent at once when the last one has ended."""
    return [[TracedRequest(0.0, prompt, output, None)] * batch for batch, prompt, output in _BURSTS]


def measured(requests: Items[Request]) -> StepModel:
    """Step times that fit the requests of :func:`bursts` best, by relative errors."""
    rest = iter(requests)
    rows: list[tuple[tuple[float, ...], float]] = []
    for batch, prompt, output in _BURSTS:
        burst = list(islice(rest, batch))
        if batch == 1:
            rows.append(((1.0, prompt, 1.0, 0.0, prompt * prompt / 2, 1.0), burst[0].ttft_s))
        # When the last one's prefill ends all of them decode, for as long as it does.
        last = max(burst, key=lambda request: request.ttft_s)
        later = output - 1
        kv_tokens = batch * (prompt + output / 2)
        decoding = (later, 0.0, later * batch, later * kv_tokens, 0.0, 0.0)
        rows.append((decoding, last.completion_s - last.ttft_s))
    terms = np.array([terms for terms, _ in rows])
    seconds = np.array([seconds for _, seconds in rows])
    return StepModel(*_non_negative(terms / seconds[:, None], np.ones(len(rows))).tolist())


def learned(polls: Iterable[EngineCounts]) -> StepModel:
    """Step times learned from polled counters, beginning with the profile of another card."""
    estimator = Estimator(_START)
    for poll in polls:
        estimator.poll(poll)
    return estimator.model


def replay(requests: Items[Request], step: StepModel, limits: Limits) -> list[Request]:
    """Simulates the requests; a step that begins before one has passed the front end omits it."""
    budget = limits.token_budget, limits.max_num_seqs
    profile = HardwareProfile("recorded", step, limits.kv_tokens, *budget)
    engine = Engine(profile, limits.block_size)
    sequences = [
        Sequence(number, request.prompt_tokens, request.output_tokens)
        for number, request in enumerate(requests)
    ]
    for request, sequence in zip(requests, sequences, strict=True):
        engine.advance(request.at_s + step.frontend)
        engine.add(sequence, request.at_s + step.frontend)
    engine.advance(inf)
    return [_served(*pair) for pair in zip(requests, sequences, strict=True)]


def _served(request: Request, sequence: Sequence) -> Request:
    assert sequence.first_token is not None
    assert sequence.finished is not None
    ttft_s, completion_s = sequence.first_token - request.at_s, sequence.finished - request.at_s
    return replace(request, ttft_s=ttft_s, completion_s=completion_s)


def _simulate(run: Run, step: StepModel, limits: Limits) -> Simulated:
    requests = replay(run.requests, step, limits)
    return Simulated(step, requests, {kind: _compare(run, requests, kind) for kind in TIMES})


def _compare(run: Run, simulated: Items[Request], kind: str) -> dict[str, Any]:
    real, ours = (
        np.array([getattr(one, f"{kind}_s") for one in each]) for each in (run.requests, simulated)
    )
    theirs, mine = distribution(real) or {}, distribution(ours) or {}
    return {
        "real": theirs,
        "simulated": mine,
        "errors": {name: mine[name] / theirs[name] - 1.0 for name in theirs},
        "request_error": float(np.median(np.abs(ours / real - 1.0))),
    }


def _non_negative(terms: Floats, wanted: Floats) -> Floats:
    """Least squares without the terms that would be negative."""
    solution: Floats = np.zeros(terms.shape[1])
    used = np.arange(terms.shape[1])
    while True:
        found = np.linalg.lstsq(terms[:, used], wanted, rcond=None)[0]
        if (found >= 0.0).all():
            solution[used] = found
            return solution
        used = used[found >= 0.0]
