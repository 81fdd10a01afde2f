"""Memory of the last decisions and of the last predictions with their outcomes."""

from collections import deque
from dataclasses import dataclass
from itertools import count, islice, takewhile
from math import isfinite
from typing import Any

import msgspec
import numpy as np

from extproc.config import Config
from extproc.fleet.fleet import Fleet
from extproc.ground.clock import Clock
from extproc.observe.changes import Exclusions, Onsets, Presence
from extproc.observe.decision import FORMAT, Candidate, DecisionRecord, RequestOutcome, Terms
from extproc.observe.history import Average, Delays, History
from extproc.predict.inputs import Floats
from extproc.route.decision import Decision
from extproc.route.queue import Queue
from extproc.route.router import Router

TERMS = Terms.__struct_fields__
_DIGITS = 5
_MOST_CANDIDATES = 100_000  # in all stored decisions, about 34 MB
MOST_RESULTS = 5000  # most prediction results kept for a pool
OVERLOADED = "overloaded"  # fault: Envoy answered 503 itself, because a circuit breaker was full


class LoggedDecision(msgspec.Struct, eq=False):
    """Decision with its candidates and its outcome so far."""

    number: int  # counts decisions from 1
    request_id: str
    decided_at: float  # seconds since the epoch
    decision: Decision
    pool: str = ""
    observed: bool = False  # Envoy alone chose the replica
    outcome: RequestOutcome = msgspec.field(default_factory=RequestOutcome)

    @property
    def compared(self) -> int:
        return len(self.decision.situation.view)

    def record(self, most: int | None = None) -> DecisionRecord:
        """Convert the decision for JSON.

        Args:
            most: limit of the candidates (best scores first), and limit of the excluded replicas.
                The chosen and the serving replica are always included. None: no limit.
        """
        decision, profile = self.decision, self.decision.profile
        view = decision.situation.view
        return DecisionRecord(
            number=self.number,
            request_id=self.request_id,
            pool=self.pool,
            decided_at=self.decided_at,
            policy=decision.choice.policy,
            endpoint=str(profile.endpoint),
            model=profile.requested_model or profile.model,
            served_as=decision.name,
            stream=profile.stream,
            objective=profile.objective.name,
            prompt_tokens=profile.prompt_tokens,
            output_bound=profile.output_bound,
            sequences=profile.sequences,
            expected_output_tokens=_short(decision.prediction.output_tokens),
            p90_output_tokens=_short(decision.situation.p90_output_tokens),
            replica=decision.replica,
            replica_name=view.names[decision.choice.first],
            second=decision.second,
            why=decision.why,
            fallback=decision.fallback,
            others_age_s=_short(decision.situation.peers_age_s),
            expected_cached_tokens=_short(decision.cached),
            predicted_ttft_s=_short(decision.predicted_ttft),
            predicted_completion_s=_short(decision.predicted_completion),
            first_token_weight=_short(decision.prediction.first_token_weight),
            compared=self.compared,
            candidates=self._candidates(most),
            excluded=[*view.excluded[:most]],
            outcome=RequestOutcome(*map(_short, msgspec.structs.astuple(self.outcome))),
            observed=self.observed,
            version=FORMAT,
        )

    def _candidates(self, most: int | None) -> list[Candidate]:
        """Convert the candidates column by column: a thousand in 2 ms, not in 20 ms."""
        choice, view = self.decision.choice, self.decision.situation.view
        prediction = self.decision.prediction
        rows = {*choice.scores.argsort(kind="stable")[:most].tolist(), choice.first}
        if self.outcome.served_by in view.ids:
            rows.add(view.ids.index(self.outcome.served_by))
        shown = np.array(sorted(rows))
        terms = (_figures(getattr(prediction, name)[shown]) for name in TERMS)
        columns = (
            [view.ids[row] for row in shown],
            [view.names[row] for row in shown],
            _figures(choice.scores[shown]),
            _figures(view.requests[shown]),
            _figures(view.waiting[shown]),
            _figures(view.kv_usage[shown]),
            _figures(view.backlog[shown]),
            _figures(prediction.cached[shown]),
            _figures(prediction.ttft[shown]),
            _figures(prediction.completion[shown]),
            [Terms(*row) for row in zip(*terms, strict=True)],
            _figures(view.stretch[shown]),
            _figures(prediction.cost_weight[shown]),
            _figures(prediction.kv_pressure[shown]),
        )
        return [Candidate(*row) for row in zip(*columns, strict=True)]


