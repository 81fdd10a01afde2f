"""``random``: any replica."""

import random

import numpy as np

from extproc.route.policy import Choice, Situation


class RandomChoice:
    """Any replica, each as likely."""

    def choose(self, situation: Situation, random: random.Random) -> Choice:
        """One at random, and another for a retry."""
        scores = np.array([random.random() for _ in situation.view.ids])
        return Choice(int(scores.argmin()), scores)

    def why(self, situation: Situation, choice: Choice) -> str:
        """No reason."""
        return "at random"
