"""How fast a server is, measured on requests that are sent for nothing else.

Lone prompts tell what a prompt token, attention and the way to the engine take; answers that are
generated together tell what a step, a sequence in it and its KV cache take.
"""

from collections.abc import Sequence
from itertools import islice

import numpy as np

from benchmarks.fit.recording import Request
from benchmarks.fit.replay import Timing
from benchmarks.trace import TracedRequest
from extproc.predict.inputs import Floats
from extproc.predict.step import StepModel

_LONE = (16, 64, 128, 256, 512, 1024, 2048) * 2
"""Tokens of the prompts."""
_TOGETHER = ((2, 32), (4, 32), (8, 32), (16, 32), (8, 512), (16, 256))
"""Sequences, and tokens of the prompt of each."""
_BURSTS = (*((1, prompt, 16) for prompt in _LONE), *((*burst, 64) for burst in _TOGETHER))
"""Sequences, and tokens of the prompt and of the answer of each."""


def bursts() -> list[list[TracedRequest]]:
    """What to send to an idle server; each burst at once, when the last one has ended."""
    return [[TracedRequest(0.0, prompt, output, None)] * batch for batch, prompt, output in _BURSTS]


def measured(requests: Sequence[Request]) -> Timing:
    """What those requests say of their server: least squares on relative errors.

    Args:
        requests: those of :func:`bursts`, in that order.
    """
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
    *step, frontend_s = _non_negative(terms / seconds[:, None], np.ones(len(rows))).tolist()
    return Timing(StepModel(*step), frontend_s)


def _non_negative(terms: Floats, wanted: Floats) -> Floats:
    """Least squares without the terms that would come out below zero."""
    solution: Floats = np.zeros(terms.shape[1])
    used = np.arange(terms.shape[1])
    while True:
        found = np.linalg.lstsq(terms[:, used], wanted, rcond=None)[0]
        if (found >= 0.0).all():
            solution[used] = found
            return solution
        used = used[found >= 0.0]
