"""The comparison for people."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.compare.figures import FIGURES, Ratio, Runs, Spread, names, ratios, table

_NAME = 28
_CELL = 21


def progress_header() -> str:
    """Above the lines of the runs."""
    return (
        f"{'':{_NAME}}{'TTFT s':>14}{'completion s':>18}{'CPU':>21}"
        f"{'client':>10}{'replicas':>10}\n"
        f"{'run':{_NAME}}{'mean':>7}{'p99':>7}{'mean':>10}{'p99':>8}{'all':>7}{'own':>7}{'most':>7}"
        f"{'late ms':>10}{'late ms':>10}"
    )


def progress_line(run: Mapping[str, Any]) -> str:
    """One run that has ended, and what is wrong with it."""
    summary, machine = run["summary"], run["validity"]
    label = f"{run['run']['repeat'] + 1} {run['run']['name']}"
    cells = (
        f"{label:{_NAME}}{_of(summary['ttft_s'], 'mean'):>7}{_of(summary['ttft_s'], 'p99'):>7}"
        f"{_of(summary['completion_s'], 'mean'):>10}{_of(summary['completion_s'], 'p99'):>8}"
        f"{machine['cpu_share']:>7.0%}{machine['cpu_own_share']:>7.0%}"
        f"{machine['cpu_busiest_second']:>7.0%}"
        f"{1e3 * machine['client_late_p99_s']:>10.1f}{1e3 * machine['replicas_late_p99_s']:>10.1f}"
    )
    wrong = [f"  wrong: {one}" for one in run["complaints"]]
    doubtful = [f"  the machine did not keep up: {one}" for one in machine["doubts"]]
    return "\n".join([cells, *wrong, *doubtful])


def result(runs: Runs, ours: str | None, others: Sequence[str]) -> str:
    """The table, and what it says of ours."""
    return "\n".join(_lines(runs, ours, others))


def _lines(runs: Runs, ours: str | None, others: Sequence[str]) -> Iterator[str]:
    repeats = 1 + max(run["run"]["repeat"] for run in runs)
    yield f"Seconds; median of {repeats}, (least … most)" if repeats > 1 else "Seconds"
    yield f"{'':{_NAME}}" + "".join(f"{one.name:>{_CELL}}" for one in FIGURES)
    for name, row in table(runs).items():
        yield f"{name:{_NAME}}" + "".join(f"{_spread(one):>{_CELL}}" for one in row.values())
    if ours and others:
        yield ""
        for one in ratios(runs, ours, others):
            yield _ratio(ours, one)
    doubtful = sum(bool(run["validity"]["doubts"]) for run in runs)
    wrong = sum(bool(run["complaints"]) for run in runs)
    yield ""
    yield f"{len(runs)} runs of {len(names(runs))} contenders: " + (
        f"{wrong} did not go as they should, in {doubtful} the machine did not keep up"
        if wrong or doubtful
        else "each did its own policy, no request failed, and the machine kept up"
    )


def _ratio(ours: str, one: Ratio) -> str:
    spread = one.ratio
    return (
        f"{one.figure} of {ours} is {spread.median:.2f}× ({spread.least:.2f} … {spread.most:.2f}) "
        f"that of the best other, {one.best}"
    )


def _spread(one: Spread | None) -> str:
    if one is None:
        return "–"
    if one.least == one.most:
        return _short(one.median)
    return f"{_short(one.median)} ({_short(one.least)}…{_short(one.most)})"


def _of(part: Mapping[str, float] | None, statistic: str) -> str:
    return "–" if not part else _short(part[statistic])


def _short(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds < 1 else f"{seconds:.2f}"