def _figures(values: Floats) -> list[float | None]:
    return [value if isfinite(value) else None for value in values.round(_DIGITS).tolist()]


def _short(value: Any) -> Any:
    """Round a float for people. Infinity becomes None, since JSON has no infinity."""
    if not isinstance(value, float):
        return value
    return round(value, _DIGITS) if isfinite(value) else None


def summary_of(decision: Decision, waited: float) -> dict[str, str | float]:
    """Summarise a decision for Envoy's dynamic metadata and for spans; omits unknown figures.

    ``waited``: seconds in the router's queue before the decision.
    """
    view, prediction, profile = decision.situation.view, decision.prediction, decision.profile
    figures = {
        "prompt_tokens": profile.prompt_tokens,
        "cached_tokens": decision.cached,
        "expected_output_tokens": prediction.output_tokens,
        "predicted_ttft_s": decision.predicted_ttft,
        "predicted_completion_s": decision.predicted_completion,
        "queued_s": waited,
    }
    return {
        "policy": decision.choice.policy,
        "replica": view.names[decision.choice.first],
        "model": decision.name or profile.model,
    } | {name: short for name, figure in figures.items() if (short := _short(figure)) is not None}


class DecisionLog:
    """Last decisions of a router, in memory."""

    def __init__(self, size: int) -> None:
        self._records: deque[LoggedDecision] = deque(maxlen=size)
        self._candidates = 0
        self._numbers = count(1)

    def add(
        self,
        request_id: str,
        decided_at: float,
        decision: Decision,
        pool: str = "",
        observed: bool = False,
    ) -> LoggedDecision:
        number = next(self._numbers)
        record = LoggedDecision(number, request_id, decided_at, decision, pool, observed)
        self._candidates += record.compared
        while self._records and (
            self._candidates > _MOST_CANDIDATES or len(self._records) == self._records.maxlen
        ):
            self._candidates -= self._records.popleft().compared
        self._records.append(record)
        return record

    def after(self, number: int, most: int | None = None) -> list[LoggedDecision]:
        """Return the first ``most`` decisions after ``number``, oldest first."""
        return list(islice((record for record in self._records if record.number > number), most))

    def last(self, most: int) -> list[LoggedDecision]:
        return list(islice(reversed(self._records), most))[::-1]

    def since(self, at: float) -> list[LoggedDecision]:
        """Return decisions made at ``at`` (seconds since the epoch) or later, newest first."""
        return list(takewhile(lambda record: record.decided_at >= at, reversed(self._records)))

    def of_request(self, request_id: str) -> list[LoggedDecision]:
        return [record for record in self._records if record.request_id == request_id]


@dataclass(frozen=True, slots=True)
class PredictionResult:
    """Prediction and outcome of a request that the chosen replica served."""

    at: float  # by the router's clock
    replica: str  # ip:port
    predicted_s: float
    actual_s: float  # from the decision to the last token
    ttft_s: float | None  # from the decision to the first token; None: not a stream that was read
    expected_cached: float  # cached prompt tokens, by the earlier prompts to the replica
    cached: int | None  # cached prompt tokens; None: not reported


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedPool:
    """Parts of a pool that the dashboard shows."""

    config: Config
    router: Router
    queue: Queue
    log: DecisionLog  # shared by all pools
    clock: Clock
    wall: Clock
    results: deque[PredictionResult]  # of the last requests that ended, the oldest first
    delays: Delays  # shared by all pools
    history: History  # shared by all pools
    external: Average  # requests on the pool's replicas that no router sent
    envoy_faults: dict[str, float]
    """Faults that responses showed in Envoy (a :class:`NotFollowed`, or ``OVERLOADED``), each with
    the last time on the clock."""

    exclusions: Exclusions
    onsets: Onsets
    routers: Presence  # the peers
    pollers: Presence

    @property
    def fleet(self) -> Fleet:
        return self.router.fleet
