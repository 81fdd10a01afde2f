"""One replica, scraped until it is no longer wanted."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import asdict
from random import Random
from typing import Any

import aiohttp

from extproc.backoff import Backoff
from extproc.clock import Clock
from extproc.config import PollSettings
from extproc.fleet.state import ReplicaState
from extproc.poll.discovery import Target
from extproc.poll.metrics import PollMetrics
from extproc.poll.metrics_text import EngineFigures
from extproc.poll.scrape import ModelList, ScrapeError, read_models, scrape

log = logging.getLogger(__name__)

MODELS_EVERY_S = 10.0
"""A LoRA adapter may be loaded at any time, and ``/v1/models`` alone tells."""


class Watch:
    """Scrapes one replica and publishes its state after each scrape, good or bad."""

    def __init__(
        self,
        target: Target,
        session: aiohttp.ClientSession,
        publish: Callable[[ReplicaState], None],
        metrics: PollMetrics,
        settings: PollSettings,
        *,
        monotonic: Clock,
        wall: Clock,
        random: Random,
    ) -> None:
        self._target = target
        self._session = session
        self._publish_state = publish
        self._metrics = metrics
        self._settings = settings
        self._monotonic = monotonic
        self._wall = wall
        self._random = random
        self._backoff = Backoff(settings.interval_s, settings.backoff_max_s, random)
        self._state: ReplicaState | None = None
        self._models: ModelList | None = None
        self._models_due = monotonic()
        self._models_problem = ""

    @property
    def healthy(self) -> bool:
        """Whether the last scrape succeeded."""
        return self._state is not None and self._state.healthy

    async def run(self) -> None:
        """Scrape until cancelled."""
        while True:
            wait_s = await self._scrape_once()
            await asyncio.sleep(wait_s)

    async def _scrape_once(self) -> float:
        """Scrape, publish, and return the seconds to wait before the next scrape."""
        started = self._monotonic()
        try:
            figures = await scrape(self._session, self._target.id)
        except ScrapeError as error:
            self._failed(str(error))
            return self._backoff.next()
        seconds = self._monotonic() - started
        scraped_at = self._wall()
        await self._refresh_models(figures, started)
        self._succeeded(figures, scraped_at, seconds)
        spread = self._random.uniform(-self._settings.jitter, self._settings.jitter)
        spent = self._monotonic() - started
        return max(0.0, self._settings.interval_s * (1 + spread) - spent)

    def _succeeded(self, figures: EngineFigures, scraped_at: float, seconds: float) -> None:
        if not self.healthy:
            log.info("replica is healthy", extra={"replica": self._who})
        self._backoff.reset()
        self._metrics.good.inc()
        self._metrics.seconds.observe(seconds)
        values = asdict(figures)
        if self._models is not None:
            values["models"] = self._models.names or figures.models
            values["max_model_len"] = self._models.max_model_len
        self._publish(self._blank(**values, scraped_at=scraped_at, scrape_seconds=seconds))

    def _failed(self, problem: str) -> None:
        if self._state is None or self.healthy:
            extra = {"replica": self._who, "problem": problem}
            log.warning("replica is not healthy", extra=extra)
        self._metrics.failed.inc()
        self._models_due = self._monotonic()  # it may come back as another model
        last = self._state or self._blank()
        self._publish(last.model_copy(update={"healthy": False, "problem": problem}))

    def _publish(self, state: ReplicaState) -> None:
        self._state = state
        self._publish_state(state)

    async def _refresh_models(self, figures: EngineFigures, now: float) -> None:
        if self._restarted(figures):
            self._models = None
        elif now < self._models_due:
            return
        self._models_due = now + MODELS_EVERY_S
        try:
            self._models = await read_models(self._session, self._target.id)
            self._models_problem = ""
        except ScrapeError as error:
            if not self._models_problem:
                extra = {"replica": self._who, "problem": str(error)}
                log.warning("replica does not tell its models", extra=extra)
            self._models_problem = str(error)

    def _restarted(self, figures: EngineFigures) -> bool:
        last = self._state
        return last is not None and (
            figures.steps < last.steps
            or figures.prompt_tokens < last.prompt_tokens
            or figures.generated_tokens < last.generated_tokens
        )

    def _blank(self, **values: Any) -> ReplicaState:
        target = self._target
        return ReplicaState(id=target.id, name=target.name, profile=target.profile, **values)

    @property
    def _who(self) -> str:
        target = self._target
        return target.id if target.name == target.id else f"{target.name} ({target.id})"
