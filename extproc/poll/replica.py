"""Repeated scrapes of one replica, from which its health, models and speed follow."""

import asyncio
import logging
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Any

import aiohttp
import zmq.asyncio
from msgspec import structs

from extproc.config import POLL_JITTER, Config
from extproc.ground.clock import monotonic, wall
from extproc.ground.runtime import Backoff, started
from extproc.poll.batch import scraped_state
from extproc.poll.destination import Destination
from extproc.poll.discovery import Target
from extproc.poll.kv_blocks import KvBlocks
from extproc.poll.kv_stream import KvStream
from extproc.poll.metrics_text import PageFigures, ScrapeError
from extproc.poll.models import Models
from extproc.poll.scrape import PollMetrics, responds, scrape
from extproc.predict.estimator import Estimator, FleetPrior
from extproc.predict.step import hardware_profile
from extproc.replica_state import TTL_S, EngineFigures, ReplicaState, checked

log = logging.getLogger(__name__)

BACKOFF_MOST_S = 2.0  # longest wait between two scrapes of an unhealthy replica
HEALTH_EVERY_S = 2.0
"""Seconds between two scrapes of a healthy replica that also request ``/health``, which fails if
the engine died. Every scrape of an unhealthy replica requests it."""
SILENCE_STEP_S = 0.1
"""Seconds between two updates of a replica's silence. The first probe for silence starts once a
scrape takes this much longer than the previous scrape."""
STALL_S = 1.0
"""Seconds of silence before the published state shows the silence. A busy API server may be silent
for a shorter time while its requests proceed."""
_SILENT_SCRAPES = 2  # consecutive unanswered scrapes that make a replica unhealthy
_LONGEST_PROBLEM = 200
_NOT_SCRAPED = "not scraped yet"
_HANGS = "hangs: accepts connections, but answers neither /metrics nor /health"


@dataclass(frozen=True, slots=True)
class PollContext:
    """Parts that all replicas of a poller share."""

    config: Config
    into: Destination
    metrics: PollMetrics
    random: Random
    tasks: asyncio.TaskGroup
    session: aiohttp.ClientSession
    zmq: zmq.asyncio.Context
    prior: FleetPrior = field(default_factory=FleetPrior)


