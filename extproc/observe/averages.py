"""Averages of figures that change every second; older values fade within half a minute."""

from math import exp

from extproc.ground.clock import Clock

_FADES_S = 30.0
_GAP_S = 2.0  # a longer gap counts as this one: the process stood still


class Average:
    """Mean of a figure over time, in which older values fade: after 30 s they count 1/e."""

    def __init__(self, clock: Clock) -> None:
        self.value = 0.0
        self._clock = clock
        self._at = clock()

    def add(self, value: float) -> None:
        """Add the figure's value since the last call."""
        now = self._clock()
        faded = exp(-min(now - self._at, _GAP_S) / _FADES_S)
        self.value = faded * self.value + (1.0 - faded) * value
        self._at = now


class Delays:
    """Delays of the router itself, and of its Redis."""

    def __init__(self, clock: Clock) -> None:
        self.loop_delay_s = Average(clock)  # how late the event loop runs what is due, at most 1 s
        self.redis_s = Average(clock)  # round trip of a digest
        self.redis_refusal = ""  # why Redis stores nothing; empty: it does
