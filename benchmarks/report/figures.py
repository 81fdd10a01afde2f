"""Figures of each contender, and their ratios to the best other contender."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np

from benchmarks.report.results import Results, RunResult, read


@dataclass(frozen=True)
class Metric:
    """Mean or percentile over the answered requests of a run; lower is better."""

    name: str
    attribute: str  # of a request
    percent: float | None = None  # percentile; None: the mean
    headline: bool = False  # in short tables, sentences and pictures

    def figure(self, run: RunResult) -> float | None:
        values = measured(run, self.attribute)
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
HEADLINES = [metric for metric in METRICS if metric.headline]


@dataclass(frozen=True)
class TurnSpread:
    """Median, lowest and highest value of a contender's runs."""

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
    """Figure of a contender, compared with the best other contender.

    Figures are compared only within the same run, and only if neither contender's run is in
    doubt.
    """

    mine: TurnSpread
    best: TurnSpread  # of the best other contender of each run
    names: tuple[str, ...]  # of the best other contenders, the most frequent first
    ratio: TurnSpread
    less: int  # runs in which the contender's figure is less
    more: int

    @property
    def better(self) -> bool | None:
        """True if better in all runs, False if worse in all; None if mixed or a single run."""
        turns = self.ratio.turns
        if turns < 2 or turns not in (self.less, self.more):
            return None
        return self.less == turns


@dataclass(frozen=True)
class ContenderRuns:
    name: str
    reference: bool
    runs: Sequence[RunResult]

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
        """Values by metric and run; runs without a value are missing."""
        values = {
            metric.name: {run.repeat: metric.figure(run) for run in self.runs} for metric in METRICS
        }
        return {
            name: {turn: value for turn, value in turns.items() if value is not None}
            for name, turns in values.items()
        }

    def sound(self, metric: Metric) -> dict[int, float]:
        """Values of a metric by run, without runs in doubt."""
        values = self.figures[metric.name]
        return {turn: value for turn, value in values.items() if turn not in self.doubtful}


def measured(run: RunResult, attribute: str) -> list[float]:
    """Values of an attribute of the answered requests, without None. TTFT of a response that came
    whole is left out, because its client saw no first token."""
    seen = (each for each in run.answered if attribute != "ttft_s" or each.streamed is not False)
    return [value for each in seen if (value := getattr(each, attribute)) is not None]


def contenders(results: Results) -> list[ContenderRuns]:
    by_name: dict[str, list[RunResult]] = {}
    for run in results.runs:
        by_name.setdefault(run.name, []).append(run)
    return [ContenderRuns(name, runs[0].reference, runs) for name, runs in by_name.items()]


def spread(contender: ContenderRuns, metric: Metric) -> TurnSpread | None:
    """Spread over all runs, in doubt or not; None if no run has the figure."""
    values = contender.figures[metric.name].values()
    return TurnSpread.of(values) if values else None


def beside_best(
    contender: ContenderRuns, others: Iterable[ContenderRuns], metric: Metric
) -> Beside | None:
    """Compares a contender with the lowest figure of the others in the same run; None if no run
    can be compared."""
    own = contender.sound(metric)
    sound = [(other.name, other.sound(metric)) for other in others if other is not contender]
    candidates = {
        turn: [(values[turn], name) for name, values in sound if values.get(turn, 0) > 0]
        for turn in own
    }
    best = {turn: min(found) for turn, found in candidates.items() if found}
    if not best:
        return None
    ratios = [own[turn] / value for turn, (value, _) in best.items()]
    return Beside(
        mine=TurnSpread.of([own[turn] for turn in best]),
        best=TurnSpread.of([value for value, _ in best.values()]),
        names=tuple(name for name, _ in Counter(name for _, name in best.values()).most_common()),
        ratio=TurnSpread.of(ratios),
        less=sum(ratio < 1 for ratio in ratios),
        more=sum(ratio > 1 for ratio in ratios),
    )


def rivals(
    every: Sequence[ContenderRuns], ours: Sequence[str]
) -> tuple[ContenderRuns | None, list[ContenderRuns]]:
    """Returns this router's main contender (None: it has no run), and those to compare it with."""
    named = (contender for contender in every if contender.name in ours[:1])
    subject = next(named, None if ours else every[0])
    own = {subject and subject.name, *ours}
    others = [other for other in every if other.name not in own and not other.reference]
    return subject, others


def to_json(measured_runs: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of every contender and ratios of this router, from the object of ``--json``."""
    results = read(measured_runs)
    every = contenders(results)
    subject, others = rivals(every, results.ours)
    beside = {
        metric.name: beside_best(subject, others, metric) if subject else None for metric in METRICS
    }
    return {
        "contenders": {
            contender.name: {
                "turns": len(contender.runs),
                "in_doubt": len(contender.doubtful),
                **{metric.name: _json(spread(contender, metric)) for metric in METRICS},
            }
            for contender in every
        },
        "beside_best": {name: _json(figures) for name, figures in beside.items()},
    }


def _json(figures: TurnSpread | Beside | None) -> dict[str, Any] | None:
    return asdict(figures) if figures else None
