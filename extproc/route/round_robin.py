"""``round_robin``: each replica in turn."""

import random

import numpy as np

from extproc.route.policy import Choice, Situation


class RoundRobin:
    """One after another, whatever they are doing."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, situation: Situation, random: random.Random) -> Choice:
        """The next in turn."""
        count = len(situation.view)
        turn = self._turn % count
        self._turn += 1
        return Choice(turn, ((np.arange(count) - turn) % count).astype(np.float64), "its turn")
