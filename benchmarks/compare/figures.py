"""What several runs of each contender come to: medians, spreads, and ratios between contenders."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

Runs = Sequence[Mapping[str, Any]]
"""One for each contender and repeat."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Something that is compared; seconds."""

    name: str
    part: str
    """Where the load client's summary has it."""
    statistic: str

    def of(self, run: Mapping[str, Any]) -> float | None:
        """Of one run; None where nothing was measured."""
        part = run["summary"][self.part]
        value: float | None = part and part[self.statistic]
        return value


FIGURES = (
    Figure("TTFT mean", "ttft_s", "mean"),
    Figure("TTFT p99", "ttft_s", "p99"),
    Figure("completion mean", "completion_s", "mean"),
    Figure("completion p99", "completion_s", "p99"),
    Figure("between tokens mean", "gap_s", "mean"),
)


@dataclass(frozen=True, slots=True)
class Spread:
    """The median over the repeats, and the least and the most of them."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Spread | None":
        """None where a repeat has no value."""
        known = list(values)
        if not known or None in known:
            return None
        numbers = [float(one) for one in known if one is not None]
        return cls(median(numbers), min(numbers), max(numbers))


Table = dict[str, dict[str, Spread | None]]
"""Contender → name of the figure → what it came to."""


def names(runs: Runs) -> list[str]:
    """The contenders, in the order in which they first ran."""
    return list(dict.fromkeys(run["run"]["name"] for run in runs))


def table(runs: Runs) -> Table:
    """Every figure of every contender."""
    return {
        name: {one.name: Spread.of(map(one.of, _of(runs, name))) for one in FIGURES}
        for name in names(runs)
    }


@dataclass(frozen=True, slots=True)
class Ratio:
    """One contender's figure over the lowest of the others', repeat by repeat."""

    figure: str
    best: str
    """Of the others, the one with the lowest median."""
    ratio: Spread


def ratios(runs: Runs, ours: str, others: Sequence[str]) -> list[Ratio]:
    """Of the figures that all of them have."""
    figures, found = table(runs), []
    for one in FIGURES:
        medians = {name: spread.median for name in others if (spread := figures[name][one.name])}
        if not medians or figures[ours][one.name] is None:
            continue
        best = min(medians, key=medians.__getitem__)
        pairs = zip(_of(runs, ours), _of(runs, best), strict=True)
        spread = Spread.of(_divided(one.of(mine), one.of(its)) for mine, its in pairs)
        if spread is not None:
            found.append(Ratio(one.name, best, spread))
    return found


def to_json(runs: Runs, ours: str | None, others: Sequence[str]) -> dict[str, Any]:
    """The table and the ratios."""
    return {
        "contenders": {
            name: {figure: spread and asdict(spread) for figure, spread in row.items()}
            for name, row in table(runs).items()
        },
        "ratios": [asdict(one) for one in ratios(runs, ours, others)] if ours else [],
    }


def _of(runs: Runs, name: str) -> list[Mapping[str, Any]]:
    found = [run for run in runs if run["run"]["name"] == name]
    return sorted(found, key=lambda run: run["run"]["repeat"])


def _divided(one: float | None, by: float | None) -> float | None:
    return None if one is None or not by else one / by
