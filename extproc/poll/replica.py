"""Scrapes one replica."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from math import inf
from random import Random
from typing import Any

import aiohttp
from msgspec import structs

from extproc.config import POLL_JITTER, PollSettings
from extproc.ground.clock import Clock
from extproc.ground.outage_log import OutageLog
from extproc.ground.runtime import Backoff
from extproc.poll.batch import batch_fields
from extproc.poll.discovery import Target
from extproc.poll.kv_stream import KvStream
from extproc.poll.metrics_text import EngineFigures
from extproc.poll.scrape import (
    PollMetrics,
    RefusedError,
    ScrapeError,
    SilentError,
    UnreachableError,
    read_models,
    says_anything,
    scrape,
)
from extproc.predict.estimator import Estimator, FleetPrior, coefficients
from extproc.predict.step import StepModel, hardware_profile
from extproc.replica_state import TTL_S, ReplicaState, checked

log = logging.getLogger(__name__)

BACKOFF_MOST_S = 2.0  # longest wait between two scrapes of a failing replica
HEALTH_EVERY_S = 2.0  # seconds between two looks at a healthy replica's `/health`
MODELS_EVERY_S = 10.0  # a LoRA adapter may be loaded at any time, and `/v1/models` alone tells
SILENCE_STEP_S = 0.1
"""Step in which the silence of a replica is counted; and by how much later than the scrape before
its figures must be for the poller to doubt it."""
STALL_S = 1.0
"""Seconds of silence from which on routers are told: a busy API server stalls for less, and serves
what it has nonetheless."""
_SILENT_SCRAPES = 2  # scrapes without an answer in a row that make a replica unhealthy
_LONGEST_PROBLEM = 200


class PolledReplica:
    """Scrapes one replica; publishes its state after each scrape, good or bad."""

    def __init__(
        self,
        target: Target,
        session: aiohttp.ClientSession,
        publish: Callable[[ReplicaState], None],
        metrics: PollMetrics,
        settings: PollSettings,
        prior: FleetPrior,
        known: ReplicaState | None = None,
        kv_stream: KvStream | None = None,
        *,
        by_priority: bool = False,
        monotonic: Clock,
        wall: Clock,
        random: Random,
    ) -> None:
        self.target = target  # the poller sets ``draining`` and ``ready`` anew
        self._session = session
        self._publish_state = publish
        self._metrics = metrics
        self._settings = settings
        self._monotonic = monotonic
        self._wall = wall
        self._random = random
        self._backoff = Backoff(settings.interval_s, BACKOFF_MOST_S, random)
        self._doubt: asyncio.Task[None] | None = None  # None: the replica owes no figures
        self._kv_stream = kv_stream
        self._identity: dict[str, Any] = {
            "id": target.id,
            "name": target.name,
            "profile": target.profile,
            "by_priority": by_priority,
            "life_s": TTL_S,
        }
        # What was published last, at first by whichever poller had the replica before.
        self.state = None if known is None else structs.replace(known, **self._identity)
        self._figures: EngineFigures | None = None
        self._health_asked_at = -inf
        self._silent_scrapes = 0  # in a row
        self._prior = prior
        self._start = hardware_profile(target.profile).step
        self._estimator = Estimator(self._start, _learned(known, target.profile))
        self._models = Models(self._tell, self._models_changed, target.who, _listed(known))

    @property
    def healthy(self) -> bool:
        return self.state is not None and self.state.healthy

    def tell_again(self) -> None:
        """Publishes state and KV blocks anew: Redis may have lost them."""
        if self.state is not None:
            self._publish_state(self.state)
        if self._kv_stream is not None:
            self._kv_stream.tell_again()

    async def run(self) -> None:
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
                except Exception as error:  # the other replicas go on
                    self._start_anew(error)
                    wait_s = self._backoff.next()
                await asyncio.sleep(wait_s * share_of_wait)
                share_of_wait = 1.0
        finally:
            self._clear_doubt()
            self._models.forget()
            self._prior.forget(self.target.id)

    async def _scrape_once(self) -> float:
        started = self._monotonic()
        if self._doubt is None:
            usual_s = 0.0 if self.state is None else self.state.scrape_seconds
            self._doubt = asyncio.create_task(self._count_silence(usual_s + SILENCE_STEP_S))
        try:
            figures = await scrape(self._session, self.target.id, self._asks_health(started))
        except ScrapeError as error:
            self._failed(error)
            return self._backoff.next()
        self._clear_doubt()
        seconds = self._monotonic() - started
        before = self.state
        if self._restarted(figures):
            before = None
            self._models.forget()
            self._estimator = Estimator(self._start)
        if seconds <= self._settings.timeout_s:
            self._metrics.good.inc()
            self._calibrate(figures, started + seconds / 2)
        else:  # the moment of the figures is known too roughly
            self._metrics.late.inc()
            self._estimator.interrupted()
        batch = batch_fields(before or self._blank(), figures)
        self._succeeded(figures, batch, self._wall(), seconds)
        self._models.refresh(started)
        spread = self._random.uniform(-POLL_JITTER, POLL_JITTER)
        spent = self._monotonic() - started
        return max(0.0, self._settings.interval_s * (1 + spread) - spent)

    def _asks_health(self, now: float) -> bool:
        """An answered ``/metrics`` proves the server alive. ``/health`` tells of a dead engine
        behind it, and is asked less often, unless the last scrape failed."""
        asks = not self.healthy or now - self._health_asked_at >= HEALTH_EVERY_S
        if asks:
            self._health_asked_at = now
        return asks

    def _succeeded(
        self, figures: EngineFigures, batch: dict[str, Any], scraped_at: float, seconds: float
    ) -> None:
        if not self.healthy:
            log.info("replica is healthy", extra={"replica": self.target.who})
        self._backoff.reset()
        self._silent_scrapes = 0
        self._metrics.seconds.observe(seconds)
        self._figures = figures
        learned = {
            "learned": self._estimator.model,
            "measured": self._estimator.measured,
        }
        times = {"scraped_at": scraped_at, "scrape_seconds": seconds}
        values = {**figures.fields(), **self._models.fields, **learned, **batch, **times}
        self._publish(checked(self._blank(**values, kv_news=self._kv_news(figures))))

    def _calibrate(self, figures: EngineFigures, at: float) -> None:
        self._estimator.poll(figures.counts(at), self._prior.prior)
        self._prior.report(self.target.id, self._estimator.evidence)

    def _failed(self, error: ScrapeError) -> None:
        problem = str(error)
        self._metrics.failed.inc()
        self._estimator.interrupted()
        self._prior.report(self.target.id, None)
        if self._kv_stream is not None:
            self._kv_stream.doubt()
        is_silent = isinstance(error, SilentError)
        self._silent_scrapes = self._silent_scrapes + 1 if is_silent else 0
        if self.state and self.healthy and 0 < self._silent_scrapes < _SILENT_SCRAPES:
            self._publish(self.state)  # routers hear that the poller is there
            return
        if self.state is None or self.healthy:
            extra = {"replica": self.target.who, "problem": problem}
            log.warning("replica is not healthy", extra=extra)
        if isinstance(error, UnreachableError):
            self._models.forget()  # it may come back with others
        last = self.state or self._blank()
        update = {
            "healthy": False,
            "problem": problem,
            "kv_news": None,
            "refuses": isinstance(error, RefusedError),
        }
        if not is_silent:
            self._clear_doubt()
            update["unanswered_s"] = 0.0
        self._publish(structs.replace(last, **update))

    async def _count_silence(self, due_s: float) -> None:
        """Publishes the seconds for which the replica has answered nothing at all, counted from
        ``due_s`` on until cancelled; 0: it answers again.

        The count is of this task's own steps: while the poller itself is held up, no time is held
        against the replica.
        """
        await asyncio.sleep(due_s)
        while True:
            silent_s, answered = 0.0, False
            while not answered:
                asking = asyncio.ensure_future(says_anything(self._session, self.target.id))
                try:
                    while not (await asyncio.wait([asking], timeout=SILENCE_STEP_S))[0]:
                        silent_s += SILENCE_STEP_S
                        if silent_s >= STALL_S:
                            self._update(unanswered_s=silent_s)
                    answered = asking.result()
                finally:
                    asking.cancel()
            if silent_s >= STALL_S:
                self._update(unanswered_s=0.0)
            await asyncio.sleep(SILENCE_STEP_S)

    def _clear_doubt(self) -> None:
        if self._doubt is not None:
            self._doubt.cancel()
        self._doubt = None

    def _start_anew(self, error: Exception) -> None:
        """Drops all that the replica told: any of it may have led to the unforeseen error."""
        problem = f"its answer led to an error: {type(error).__name__}: {error}"[:_LONGEST_PROBLEM]
        if self.state is None or self.state.problem != problem:
            extra = {"replica": self.target.who}
            log.error("replica cannot be polled, retrying", extra=extra, exc_info=error)
        self._metrics.failed.inc()
        self._clear_doubt()
        self._figures = None
        self._estimator = Estimator(self._start)
        self._models.forget()
        self._publish(self._blank(healthy=False, problem=problem))

    def _publish(self, state: ReplicaState) -> None:
        self.state = state
        self._publish_state(state)

    async def _tell(self) -> dict[str, Any]:
        fields = await read_models(self._session, self.target.id)
        fields["takes_priority"] |= self._identity["by_priority"] or self._models.fields.get(
            "takes_priority", False
        )
        return fields

    def _models_changed(self) -> None:
        self._update(**self._models.fields)

    def _update(self, **values: Any) -> None:
        if self.state is not None:
            self._publish(structs.replace(self.state, **values))

    def _kv_news(self, figures: EngineFigures) -> int | None:
        """Number of the last update; several engines have none: a request may go to any."""
        return self._kv_stream.number if self._kv_stream and figures.engines == 1 else None

    def _restarted(self, figures: EngineFigures) -> bool:
        last = self._figures or self.state
        if last is None or self._another_model(figures):
            return last is not None
        if last.started_at and figures.started_at:  # else fallen counters tell
            return last.started_at != figures.started_at
        return (
            figures.steps < last.steps
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


class Models:
    """The models of one replica, asked for beside its scrapes so that a slow answer delays none.

    Args:
        ask: returns fields of a ``ReplicaState``.
        changed: called when they differ from those before.
        who: name of the replica in the log.
        known: what another poller was told before.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[Mapping[str, Any]]],
        changed: Callable[[], None],
        who: str,
        known: Mapping[str, Any],
    ) -> None:
        self.fields = known  # empty: nothing is known
        self._ask = ask
        self._changed = changed
        self._asking: asyncio.Task[None] | None = None
        self._asked_at: float | None = None
        self._trouble = OutageLog(log, "replica does not tell its models", replica=who)

    def refresh(self, now: float) -> None:
        """Starts asking the replica, at most once in ``MODELS_EVERY_S``."""
        if self._asking is not None and not self._asking.done():
            return
        if self._asked_at is None or now - self._asked_at >= MODELS_EVERY_S:
            self._asked_at = now
            self._asking = asyncio.create_task(self._refresh())

    def forget(self) -> None:
        """Drops what a process told, or is about to tell, that is gone."""
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
        self._trouble.recovered()
        if fields != self.fields:
            self.fields = fields
            self._changed()


def _learned(known: ReplicaState | None, profile: str) -> StepModel | None:
    if known is None or not known.measured or known.profile != profile:
        return None
    model = known.learned
    if model is None or not all(0.0 <= one < inf for one in coefficients(model)) or not model.c0:
        return None
    return model


def _listed(known: ReplicaState | None) -> dict[str, Any]:
    names = ("models", "listed", "adapters", "max_model_len", "takes_priority")
    return {name: getattr(known, name) for name in names} if known and known.listed else {}
