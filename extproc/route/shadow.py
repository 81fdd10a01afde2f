"""Another policy beside the one that decides: what it would have chosen, without effect."""

from collections.abc import Iterator
from math import isfinite
from typing import NamedTuple

from extproc.predict.completion import Prediction

TIMES = ("ttft", "completion", "cost_to_others")
"""Predicted seconds in which two choices are compared."""


class Shadow(NamedTuple):
    """What another policy would have chosen, of the same candidates."""

    policy: str
    """Its name, as ``route.shadow_policy`` has it."""
    first: int
    """Index into the view."""

    def later(self, prediction: Prediction, chosen: int) -> Iterator[tuple[str, float]]:
        """Each time, and the seconds by which it would have been longer than with the replica that
        was chosen; below zero: shorter. Those that are beyond all figures are left out."""
        for name in TIMES:
            values = getattr(prediction, name)
            more = values.item(self.first) - values.item(chosen)
            if isfinite(more):
                yield name, more
