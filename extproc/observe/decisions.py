"""Decision records: what was predicted, what was chosen and why, and what came of it."""

import itertools
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice, takewhile
from math import isfinite
from typing import Any

import numpy as np

from extproc.predict.inputs import Floats
from extproc.route.router import Decision
from extproc.route.shadow import TIMES

TERMS = (
    *("step_rest", "admission", "adapter", "prefill", "decode"),
    *("cost_to_others", "avoidable"),
)
"""Of a prediction."""


@dataclass(slots=True)
class Outcome:
    """What happened to a routed request; None where it was not seen."""

    waited_s: float = 0.0
    """Seconds at the router, until a replica could carry it."""
    waited_for: str = ""
    """Why, in a few words; empty where it did not."""
    served_by: str | None = None
    """``ip:port`` that answered, after retries."""
    status: int | None = None
    overloaded: bool = False
    """Envoy answered itself, as a circuit breaker was full."""
    ttft_s: float | None = None
    """Seconds from the decision to the first token, where the response's chunks were read."""
    completion_s: float | None = None
    """Seconds from the decision to the end of the response."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    """As the replica reported them, over all sequences."""


@dataclass(slots=True)
class DecisionRecord:
    """One routed request."""

    number: int
    """Grows by one a decision, from 1."""
    request_id: str
    decided_at: float
    """Seconds since the epoch."""
    decision: Decision
    pool: str = ""
    outcome: Outcome = field(default_factory=Outcome)

    @property
    def candidates(self) -> int:
        """How many replicas were compared."""
        return len(self.decision.situation.view)

    def to_json(self, most: int | None = None) -> dict[str, Any]:
        """The record as JSON: the comparison of the candidates, and the outcome.

        Args:
            most: only so many candidates, those with the best scores, and those chosen and
                served by, and of those left out the first so many; None: all.
        """
        decision, profile = self.decision, self.decision.profile
        return {
            "number": self.number,
            "request_id": self.request_id,
            "pool": self.pool,
            "decided_at": self.decided_at,
            "policy": decision.policy,
            "endpoint": str(profile.endpoint),
            "model": profile.asked or profile.model,
            "served_as": decision.name,
            "stream": profile.stream,
            "objective": profile.objective.name,
            "prompt_tokens": profile.prompt_tokens,
            "output_bound": profile.output_bound,
            "sequences": profile.sequences,
            "expected_output_tokens": _short(decision.prediction.output_tokens),
            "p90_output_tokens": _short(decision.p90_output_tokens),
            "replica": decision.replica,
            "replica_name": decision.situation.view.names[decision.choice.first],
            "second": decision.second,
            "why": decision.why,
            "fallback": decision.fallback,
            "others_age_s": _short(decision.news_age),
            "expected_cached_tokens": _short(decision.cached),
            "predicted_ttft_s": _short(decision.predicted_ttft),
            "predicted_completion_s": _short(decision.predicted_completion),
            "shadow": self._shadow(),
            "compared": self.candidates,
            "candidates": self._compared(most),
            "excluded": [
                {"replica": one.id, "name": one.name, "why": one.why}
                for one in decision.situation.view.excluded[:most]
            ],
            "outcome": {
                "waited_s": _short(self.outcome.waited_s),
                "waited_for": self.outcome.waited_for,
                "served_by": self.outcome.served_by,
                "status": self.outcome.status,
                "ttft_s": _short(self.outcome.ttft_s),
                "completion_s": _short(self.outcome.completion_s),
                "prompt_tokens": self.outcome.prompt_tokens,
                "cached_tokens": self.outcome.cached_tokens,
                "output_tokens": self.outcome.output_tokens,
            },
        }

    def _shadow(self) -> dict[str, Any] | None:
        """What another policy would have chosen, if one was asked."""
        if (shadow := self.decision.shadow) is None:
            return None
        view, prediction = self.decision.situation.view, self.decision.prediction
        return {
            "policy": shadow.policy,
            "replica": view.ids[shadow.first],
            "name": view.names[shadow.first],
            **{f"{time}_s": _short(getattr(prediction, time).item(shadow.first)) for time in TIMES},
        }

    def _compared(self, most: int | None) -> list[dict[str, Any]]:
        """Column by column: value by value, a thousand candidates take 20 ms instead of 2."""
        choice, view = self.decision.choice, self.decision.situation.view
        prediction = self.decision.prediction
        shown = np.arange(len(view))
        if most is not None and most < len(view):
            rows = {*choice.scores.argsort(kind="stable")[:most].tolist(), choice.first}
            if self.outcome.served_by in view.ids:
                rows.add(view.ids.index(self.outcome.served_by))
            shown = np.array(sorted(rows))
        columns: dict[str, list[Any]] = {
            "replica": [view.ids[row] for row in shown],
            "name": [view.names[row] for row in shown],
            "score": _figures(choice.scores[shown]),
            "requests": _figures(view.requests[shown]),
            "waiting": _figures(view.waiting[shown]),
            "kv_usage": _figures(view.kv_usage[shown]),
            "backlog_tokens": _figures(view.backlog[shown]),
            "cached_tokens": _figures(prediction.cached[shown]),
            "predicted_ttft_s": _figures(prediction.ttft[shown]),
            "predicted_completion_s": _figures(prediction.completion[shown]),
            "terms_s": _rows({name: _figures(getattr(prediction, name)[shown]) for name in TERMS}),
            "stretch": _figures(view.stretch[shown]),
            "cost_weight": _figures(prediction.cost_weight[shown]),
            "kv_pressure": _figures(prediction.kv_pressure[shown]),
        }
        return _rows(columns)


_DIGITS = 5


def _rows(columns: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _figures(values: Floats) -> list[float | None]:
    """As :func:`_short`."""
    return [value if isfinite(value) else None for value in values.round(_DIGITS).tolist()]


def _short(value: float | None) -> float | None:
    """Rounded for people; what JSON cannot say (infinity) becomes null."""
    return None if value is None or not isfinite(value) else round(value, _DIGITS)


def told(decision: Decision, waited: float) -> dict[str, str | float]:
    """What others are told of a decision; times in seconds. ``waited``: before it."""
    view, prediction, profile = decision.situation.view, decision.prediction, decision.profile
    figures = {
        "prompt_tokens": profile.prompt_tokens,
        "cached_tokens": decision.cached,
        "expected_output_tokens": prediction.output_tokens,
        "predicted_ttft_s": decision.predicted_ttft,
        "predicted_completion_s": decision.predicted_completion,
        "held_s": waited,
    }
    return {
        "policy": decision.policy,
        "replica": view.names[decision.choice.first],
        "model": decision.name or profile.model,
    } | {name: short for name, figure in figures.items() if (short := _short(figure)) is not None}


_MOST_CANDIDATES = 100_000
"""Candidates of all records kept: some 20 MB, however many replicas there are."""


class DecisionLog:
    """The last decisions, in memory."""

    def __init__(self, kept: int) -> None:
        self._records: deque[DecisionRecord] = deque(maxlen=kept)
        self._candidates = 0
        self._numbers = itertools.count(1)

    def add(
        self, request_id: str, decided_at: float, decision: Decision, pool: str = ""
    ) -> DecisionRecord:
        """Keeps a decision; its outcome is filled in later."""
        record = DecisionRecord(next(self._numbers), request_id, decided_at, decision, pool)
        self._candidates += record.candidates
        while self._records and (
            self._candidates > _MOST_CANDIDATES or len(self._records) == self._records.maxlen
        ):
            self._candidates -= self._records.popleft().candidates
        self._records.append(record)
        return record

    def after(self, number: int, most: int | None = None) -> list[DecisionRecord]:
        """Records with a higher number, oldest first; the first ``most`` of them."""
        return list(islice((one for one in self._records if one.number > number), most))

    def last(self, most: int) -> list[DecisionRecord]:
        """The newest ``most`` records, oldest first."""
        return list(islice(reversed(self._records), most))[::-1]

    def since(self, at: float) -> list[DecisionRecord]:
        """Those that were decided then or later, the newest first."""
        return list(takewhile(lambda one: one.decided_at >= at, reversed(self._records)))

    def of_request(self, request_id: str) -> list[DecisionRecord]:
        """Records of one request, oldest first."""
        return [record for record in self._records if record.request_id == request_id]
