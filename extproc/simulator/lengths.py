"""How many tokens a replica generates when nobody tells it."""

from hashlib import blake2b
from random import Random


class OutputLengths:
    """Lognormal output lengths, drawn from seed and prompt.

    The same prompt gets the same length on every replica of that seed, so that runs which route
    differently compare. Standard deviation 1 in log space makes the mean 1.65 times the median, as
    in the conversation trace Azure published in 2023 (median 129, mean 211 tokens).
    """

    def __init__(self, median: int, seed: int) -> None:
        self.median = median
        self.seed = seed

    def draw(self, prompt: bytes, choice: int) -> int:
        """Length of the ``choice``-th answer to an encoded prompt, at least 1."""
        digest = blake2b(prompt, digest_size=8).hexdigest()
        rng = Random(f"{self.seed}/{digest}/{choice}")
        return max(1, round(self.median * rng.lognormvariate(0.0, 1.0)))
