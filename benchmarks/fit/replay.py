"""Compares the recorded times of a real server with a simulation of the same requests.

The simulation of a run does not use the run's latencies. The step times are either learned from the
counters of the run, as a router learns them, or measured on the requests of :func:`bursts`. Among
these, solo prompts show the cost of a prompt token, of attention and of the front end. Answers
generated together show the cost of a step, of a sequence in a step, and of the KV cache.
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
class EngineLimits:
    max_num_seqs: int
    token_budget: int  # `max_num_batched_tokens`
    block_size: int  # tokens in a KV block
    kv_tokens: int  # capacity of the KV cache


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    at_s: float  # time of sending, in seconds from the start of the run
    prompt_tokens: int
    output_tokens: int  # of the answer; the request asked for exactly this number
    ttft_s: float
    completion_s: float


@dataclass(frozen=True, slots=True)
class RecordedRun:
    name: str
    requests: list[RecordedRequest]  # in the order of sending
    polls: list[EngineCounts]  # times are in seconds from the start of the run


@dataclass(frozen=True, slots=True)
class Recording:
    about: dict[str, str]  # origin, such as server, machine and date
    limits: EngineLimits
    calibration: RecordedRun  # requests of :func:`bursts`
    runs: list[RecordedRun]


_FILE = TypeAdapter(Recording)


def write_recording(recording: Recording, path: Path) -> None:
    """Writes a recording as JSON, compressed if the name ends in ``.gz``."""
    text = _FILE.dump_json(recording)
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def read_recording(path: Path) -> Recording:
    """Reads a recording from a file; raises OSError, or ValueError that names the file."""
    text = path.read_bytes()
    try:
        return _FILE.validate_json(gzip.decompress(text) if path.suffix == ".gz" else text)
    except (gzip.BadGzipFile, zlib.error, EOFError, ValidationError) as error:
        raise ValueError(f"{path} is no recording: {error}") from None


MEASURED, LEARNED = "measured", "learned"  # origins of step times
TIMES = ("ttft", "completion")

_SOLO = (16, 64, 128, 256, 512, 1024, 2048) * 2  # tokens of the prompts
_TOGETHER = ((2, 32), (4, 32), (8, 32), (16, 32), (8, 512), (16, 256))  # sequences, prompts
# Sequences, prompt tokens and answer tokens of each.
_BURSTS = (*((1, prompt, 16) for prompt in _SOLO), *((*burst, 64) for burst in _TOGETHER))
_START = PROFILES["llama-8b-a10"].step  # before the first poll: step times of another GPU


@dataclass(frozen=True, slots=True)
class Simulated:
    step: StepModel
    requests: list[RecordedRequest]
    comparisons: dict[str, dict[str, Any]]
    """For each of :data:`TIMES`: figures ``real`` and ``simulated``, relative ``errors`` of the
    figures (0.1: 10% too long), and ``request_error``, the median error of single requests."""


@dataclass(frozen=True, slots=True)
class Fitted:
    run: RecordedRun
    simulated: dict[str, Simulated]  # by origin of the step times

    def to_json(self) -> dict[str, Any]:
        requests = [asdict(request) for request in self.run.requests]
        simulated = {name: asdict(simulation) for name, simulation in self.simulated.items()}
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
    """Bursts of requests for an idle server. All requests of a burst are sent at once, after the
    previous burst has ended."""
    return [[TracedRequest(0.0, prompt, output, None)] * batch for batch, prompt, output in _BURSTS]


def measured(requests: Items[RecordedRequest]) -> StepModel:
    """Step times with the least relative errors on the requests of :func:`bursts`."""
    rest = iter(requests)
    rows: list[tuple[tuple[float, ...], float]] = []
    for batch, prompt, output in _BURSTS:
        burst = list(islice(rest, batch))
        if batch == 1:
            rows.append(((1.0, prompt, 1.0, 0.0, prompt * prompt / 2, 1.0), burst[0].ttft_s))
        # Once every sequence has its first token, all decode together.
        last = max(burst, key=lambda request: request.ttft_s)
        later = output - 1
        kv_tokens = batch * (prompt + output / 2)
        decoding = (later, 0.0, later * batch, later * kv_tokens, 0.0, 0.0)
        rows.append((decoding, last.completion_s - last.ttft_s))
    terms = np.array([terms for terms, _ in rows])
    seconds = np.array([seconds for _, seconds in rows])
    return StepModel(*_non_negative(terms / seconds[:, None], np.ones(len(rows))).tolist())


def learned(polls: Iterable[EngineCounts]) -> StepModel:
    """Step times learned from polled counters, starting from the profile of another GPU."""
    estimator = Estimator(_START)
    for poll in polls:
        estimator.poll(poll)
    return estimator.model


def replay(
    requests: Items[RecordedRequest], step: StepModel, limits: EngineLimits
) -> list[RecordedRequest]:
    """Simulates the requests; each reaches the engine ``step.frontend`` seconds after sending."""
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


def _served(request: RecordedRequest, sequence: Sequence) -> RecordedRequest:
    assert sequence.first_token is not None
    assert sequence.finished is not None
    ttft_s, completion_s = sequence.first_token - request.at_s, sequence.finished - request.at_s
    return replace(request, ttft_s=ttft_s, completion_s=completion_s)


def _simulate(run: RecordedRun, step: StepModel, limits: EngineLimits) -> Simulated:
    requests = replay(run.requests, step, limits)
    return Simulated(step, requests, {kind: _compare(run, requests, kind) for kind in TIMES})


def _compare(run: RecordedRun, simulated: Items[RecordedRequest], kind: str) -> dict[str, Any]:
    real_s, simulated_s = (
        np.array([getattr(request, f"{kind}_s") for request in requests])
        for requests in (run.requests, simulated)
    )
    real, ours = distribution(real_s) or {}, distribution(simulated_s) or {}
    return {
        "real": real,
        "simulated": ours,
        "errors": {name: ours[name] / real[name] - 1.0 for name in real},
        "request_error": float(np.median(np.abs(simulated_s / real_s - 1.0))),
    }


def _non_negative(terms: Floats, wanted: Floats) -> Floats:
    """Least squares; drops terms with a negative coefficient and solves again."""
    solution: Floats = np.zeros(terms.shape[1])
    used = np.arange(terms.shape[1])
    while True:
        found = np.linalg.lstsq(terms[:, used], wanted, rcond=None)[0]
        if (found >= 0.0).all():
            solution[used] = found
            return solution
        used = used[found >= 0.0]


def described(step: StepModel) -> str:
    """Step times in words, with units."""
    return (
        f"{step.c0 * 1e3:.1f} ms a step, {step.c_prefill * 1e6:.0f} µs a prompt token, "
        f"{step.c_att * 1e6:.2f} µs for each token before it, "
        f"{step.c_batch * 1e6:.0f} µs a sequence, {step.c_kv * 1e6:.2f} µs a KV token; "
        f"{step.frontend * 1e3:.1f} ms before the engine"
    )
