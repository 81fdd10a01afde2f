"""Figures of a comparison, for terminal, page and JSON: per contender, and beside the best."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np

from benchmarks.report.results import Results, Run, read


@dataclass(frozen=True)
class Metric:
    """Figure of a run's answered requests; less is better."""

    name: str
    of: str  # attribute of a request
    percent: float | None = None  # its percentile; None: its mean
    headline: bool = False  # worth a sentence

    def figure(self, run: Run) -> float | None:
        values = measured(run, self.of)
        if not values:
            return None
        percent = self.percent
        return float(np.mean(values) if percent is None else np.percentile(values, percent))


METRICS = (
    Metric("Completion, p99", "completion_s", 99, headline=True),
    Metric("Completion, p95", "completion_s", 95),
    Metric("Completion, p50", "completion_s", 50),
    Metric("Completion, mean", "completion_s", headline=True),
    Metric("TTFT, p99", "ttft_s", 99, headline=True),
    Metric("TTFT, p50", "ttft_s", 50),
    Metric("TTFT, mean", "ttft_s", headline=True),
    Metric("Time per token, p99", "token_s", 99),
)
HEADLINES = [one for one in METRICS if one.headline]


@dataclass(frozen=True)
class Spread:
    median: float
    least: float
    most: float
    turns: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        listed = list(values)
        return cls(float(np.median(listed)), min(listed), max(listed), len(listed))


@dataclass(frozen=True)
class Beside:
    """Figure of a contender beside the best of the others, in the turns where neither is in doubt.

    Figures are compared within a turn only.
    """

    mine: Spread
    best: Spread  # of the best other of each turn
    names: tuple[str, ...]  # who that was, the most frequent first
    ratio: Spread
    less: int  # turns in which the contender's figure is less
    more: int

    @property
    def better(self) -> bool | None:
        """True or False if all turns agree; None if they differ or there is only one."""
        turns = self.ratio.turns
        if turns < 2 or turns not in (self.less, self.more):
            return None
        return self.less == turns


@dataclass(frozen=True)
class Contender:
    name: str
    reference: bool
    runs: Sequence[Run]

    @property
    def counted(self) -> int:
        return sum(len(run.counted) for run in self.runs)

    @property
    def failed(self) -> int:
        return self.counted - sum(len(run.answered) for run in self.runs)

    @cached_property
    def doubtful(self) -> frozenset[int]:
        return frozenset(run.repeat for run in self.runs if run.in_doubt)

    @cached_property
    def figures(self) -> dict[str, dict[int, float]]:
        """Values by metric and turn."""
        values = {one.name: {run.repeat: one.figure(run) for run in self.runs} for one in METRICS}
        return {
            name: {turn: value for turn, value in of.items() if value is not None}
            for name, of in values.items()
        }

    def sound(self, metric: Metric) -> dict[int, float]:
        """Values by turn, without turns in doubt."""
        values = self.figures[metric.name]
        return {turn: value for turn, value in values.items() if turn not in self.doubtful}


def measured(run: Run, what: str) -> list[float]:
    """Values of the answered requests that have one."""
    values = (getattr(one, what) for one in run.answered)
    return [value for value in values if value is not None]


def contenders(results: Results) -> list[Contender]:
    runs: dict[str, list[Run]] = {}
    for run in results.runs:
        runs.setdefault(run.name, []).append(run)
    return [Contender(name, of[0].reference, of) for name, of in runs.items()]


def spread(contender: Contender, metric: Metric) -> Spread | None:
    """Spread over all turns, in doubt or not; None if no turn has the figure."""
    values = contender.figures[metric.name].values()
    return Spread.of(values) if values else None


def beside_best(contender: Contender, others: Iterable[Contender], metric: Metric) -> Beside | None:
    """Comparison with the lowest of the others in the same turn, if any."""
    own = contender.sound(metric)
    theirs = [(one.name, one.sound(metric)) for one in others if one is not contender]
    each = {turn: [(of[turn], name) for name, of in theirs if of.get(turn, 0) > 0] for turn in own}
    best = {turn: min(found) for turn, found in each.items() if found}
    if not best:
        return None
    ratios = [own[turn] / value for turn, (value, _) in best.items()]
    return Beside(
        mine=Spread.of([own[turn] for turn in best]),
        best=Spread.of([value for value, _ in best.values()]),
        names=tuple(name for name, _ in Counter(name for _, name in best.values()).most_common()),
        ratio=Spread.of(ratios),
        less=sum(ratio < 1 for ratio in ratios),
        more=sum(ratio > 1 for ratio in ratios),
    )


def rivals(
    of: Sequence[Contender], ours: Sequence[str]
) -> tuple[Contender | None, list[Contender]]:
    """Contender that sentences are about, None if it has no run, and its rivals."""
    subject = next((one for one in of if one.name in ours[:1]), None if ours else of[0])
    mine = {subject and subject.name, *ours}
    return subject, [one for one in of if one.name not in mine and not one.reference]


def to_json(of: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of every contender and ratios of ours, from the object that ``--json`` writes."""
    results = read(of)
    every = contenders(results)
    subject, others = rivals(every, results.ours)
    beside = {one.name: beside_best(subject, others, one) if subject else None for one in METRICS}
    return {
        "contenders": {
            one.name: {
                "turns": len(one.runs),
                "in_doubt": len(one.doubtful),
                **{metric.name: _json(spread(one, metric)) for metric in METRICS},
            }
            for one in every
        },
        "beside_best": {name: _json(one) for name, one in beside.items()},
    }


def _json(of: Spread | Beside | None) -> dict[str, Any] | None:
    return asdict(of) if of else None
