"""Log lines for events that may happen hundreds of times a second."""

from collections.abc import Container
from logging import Logger

from extproc.ground.clock import Clock
from extproc.observe.tally import Counts

_EVERY_S = 60.0


class CounterLog:
    """Warns when a counter grows: at once, then every minute with the count since the last line."""

    def __init__(
        self,
        log: Logger,
        event: str,  # message of each line
        counts: Counts,  # a counter with one label, which names the reason
        clock: Clock,
        expected: Container[str],  # reasons that are not logged
    ) -> None:
        self._log = log
        self._event = event
        self._counts = counts
        self._clock = clock
        self._expected = expected
        self._logged: dict[str, float] = {}
        self._next = 0.0  # on the clock

    def look(self) -> None:
        """Compares the counter with the last line, and logs the difference."""
        now = self._clock()
        if now < self._next:
            return
        counted = {reason: count for (reason,), count in self._counts.items()}
        grown = {
            reason: int(count - self._logged.get(reason, 0))
            for reason, count in counted.items()
            if reason not in self._expected and count > self._logged.get(reason, 0)
        }
        if grown:
            self._log.warning(self._event, extra=grown)
            self._next = now + _EVERY_S
        self._logged = counted
