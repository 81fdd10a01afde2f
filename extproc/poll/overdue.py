"""For how long a replica has owed an answer."""

import asyncio
from collections.abc import Callable


class Overdue:
    """Counts the seconds by which an answer is overdue, and tells them while none comes.

    It counts its own ticks: where this process was stopped itself, or had no CPU, the replica owes
    nothing for that time.
    """

    def __init__(self, every_s: float, tell: Callable[[float], None]) -> None:
        """``tell`` is called with the seconds, every so many."""
        self._every_s = every_s
        self._tell = tell
        self._ticks = 0
        self._timer: asyncio.TimerHandle | None = None

    def asked(self, usual_s: float) -> None:
        """An answer is due within the seconds that it usually takes; nothing new where one is
        owed already."""
        if self._timer is None:
            self._wait(usual_s + self._every_s)

    def settled(self) -> None:
        """It answered, or it is known why it cannot."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._ticks = None, 0

    def _wait(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._tick)

    def _tick(self) -> None:
        self._ticks += 1
        self._wait(self._every_s)
        self._tell(self._ticks * self._every_s)
