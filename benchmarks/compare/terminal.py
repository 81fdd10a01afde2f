"""Comparison on the terminal."""

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.report import faults
from benchmarks.report.figures import HEADLINES, Contender, Spread, contenders, spread
from benchmarks.report.results import Results, read
from benchmarks.report.words import comparison
from extproc.ground.text import Column, paragraph, table

_NAME = 30


def progress_header() -> str:
    return (
        f"{'':{_NAME}}{'TTFT s':>14}{'completion s':>18}{'prefix':>8}{'':>8}{'CPU':>21}"
        f"{'client':>10}{'replicas':>10}\n"
        f"{'run':{_NAME}}{'mean':>7}{'p99':>7}{'mean':>10}{'p99':>8}{'hits':>8}{'imbal.':>8}"
        f"{'all':>7}{'own':>7}{'most':>7}{'late ms':>10}{'late ms':>10}"
    )


def progress_line(run: Mapping[str, Any]) -> str:
    summary, machine = run["summary"], run["validity"]
    imbalance = "–" if (ratio := summary["imbalance"]) is None else f"{ratio:.2f}"
    label = f"{run['run']['repeat'] + 1} {run['run']['name']}"
    cells = (
        f"{label:{_NAME}}{_of(summary['ttft_s'], 'mean'):>7}{_of(summary['ttft_s'], 'p99'):>7}"
        f"{_of(summary['completion_s'], 'mean'):>10}{_of(summary['completion_s'], 'p99'):>8}"
        f"{summary['hits']:>8.0%}{imbalance:>8}"
        f"{machine['cpu_share']:>7.0%}{machine['cpu_own_share']:>7.0%}"
        f"{machine['cpu_busiest_second']:>7.0%}"
        f"{1e3 * machine['client_late_p99_s']:>10.1f}{1e3 * machine['replicas_late_p99_s']:>10.1f}"
    )
    wrong = [f"  wrong: {one}" for one in run["complaints"]]
    doubtful = [f"  the machine did not keep up: {one}" for one in machine["doubts"]]
    return "\n".join([cells, *wrong, *doubtful])


def result(of: Mapping[str, Any]) -> str:
    """Table and conclusions of the object that ``--json`` writes."""
    known = read(of)
    assert isinstance(known, Results)
    every = contenders(known)
    if known.fault:
        heads = [Column("", left=True), *map(Column, faults.HEAD)]
        rows = list(faults.rows(known, every))
        lines = [*paragraph(faults.what(known), 0), "", *table(heads, rows)]
    else:
        lines = [*_figures(known, every)]
    health = f"{len(known.runs)} turns of {len(every)} contenders: {_health(known)}"
    return "\n".join([*lines, "", health])


def _figures(results: Results, every: list[Contender]) -> Iterator[str]:
    turns = max(len(one.runs) for one in every)
    yield f"Seconds; median of {turns} turns (least…most)" if turns > 1 else "Seconds"
    yield from table(
        [Column("", left=True), *(Column(one.name) for one in HEADLINES)],
        [
            [f"{one.name} !" if one.doubtful else one.name]
            + [median_and_range(spread(one, metric)) for metric in HEADLINES]
            for one in every
        ],
    )
    if any(one.doubtful for one in every):
        yield "!: some turns are in doubt"
    yield ""
    yield from comparison(results, every)


def _health(results: Results) -> str:
    wrong = sum(bool(run.complaints) for run in results.runs)
    doubtful = sum(bool(run.doubts) for run in results.runs)
    if wrong or doubtful:
        return f"{wrong} did not go as they should, in {doubtful} the machine did not keep up"
    failed = "" if results.fault else "no request failed, "
    return f"each did its own policy, {failed}and the machine kept up"


def median_and_range(one: Spread | None) -> str:
    """``12.2 (10.7…13.8)``; the median alone where there is but one turn."""
    if one is None:
        return "–"
    least, most = _short(one.least), _short(one.most)
    return _short(one.median) + ("" if least == most else f" ({least}…{most})")


def _of(part: Mapping[str, float] | None, statistic: str) -> str:
    return "–" if not part else _short(part[statistic])


def _short(figure: float) -> str:
    if figure >= 100 or not figure:
        return f"{figure:,.0f}"
    return f"{figure:.3f}" if figure < 1 else f"{figure:.2f}"
