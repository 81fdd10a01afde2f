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


class FirstTokens:
    """Seconds that first tokens come later than by the engine's steps: ``a·step + b + c·prompt``.

    An engine that schedules ahead takes a request a step later; HTTP, the tokenizer and the way to
    the engine take their time for each request and for each token of its prompt, cached or not. No
    counter tells. All replicas of a fleet run the same program, so that each first token that a
    router sees tells of all. Non-negative least squares on relative errors; on an H100 with a 7B
    model it is 20 to 60 ms of 50 to 115 (docs/real-vllm.md).
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

    def of_request(self, step: float) -> float:
        """Seconds for any request on a replica whose steps take so long."""
        return self._solution[0] * step + self._solution[1] * _REQUEST_S

    @property
    def of_token(self) -> float:
        """Seconds for each token of its prompt."""
        return self._solution[2] * _TOKEN_S
