"""Log lines for warnings of the page that no other event reports."""

import logging
from collections.abc import Iterable

from extproc.ground.clock import Clock

logger = logging.getLogger(__name__)

_OVER_S = 60.0  # time without the warning after which it is over: a figure may vary around a limit


class WarningLog:
    """Logs a warning when it appears, and again when it is over."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: dict[str, float] = {}  # last time on the clock

    def look(self, warnings: Iterable[str]) -> None:
        """Compare the warnings that the page shows now with those before."""
        now = self._clock()
        for warning in warnings:
            if warning not in self._seen:
                logger.warning(f"warning of the page: {warning}")
            self._seen[warning] = now
        for warning in [text for text, at in self._seen.items() if now - at > _OVER_S]:
            del self._seen[warning]
            logger.info(f"warning of the page is over: {warning}")
