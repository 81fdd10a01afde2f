"""Which models a replica serves, asked beside its scrapes so that a slow answer delays none."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from extproc.poll.scrape import ModelList, ScrapeError

log = logging.getLogger(__name__)

MODELS_EVERY_S = 10.0
"""A LoRA adapter may be loaded at any time, and ``/v1/models`` alone tells."""


class Models:
    """One replica's list of models, as its present process last told it.

    Args:
        ask: asks the replica.
        changed: called when the list is another than before.
        who: the replica's name in the log.
        listed: what another poller was told before.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[ModelList]],
        changed: Callable[[], None],
        who: str,
        listed: ModelList | None = None,
    ) -> None:
        self.listed = listed
        self._ask = ask
        self._changed = changed
        self._who = who
        self._asking: asyncio.Task[None] | None = None
        self._asked_at: float | None = None
        self._silent = False

    def refresh(self, now: float) -> None:
        """Have the replica asked, unless it is being asked or was within ``MODELS_EVERY_S``."""
        if self._asking is not None and not self._asking.done():
            return
        if self._asked_at is None or now - self._asked_at >= MODELS_EVERY_S:
            self._asked_at = now
            self._asking = asyncio.create_task(self._refresh())

    def forget(self) -> None:
        """The replica's process is gone, and with it what it told or was about to tell."""
        if self._asking is not None:
            self._asking.cancel()
        self._asking = self._asked_at = self.listed = None

    async def _refresh(self) -> None:
        try:
            listed = await self._ask()
        except ScrapeError as error:
            if not self._silent:
                extra = {"replica": self._who, "problem": str(error)}
                log.warning("replica does not tell its models", extra=extra)
            self._silent = True
            return
        self._silent = False
        if listed != self.listed:
            self.listed = listed
            self._changed()
