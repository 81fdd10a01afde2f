"""One replica, scraped until it is no longer wanted."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import inf
from random import Random
from typing import Any

import aiohttp

from extproc.config import PollSettings
from extproc.ground.clock import Clock
from extproc.ground.runtime import Backoff
from extproc.poll.discovery import Target
from extproc.poll.kv_stream import KvStream
from extproc.poll.metrics_text import EngineFigures
from extproc.poll.model_list import Models
from extproc.poll.precedence import goes_by_priority
from extproc.poll.pulse import Pulse
from extproc.poll.scrape import (
    ScrapeError,
    SilentError,
    UnreachableError,
    read_models,
    says_anything,
    scrape,
)
from extproc.poll.scrape_metrics import PollMetrics
from extproc.predict.calibration import Calibration
from extproc.predict.hardware import hardware_profile
from extproc.predict.step import StepModel
from extproc.predict.typical import Typical
from extproc.replica_state import ReplicaState

log = logging.getLogger(__name__)

HEALTH_EVERY_S = 2.0
"""Seconds between two looks at a healthy replica's ``/health``."""
_LONGEST_PROBLEM = 200
_TRIES = 3
"""To find out whether a process goes by priority: it may not show on a machine short of CPU."""


class PolledReplica:
    """Scrapes one replica and publishes its state after each scrape, good or bad."""

    def __init__(
        self,
        target: Target,
        session: aiohttp.ClientSession,
        publish: Callable[[ReplicaState], None],
        metrics: PollMetrics,
        settings: PollSettings,
        typical: Typical,
        known: ReplicaState | None = None,
        kv_stream: KvStream | None = None,
        *,
        finds_precedence: bool = False,
        monotonic: Clock,
        wall: Clock,
        random: Random,
    ) -> None:
        self.target = target
        """Whether it is to be used may change meanwhile; what else does takes another object."""
        self._session = session
        self._publish_state = publish
        self._metrics = metrics
        self._settings = settings
        self._monotonic = monotonic
        self._wall = wall
        self._random = random
        self._backoff = Backoff(settings.interval_s, settings.backoff_max_s, random)
        self._pulse = Pulse(partial(says_anything, session, target.id), self._tell_silence)
        self._kv_stream = kv_stream
        self._identity = {
            "id": target.id,
            "name": target.name,
            "profile": target.profile,
            "life_s": settings.ttl_s,
        }
        self.state = None if known is None else known.model_copy(update=self._identity)
        """What was published last, at first by whoever had the replica before."""
        self._figures: EngineFigures | None = None
        self._health_asked_at = -inf
        self._typical = typical
        self._start = hardware_profile(target.profile).step
        self._calibration = Calibration(self._start, _learned(known, target.profile))
        self._finds_precedence = finds_precedence
        self._tries = _TRIES
        self._models = Models(
            self._tell,
            self._models_changed,
            self.target.who,
            _listed(known),
        )

    @property
    def healthy(self) -> bool:
        """Whether the last scrape succeeded."""
        return self.state is not None and self.state.healthy

    def tell_again(self) -> None:
        """Nobody may know its state or its KV blocks any more."""
        if self.state is not None:
            self._publish_state(self.state)
        if self._kv_stream is not None:
            self._kv_stream.tell_again()

    async def run(self) -> None:
        """Scrape until cancelled, and follow its KV events."""
        async with asyncio.TaskGroup() as tasks:
            if self._kv_stream is not None:
                tasks.create_task(self._kv_stream.run())
            await self._scrape()

    async def _scrape(self) -> None:
        try:
            # Many replicas may begin at once: their second scrapes are spread over an interval.
            share_of_wait = self._random.random()
            while True:
                try:
                    wait_s = await self._scrape_once()
                except Exception as error:  # it is this replica's alone: the others go on
                    self._start_anew(error)
                    wait_s = self._backoff.next()
                await asyncio.sleep(wait_s * share_of_wait)
                share_of_wait = 1.0
        finally:
            self._pulse.settled()
            self._models.forget()
            self._typical.report(self.target.id, None)

    async def _scrape_once(self) -> float:
        """Scrape, learn, publish, and return the seconds to wait before the next scrape."""
        started = self._monotonic()
        self._pulse.asked(0.0 if self.state is None else self.state.scrape_seconds)
        try:
            figures = await scrape(self._session, self.target.id, self._asks_health(started))
        except ScrapeError as error:
            self._failed(error)
            return self._backoff.next()
        self._pulse.settled()
        seconds = self._monotonic() - started
        if self._another_model(figures):
            self._calibration = Calibration(self._start)
        if seconds <= self._settings.timeout_s:
            self._metrics.good.inc()
            self._calibrate(figures, started + seconds / 2)
        else:  # of which moment the figures are is known too roughly
            self._metrics.late.inc()
            self._calibration.interrupted()
        self._succeeded(figures, self._wall(), seconds)
        self._models.refresh(started)
        spread = self._random.uniform(-self._settings.jitter, self._settings.jitter)
        spent = self._monotonic() - started
        return max(0.0, self._settings.interval_s * (1 + spread) - spent)

    def _asks_health(self, now: float) -> bool:
        """An answered ``/metrics`` proves the server alive. ``/health`` tells of a dead engine
        behind it, and is asked less often, unless the last scrape failed."""
        asks = not self.healthy or now - self._health_asked_at >= HEALTH_EVERY_S
        if asks:
            self._health_asked_at = now
        return asks

    def _succeeded(self, figures: EngineFigures, scraped_at: float, seconds: float) -> None:
        if self._restarted(figures):
            self._models.forget()
        if not self.healthy:
            log.info("replica is healthy", extra={"replica": self.target.who})
        self._backoff.reset()
        self._metrics.seconds.observe(seconds)
        self._figures = figures
        learned = {
            "learned": self._calibration.model,
            "measured": self._calibration.ratio is not None,
        }
        times = {"scraped_at": scraped_at, "scrape_seconds": seconds}
        values = {**figures.fields(), **self._models.fields, **learned, **times}
        self._publish(self._blank(**values, kv_news=self._kv_news(figures)))

    def _calibrate(self, figures: EngineFigures, at: float) -> None:
        self._calibration.poll(figures.counts(at), self._typical.value)
        self._typical.report(self.target.id, self._calibration.ratio)

    def _failed(self, error: ScrapeError) -> None:
        problem = str(error)
        if self.state is None or self.healthy:
            extra = {"replica": self.target.who, "problem": problem}
            log.warning("replica is not healthy", extra=extra)
        self._metrics.failed.inc()
        self._calibration.interrupted()
        if isinstance(error, UnreachableError):
            self._models.forget()  # it may come back with others
        if self._kv_stream is not None:
            self._kv_stream.doubt()
        last = self.state or self._blank()
        update = {"healthy": False, "problem": problem, "kv_news": None}
        if not isinstance(error, SilentError):
            self._pulse.settled()
            update["unanswered_s"] = 0.0
        self._publish(last.model_copy(update=update))

    def _tell_silence(self, seconds: float) -> None:
        if self.state is not None:
            self._publish(self.state.model_copy(update={"unanswered_s": seconds}))

    def _start_anew(self, error: Exception) -> None:
        """Nobody foresaw this: nothing the replica told is kept, for it may be what led here."""
        problem = f"its answer led to an error: {type(error).__name__}: {error}"[:_LONGEST_PROBLEM]
        if self.state is None or self.state.problem != problem:
            extra = {"replica": self.target.who}
            log.error("replica cannot be polled, retrying", extra=extra, exc_info=error)
        self._metrics.failed.inc()
        self._pulse.settled()
        self._figures = None
        self._calibration = Calibration(self._start)
        self._models.forget()
        self._publish(self._blank(healthy=False, problem=problem))

    def _publish(self, state: ReplicaState) -> None:
        self.state = state
        self._publish_state(state)

    async def _tell(self) -> dict[str, Any]:
        """What it serves; and once that is known, whether it goes by priority, which nobody but its
        next process changes."""
        fields, before = await read_models(self._session, self.target.id), self._models.fields
        fields["by_priority"] = found = before.get("by_priority", False)
        fields["takes_priority"] |= before.get("takes_priority", False)
        if not before:  # another process
            self._tries = _TRIES
        doubtful = self._finds_precedence and fields["takes_priority"] and not found
        known = before.get("models")
        if doubtful and known and self._tries and self._is_free:
            self._tries -= 1
            with suppress(ScrapeError):  # it wants a key, or generates nothing
                fields["by_priority"] = await goes_by_priority(
                    self._session, self.target.id, known[0]
                )
        return fields

    @property
    def _is_free(self) -> bool:
        """Whether nothing waits there, and it has one queue only."""
        figures = self._figures
        if self.target.draining or not self.target.ready:
            return False
        return figures is not None and not figures.waiting and figures.engines == 1

    def _models_changed(self) -> None:
        if self.state is not None:
            self._publish(self.state.model_copy(update=self._models.fields))

    def _kv_news(self, figures: EngineFigures) -> int | None:
        """Which of several engines gets a request, and so whose blocks count, nobody knows."""
        return self._kv_stream.number if self._kv_stream and figures.engines == 1 else None

    def _restarted(self, figures: EngineFigures) -> bool:
        """Whether another process answers now."""
        last = self._figures or self.state
        return last is not None and (
            self._another_model(figures)
            or figures.steps < last.steps
            or figures.prompt_tokens < last.prompt_tokens
            or figures.generated_tokens < last.generated_tokens
        )

    def _another_model(self, figures: EngineFigures) -> bool:
        if self._figures is not None:
            return figures.models != self._figures.models
        known = self.state.models if self.state else ()
        return bool(known) and not {*figures.models} <= {*known}

    def _blank(self, **values: Any) -> ReplicaState:
        return ReplicaState(**self._identity, **values)


def _learned(known: ReplicaState | None, profile: str) -> StepModel | None:
    """What the counters taught a poller before, under the same profile."""
    if known is None or not known.measured or known.profile != profile:
        return None
    return known.learned


def _listed(known: ReplicaState | None) -> dict[str, Any]:
    """What the replica told before, where it did."""
    names = ("models", "listed", "adapters", "max_model_len", "takes_priority", "by_priority")
    return {name: getattr(known, name) for name in names} if known and known.listed else {}
