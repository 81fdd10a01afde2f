"""The figures of the page: per contender over its repeats, and beside the best of the others."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from benchmarks.report.results import Request, Results, Run

Of = Callable[[Run], float | None]


@dataclass(frozen=True)
class Metric:
    """A figure of one run; less is better."""

    name: str
    of: Of
    headline: bool = False
    """Worth a sentence."""


@dataclass(frozen=True)
class Spread:
    """A figure over repeats."""

    median: float
    low: float
    high: float
    repeats: int

    def overlaps(self, other: "Spread") -> bool:
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class Beside:
    """A contender's figure beside the best of others."""

    name: str
    """The best of the others."""
    its: Spread
    ratio: Spread
    """Of repeats measured after each other: median, least and greatest of their ratios."""
    overlap: bool
    """The ranges of the two overlap, so that neither is shown to be better."""


def ttft(one: Request) -> float | None:
    """Seconds to the first token."""
    return one.ttft_s


def completion(one: Request) -> float | None:
    """Seconds to the end of the answer."""
    return one.completion_s


def token_time(one: Request) -> float | None:
    """Seconds between chunks, on average over the response."""
    return one.gaps_s.mean if one.gaps_s else None


def measured(run: Run, what: Callable[[Request], float | None]) -> list[float]:
    """Of the answered requests, those that have it."""
    return [value for one in run.answered if (value := what(one)) is not None]


def _mean(what: Callable[[Request], float | None]) -> Of:
    return lambda run: float(np.mean(values)) if (values := measured(run, what)) else None


def _percentile(what: Callable[[Request], float | None], percent: float) -> Of:
    return lambda run: (
        float(np.percentile(values, percent)) if (values := measured(run, what)) else None
    )


METRICS = (
    Metric("Completion, p99", _percentile(completion, 99), headline=True),
    Metric("Completion, p95", _percentile(completion, 95)),
    Metric("Completion, p50", _percentile(completion, 50)),
    Metric("Completion, mean", _mean(completion), headline=True),
    Metric("TTFT, p99", _percentile(ttft, 99), headline=True),
    Metric("TTFT, p50", _percentile(ttft, 50)),
    Metric("TTFT, mean", _mean(ttft), headline=True),
    Metric("Time per token, p99", _percentile(token_time, 99)),
)


@dataclass(frozen=True)
class Contender:
    """One way of routing, and its runs."""

    name: str
    reference: bool
    runs: Sequence[Run]

    @cached_property
    def counted(self) -> int:
        """Requests that figures are of."""
        return sum(len(run.counted) for run in self.runs)

    @cached_property
    def failed(self) -> int:
        """Of these, those without a whole answer."""
        return self.counted - sum(len(run.answered) for run in self.runs)

    @cached_property
    def figures(self) -> dict[str, dict[int, float]]:
        """Of each metric that can be had, its value by repeat."""
        values = {
            metric.name: {run.run.repeat: metric.of(run) for run in self.runs} for metric in METRICS
        }
        return {
            name: {repeat: value for repeat, value in by_repeat.items() if value is not None}
            for name, by_repeat in values.items()
        }


def contenders(results: Results) -> list[Contender]:
    """In the order of their first runs."""
    runs: dict[str, list[Run]] = {}
    for run in results.runs:
        runs.setdefault(run.run.name, []).append(run)
    return [Contender(name, of[0].run.reference, of) for name, of in runs.items()]


def spread(contender: Contender, metric: Metric) -> Spread | None:
    """None where no repeat has the figure."""
    return _spread(contender.figures[metric.name].values())


def beside_best(contender: Contender, others: Iterable[Contender], metric: Metric) -> Beside | None:
    """Beside that of the others with the lowest median; None where there is nothing to compare."""
    mine = spread(contender, metric)
    figures = [(other, spread(other, metric)) for other in others if other is not contender]
    known = [(other, its) for other, its in figures if its is not None and its.low > 0]
    if mine is None or not known:
        return None
    best, its = min(known, key=lambda pair: pair[1].median)
    own, theirs = contender.figures[metric.name], best.figures[metric.name]
    paired = _spread(own[repeat] / theirs[repeat] for repeat in own if repeat in theirs)
    ratio = paired or _spread([mine.median / its.median])
    assert ratio is not None
    return Beside(best.name, its, ratio, mine.overlaps(its))


def rivals(of: Sequence[Contender], ours: Sequence[str]) -> tuple[Contender, list[Contender]]:
    """The contender that the page's sentences are about, and those it is measured against."""
    subject = next((one for one in of if one.name in ours[:1]), of[0])
    mine = {subject.name, *ours}
    return subject, [one for one in of if one.name not in mine and not one.reference]


def _spread(values: Iterable[float]) -> Spread | None:
    listed = list(values)
    if not listed:
        return None
    return Spread(float(np.median(listed)), min(listed), max(listed), len(listed))
