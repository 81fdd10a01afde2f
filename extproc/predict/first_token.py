"""What passes before a first token that no step shows."""

from math import inf

import numpy as np

from extproc.predict.fit import descend

_REQUEST_S, _TOKEN_S = 0.01, 1e-5
"""Units, about what it is: seconds for each request, and for each token of its prompt."""
_KEEP = 0.99
"""What was seen before counts so much less with each first token: the last hundred count."""
_KNOWN = 0.02
"""Weight of there being nothing: a few first tokens say otherwise."""
_MOST_STEPS, _MOST_REQUEST_S, _MOST_TOKEN_S = 3.0, 0.05, 2e-5
"""More is not believed: it would be something else that they waited for."""


class FirstTokens:
    """Seconds that first tokens come later than by the engine's steps: ``x·step + y + z·prompt``.

    An engine that schedules ahead takes a request a step later; HTTP, the tokenizer and the way to
    the engine take their time for each request and for each token of its prompt, cached or not. No
    counter tells. All replicas of a fleet run the same program, so that each first token that a
    router sees tells of all. Non-negative least squares on relative errors; on an H100 with a 7B
    model it is 13 ms and 4 µs for each token of the prompt (docs/real-vllm.md).
    """

    def __init__(self) -> None:
        self._equations = np.zeros((3, 4))
        self._solution = [0.0, 0.0, 0.0]

    def observe(self, step: float, prompt: float, steps_s: float, actual: float) -> None:
        """A first token came.

        Args:
            step: seconds of a step on its replica, with what decoded there.
            prompt: tokens.
            steps_s: seconds until it, by the engine's steps.
            actual: seconds until it.
        """
        if not 0.0 <= steps_s < inf or actual <= 0.0:
            return
        late = max(actual - steps_s, -actual)
        row = np.array([step, _REQUEST_S, prompt * _TOKEN_S, late]) / actual
        self._equations = self._equations * _KEEP + np.outer(row[:3], row)
        descend(self._equations, [_KNOWN] * 3, [0.0] * 3, self._solution)

    @property
    def beside_steps(self) -> tuple[float, float, float]:
        """Seconds for each second of a step, for each request, and for each token of its prompt."""
        each_step, request, token = self._solution
        return (
            min(each_step, _MOST_STEPS),
            min(request * _REQUEST_S, _MOST_REQUEST_S),
            min(token * _TOKEN_S, _MOST_TOKEN_S),
        )
