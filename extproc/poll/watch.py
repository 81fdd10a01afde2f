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
from extproc.poll.models import Models
from extproc.poll.scrape import ScrapeError, read_models, scrape
from extproc.predict.calibration import Calibration
from extproc.predict.hardware import hardware_profile
from extproc.predict.step import StepModel
from extproc.predict.typical import Typical
from extproc.predict.windows import EngineCounts

log = logging.getLogger(__name__)


class Watch:
    """Scrapes one replica and publishes its state after each scrape, good or bad."""

    def __init__(
        self,
        target: Target,
        session: aiohttp.ClientSession,
        publish: Callable[[ReplicaState], None],
        metrics: PollMetrics,
        settings: PollSettings,
        typical: Typical,
        known: StepModel | None = None,
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
        self._figures: EngineFigures | None = None
        self._typical = typical
        self._calibration = Calibration(hardware_profile(target.profile).step, known)
        self._models = Models(
            lambda: read_models(session, target.id), self._models_changed, self._who
        )

    @property
    def healthy(self) -> bool:
        """Whether the last scrape succeeded."""
        return self._state is not None and self._state.healthy

    async def run(self) -> None:
        """Scrape until cancelled."""
        try:
            while True:
                wait_s = await self._scrape_once()
                await asyncio.sleep(wait_s)
        finally:
            self._models.forget()
            self._typical.report(self._target.id, None)

    async def _scrape_once(self) -> float:
        """Scrape, learn, publish, and return the seconds to wait before the next scrape."""
        started = self._monotonic()
        try:
            figures = await scrape(self._session, self._target.id)
        except ScrapeError as error:
            self._failed(str(error))
            return self._backoff.next()
        seconds = self._monotonic() - started
        if self._figures is not None and figures.models != self._figures.models:
            self._calibration = Calibration(hardware_profile(self._target.profile).step)
        self._calibrate(figures, started + seconds / 2)
        self._succeeded(figures, self._wall(), seconds)
        self._models.refresh(started)
        spread = self._random.uniform(-self._settings.jitter, self._settings.jitter)
        spent = self._monotonic() - started
        return max(0.0, self._settings.interval_s * (1 + spread) - spent)

    def _succeeded(self, figures: EngineFigures, scraped_at: float, seconds: float) -> None:
        if self._restarted(figures):
            self._models.forget()
        if not self.healthy:
            log.info("replica is healthy", extra={"replica": self._who})
        self._backoff.reset()
        self._metrics.good.inc()
        self._metrics.seconds.observe(seconds)
        self._figures = figures
        learned = {
            "learned": self._calibration.model,
            "measured": self._calibration.ratio is not None,
        }
        values = asdict(figures) | self._served() | learned
        self._publish(self._blank(**values, scraped_at=scraped_at, scrape_seconds=seconds))

    def _calibrate(self, figures: EngineFigures, at: float) -> None:
        counts = EngineCounts(
            at=at,
            steps=figures.steps,
            computed_tokens=figures.prompt_tokens - figures.cached_tokens,
            generated_tokens=figures.generated_tokens,
            in_flight=figures.running + figures.waiting,
            kv_tokens=figures.kv_usage * figures.kv_tokens,
            finished=figures.finished,
        )
        self._calibration.poll(counts, self._typical.value)
        self._typical.report(self._target.id, self._calibration.ratio)

    def _failed(self, problem: str) -> None:
        if self._state is None or self.healthy:
            extra = {"replica": self._who, "problem": problem}
            log.warning("replica is not healthy", extra=extra)
        self._metrics.failed.inc()
        self._models.forget()  # it may come back as another model
        last = self._state or self._blank()
        self._publish(last.model_copy(update={"healthy": False, "problem": problem}))

    def _publish(self, state: ReplicaState) -> None:
        self._state = state
        self._publish_state(state)

    def _models_changed(self) -> None:
        if self._state is not None:
            self._publish(self._state.model_copy(update=self._served()))

    def _served(self) -> dict[str, Any]:
        """What the replica tells of its models, where it does."""
        listed = self._models.listed
        if listed is None or not listed.names:
            return {}
        return {"models": listed.names, "max_model_len": listed.max_model_len}

    def _restarted(self, figures: EngineFigures) -> bool:
        """Whether another process answers now."""
        last = self._figures
        return last is not None and (
            figures.models != last.models
            or figures.steps < last.steps
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
