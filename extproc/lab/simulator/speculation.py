"""Speculative decoding: how much of a draft is accepted."""

from random import Random

ACCEPTANCE = 0.7
"""Probability unless another is given: about what vLLM reports of EAGLE drafts on conversations."""


class Speculation:
    """In each step ``tokens`` are drafted for every sequence that decodes.

    A drafted token is accepted with the same probability whatever it is, as long as all before it
    were: a step gives a sequence one token and those accepted, ``tokens + 1`` at most.
    """

    def __init__(self, tokens: int, acceptance: float, random: Random) -> None:
        """Raises ValueError: there is nothing to draft, or ``acceptance`` is no probability."""
        if tokens < 1 or not 0 <= acceptance <= 1:
            raise ValueError(f"{tokens} draft tokens accepted with probability {acceptance}")
        self.tokens = tokens
        self._acceptance = acceptance
        self._random = random

    @property
    def tokens_per_step(self) -> float:
        """Expected tokens a sequence gets from a step: 1 + a + a² + … with acceptance a."""
        return sum(self._acceptance**drafted for drafted in range(self.tokens + 1))

    def accepted(self) -> int:
        """Tokens accepted of the next draft."""
        accepted = 0
        while accepted < self.tokens and self._random.random() < self._acceptance:
            accepted += 1
        return accepted
