"""How many replicas there is work for."""

from collections.abc import Iterable
from math import exp

from extproc.ground.clock import Clock
from extproc.predict.work import work
from extproc.route.router import Decision
from extproc.route.waiting import Waiting

_MEMORY_S = 60.0
"""In which what came loses two thirds of its weight, and what waits is to be done."""


class Demand:
    """The work of the requests of one pool that came of late, whatever became of them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._work = self._seconds = 0.0
        """Seconds of a replica that came, and seconds in which: older ones count less and less."""
        self._at = clock()

    def came(self, decision: Decision) -> None:
        """A request came, and was decided on for the first time."""
        one = decision
        self._fade()
        self._work += work(one.profile, one.prediction, one.situation.view, one.choice.first)

    def replicas(self, waiting: Iterable[Waiting]) -> float:
        """How many would be busy all the time with as much as that, and with what waits now."""
        self._fade()
        came = self._work / max(self._seconds, 1.0)
        return came + sum(one.cost for one in waiting) / _MEMORY_S

    def _fade(self) -> None:
        now = self._clock()
        faded = exp((self._at - now) / _MEMORY_S)
        self._work *= faded
        self._seconds = _MEMORY_S - faded * (_MEMORY_S - self._seconds)
        self._at = now
