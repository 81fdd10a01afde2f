"""Which models a replica serves, asked beside its scrapes so that a slow answer delays none."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from extproc.ground.outage_log import OutageLog
from extproc.poll.scrape import ScrapeError

log = logging.getLogger(__name__)

MODELS_EVERY_S = 10.0
"""A LoRA adapter may be loaded at any time, and ``/v1/models`` alone tells."""


class Models:
    """One replica's list of models, as its present process last told it.

    What ``ask`` answers are fields of a ``ReplicaState``; ``known`` is what another poller was told
    before. Where it is another than before, that is ``changed``.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[Mapping[str, Any]]],
        changed: Callable[[], None],
        who: str,
        known: Mapping[str, Any],
    ) -> None:
        self.fields = known
        """What is known; empty: nothing."""
        self._ask = ask
        self._changed = changed
        self._asking: asyncio.Task[None] | None = None
        self._asked_at: float | None = None
        self._trouble = OutageLog(log, "replica does not tell its models", replica=who)

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
        self._asking = self._asked_at = None
        self.fields = {}

    async def _refresh(self) -> None:
        try:
            fields = await self._ask()
        except ScrapeError as error:
            self._trouble.failed(error)
            return
        self._trouble.works()
        if fields != self.fields:
            self.fields = fields
            self._changed()