class PolledReplica:
    """Scrapes one replica until stopped, and publishes its state after each scrape, successful or
    not. ``known``: last state that the replica's previous poller wrote."""

    def __init__(self, target: Target, known: ReplicaState | None, context: PollContext) -> None:
        self.target = target
        self._context = context
        self._settings = context.config.poll
        self._backoff = Backoff(self._settings.interval_s, BACKOFF_MOST_S, context.random)
        self._silence: asyncio.Task[None] | None = None  # None: no scrape is unanswered
        self._identity: dict[str, Any] = {
            "id": target.id,
            "name": target.name,
            "profile": target.profile,
            "by_priority": context.config.priority_scheduling,
            "life_s": TTL_S,
        }
        # The last published state; at first, the last state from the replica's previous poller.
        first = known or self._blank(healthy=False, problem=_NOT_SCRAPED)
        self.state = structs.replace(first, **self._identity)
        self._figures: PageFigures | None = None
        self._health_asked_at = -inf
        self._silent_scrapes = 0  # consecutive
        self._estimator: Estimator | None = None  # None: this process was not scraped yet
        self._models = Models(context.session, target, self._listed)
        blocks = KvBlocks(context.random, monotonic)
        self._kv_stream = KvStream(context.zmq, target, blocks, context.into)
        self._task = context.tasks.create_task(self._run())

    @property
    def usable(self) -> bool:
        """True if the published state lets routers send the replica new requests."""
        state = self.target.marked(self.state)
        return state.serves and not state.draining

    def mark(self, target: Target) -> None:
        """Takes over ``draining`` and ``ready`` of the target; publishes a change at once."""
        before, self.target = self.target, target
        if (before.draining, before.ready) != (target.draining, target.ready):
            self._update()

    def resend_all(self) -> None:
        """Publishes state and KV blocks again: Redis may have lost them."""
        self._update()
        self._kv_stream.resend_all()

    def stop(self) -> None:
        """Stops all tasks at once, so that none publishes the state again after its removal."""
        self._task.cancel()
        self._stop_counting_silence()
        self._models.restart()

    async def _run(self) -> None:
        async with started(self._kv_stream.run()):
            try:
                # A random wait spreads the scrapes of replicas that start together.
                await asyncio.sleep(self._context.random.random() * self._settings.interval_s)
                while True:
                    try:
                        wait_s = await self._scrape_once()
                    except Exception as error:  # must not end the polls of other replicas
                        self._failed_unexpectedly(error)
                        wait_s = self._backoff.next()
                    await asyncio.sleep(wait_s)
            finally:
                self._stop_counting_silence()
                self._models.restart()
                self._context.prior.forget(self.target.id)

    async def _scrape_once(self) -> float:
        started = monotonic()
        if self._silence is None:
            due_s = self.state.scrape_seconds + SILENCE_STEP_S
            self._silence = asyncio.create_task(self._count_silence(due_s))
        health = not self.state.healthy or started - self._health_asked_at >= HEALTH_EVERY_S
        if health:
            self._health_asked_at = started
        try:
            figures = await scrape(self._context.session, self.target.id, health)
        except ScrapeError as error:
            self._failed(error)
            return self._backoff.next()
        self._stop_counting_silence()
        seconds = monotonic() - started
        before = self.state
        if self._restarted(figures):
            before = self._blank()
            self._models.restart()
            self._estimator = None
        if self._estimator is None:
            profile = hardware_profile(self.target.profile)
            expected = profile.expected_step(figures.kv_tokens / figures.engines)
            self._estimator = Estimator(expected, before.learned if before.measured else None)
        if seconds <= self._settings.timeout_s:
            self._context.metrics.good.inc()
            self._estimator.poll(figures.counts(started + seconds / 2), self._context.prior.prior)
            self._context.prior.report(self.target.id, self._estimator.evidence)
        else:  # the figures' time is too uncertain to learn step times
            self._context.metrics.late.inc()
            self._estimator.interrupted()
        self._succeeded(figures, before, self._estimator, seconds)
        self._models.refresh(started)
        spread = self._context.random.uniform(-POLL_JITTER, POLL_JITTER)
        spent = monotonic() - started
        return max(0.0, self._settings.interval_s * (1 + spread) - spent)

    def _succeeded(
        self, figures: PageFigures, before: ReplicaState, estimator: Estimator, seconds: float
    ) -> None:
        if not self.state.healthy:
            log.info("replica became healthy", extra={"replica": self.target.title})
        self._backoff.reset()
        self._silent_scrapes = 0
        self._context.metrics.seconds.observe(seconds)
        self._figures = figures
        state = scraped_state(
            self._blank(),
            before,
            figures,
            learned=estimator.model,
            measured=estimator.measured,
            scraped_at=wall(),
            scrape_seconds=seconds,
            # Several engines have separate caches, and an event does not name its engine.
            kv_update=self._kv_stream.number if figures.engines == 1 else None,
        )
        self._publish(checked(state))

    def _failed(self, error: ScrapeError) -> None:
        self._context.metrics.failed.inc()
        if self._estimator is not None:
            self._estimator.interrupted()
        self._context.prior.report(self.target.id, None)
        self._kv_stream.invalidate()
        self._silent_scrapes = self._silent_scrapes + 1 if error.silent else 0
        if self.state.healthy and 0 < self._silent_scrapes < _SILENT_SCRAPES:
            self._publish(self.state)  # unchanged, to show routers that the poller is alive
            return
        problem = str(error)
        if error.silent and error.connected and self.state.unanswered_s:
            problem = _HANGS
        if self.state.healthy or self.state.problem == _NOT_SCRAPED:
            log.warning(
                "replica became unhealthy: routers avoid it until a scrape succeeds",
                extra={"replica": self.target.title, "problem": problem},
            )
        if not error.connected:
            self._models.restart()  # the next process may serve other models
        if not error.silent:
            self._stop_counting_silence()
        self._update(
            healthy=False,
            problem=problem,
            kv_update=None,
            refuses=error.refused,
            unanswered_s=self.state.unanswered_s if error.silent else 0.0,
        )

    async def _count_silence(self, due_s: float) -> None:
        """Waits ``due_s``, then probes the replica until cancelled, and publishes its silence.

        The duration is counted in steps of this task. While the poller's process itself stands
        still, the task makes no step, so the replica does not look silent.
        """
        await asyncio.sleep(due_s)
        while True:
            silent_s, answered = 0.0, False
            while not answered:
                async with started(responds(self._context.session, self.target.id)) as [asking]:
                    while not (await asyncio.wait([asking], timeout=SILENCE_STEP_S))[0]:
                        silent_s += SILENCE_STEP_S
                        if silent_s >= STALL_S:
                            self._update(unanswered_s=silent_s)
                    answered = asking.result()
            if silent_s >= STALL_S:
                self._update(unanswered_s=0.0)
            await asyncio.sleep(SILENCE_STEP_S)

    def _stop_counting_silence(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
        self._silence = None

    def _failed_unexpectedly(self, error: Exception) -> None:
        """Drops everything learned from the replica, which may have caused the error."""
        problem = f"its answer led to an error: {type(error).__name__}: {error}"[:_LONGEST_PROBLEM]
        if self.state.problem != problem:
            log.error(
                "replica became unhealthy: polling it raised an error, retrying",
                extra={"replica": self.target.title},
                exc_info=error,
            )
        self._context.metrics.failed.inc()
        self._stop_counting_silence()
        self._figures = None
        self._estimator = None
        self._models.restart()
        self._publish(self._blank(healthy=False, problem=problem))

    def _publish(self, state: ReplicaState) -> None:
        self.state = state
        self._context.into.put(self.target.marked(state))

    def _update(self, **values: Any) -> None:
        self._publish(structs.replace(self.state, **values))

    def _listed(self, fields: dict[str, Any]) -> None:
        """Publishes the fields that come from the replica's version and list of models."""
        fields["takes_priority"] |= self.state.by_priority or self.state.takes_priority
        self._update(**fields)

    def _restarted(self, figures: PageFigures) -> bool:
        """Returns True if the replica's process is not the process of the last scrape."""
        last: EngineFigures = self._figures or self.state
        if last.models and not {*figures.models} <= {*last.models}:  # it serves another model
            return True
        if last.started_at and figures.started_at:  # else only fallen counters show a restart
            return last.started_at != figures.started_at
        return (
            figures.steps < last.steps
            or figures.prompt_tokens < last.prompt_tokens
            or figures.generated_tokens < last.generated_tokens
        )

    def _blank(self, **values: Any) -> ReplicaState:
        return ReplicaState(**self._identity, **values)
