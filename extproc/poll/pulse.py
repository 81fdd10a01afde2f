"""Whether a replica whose figures are late says anything at all."""

import asyncio
from collections.abc import Awaitable, Callable

_STEP_S = 0.1
"""Seconds between two looks; and by which figures come later than usual before it is asked."""


class Pulse:
    """Asks a replica that owes its figures for less, and counts for how long it says nothing.

    It counts its own steps: for the time in which this process was itself stopped, or had no CPU,
    nothing is held against the replica.
    """

    def __init__(
        self, says_anything: Callable[[], Awaitable[bool]], tell: Callable[[float], None]
    ) -> None:
        """``tell`` is called with the seconds of silence, again and again, and with 0 at its
        end."""
        self._says_anything = says_anything
        self._tell = tell
        self._doubts: asyncio.TimerHandle | asyncio.Task[None] | None = None
        """What begins to doubt it, and then what listens; None: nothing is owed."""

    def asked(self, usual_s: float) -> None:
        """Its figures are due within the seconds that they usually take."""
        if self._doubts is None:
            self._doubt_after(usual_s + _STEP_S)

    def settled(self) -> None:
        """They came, or it is known why they cannot."""
        if self._doubts is not None:
            self._doubts.cancel()
        self._doubts = None

    def _doubt_after(self, seconds: float) -> None:
        self._doubts = asyncio.get_running_loop().call_later(seconds, self._doubt)

    def _doubt(self) -> None:
        self._doubts = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        silent_s, said = 0.0, False
        while not said:
            asking = asyncio.ensure_future(self._says_anything())
            try:
                while not (await asyncio.wait([asking], timeout=_STEP_S))[0]:
                    silent_s += _STEP_S
                    self._tell(silent_s)
                said = asking.result()
            finally:
                asking.cancel()
        if silent_s:
            self._tell(0.0)
        self._doubt_after(_STEP_S)
