"""``round_robin``: each replica in turn."""

import random

import numpy as np

from extproc.route.policy import Choice, Situation

_MOST_REMEMBERED = 10_000


class RoundRobin:
    """The one whose last turn is longest ago, whatever it is doing.

    That is one after another, also where requests for several models take turns on overlapping
    sets of replicas.
    """

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}
        self._count = 0

    def choose(self, situation: Situation, random: random.Random) -> Choice:
        """The next in turn."""
        ids = situation.view.ids
        last_turns = np.array([self._turns.get(replica, 0) for replica in ids], dtype=np.float64)
        first = int(last_turns.argmin())
        if len(self._turns) > _MOST_REMEMBERED:
            self._turns.clear()  # replicas that came and went
        self._count += 1
        self._turns[ids[first]] = self._count
        return Choice(first, last_turns)

    def why(self, situation: Situation, choice: Choice) -> str:
        """It is its turn."""
        return "its turn"
