"""Sentences and tables about results, for the terminal and the page."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.report.figures import (
    HEADLINES,
    Beside,
    ContenderRuns,
    Metric,
    TurnSpread,
    beside_best,
    contenders,
    rivals,
    spread,
)
from benchmarks.report.results import Fault, RequestResult, Results, RunResult, read
from extproc.ground.text import Column, paragraph, table

HARM_HEAD = (
    *("hit", "lost", "elsewhere", "later", "until s", "slowest s"),
    *("before: mean", "p99", "after: mean", "p99"),
)
_TERMS = (
    "Lost: hit requests that failed. Elsewhere: other requests in flight at the fault that failed. "
    "Later: requests sent after the fault that failed; until: time from the fault to the last of "
    "them. Slowest: longest request that ended after the fault, failed or not. Before and after: "
    "completion of answered requests sent before (without hit requests) and after the fault. "
    "!: some runs are in doubt."
)


@dataclass(frozen=True, slots=True)
class Harm:
    """Harm that a fault did in a run; times in seconds."""

    hit: int  # requests in flight on the part at the time of the fault
    lost: int  # hit requests that failed
    elsewhere: int  # other requests in flight at the fault that failed
    later: int  # requests sent after the fault that failed
    until_s: float | None  # from the fault until the last of `later` was sent
    slowest_s: float | None  # longest request that ended after the fault, failed or not
    before_s: list[float]  # completions of requests sent before the fault and not hit
    after_s: list[float]  # completions of requests sent after the fault

    @property
    def failed(self) -> int:
        return self.lost + self.elsewhere + self.later


def harm(run: RunResult) -> Harm:
    assert run.fault
    at_s = run.fault.at_s
    hit = [request for request in run.counted if request.struck]
    before = [request for request in run.counted if request.sent_s <= at_s and not request.struck]
    after = [request for request in run.counted if request.sent_s > at_s]
    later = [request.sent_s - at_s for request in after if not request.answered]
    ends = [(request.sent_s, request.ended_s) for request in run.counted]
    return Harm(
        hit=len(hit),
        lost=sum(not request.answered for request in hit),
        elsewhere=sum(
            not request.answered and (request.ended_s or 0.0) > at_s for request in before
        ),
        later=len(later),
        until_s=max(later, default=None),
        slowest_s=max((end - sent for sent, end in ends if end and end > at_s), default=None),
        before_s=_completions(before),
        after_s=_completions(after),
    )


def _completions(requests: Sequence[RequestResult]) -> list[float]:
    return [
        request.completion_s for request in requests if request.answered and request.completion_s
    ]


def harm_rows(results: Results, every: Sequence[ContenderRuns]) -> Iterator[list[str]]:
    """Rows of the fault table: a contender's name and its harm over all runs. Counts are sums,
    ``until`` and ``slowest`` are the highest values, and other times are medians."""
    for contender in every:
        yield [marked(contender), *_cells([harm(run) for run in contender.runs if run.fault])]
    for name in results.without_part:
        yield [f"{name}: has none", *["–"] * len(HARM_HEAD)]


def describe_fault(fault: Fault) -> str:
    """Sentences that describe the fault and explain the terms of the table."""
    hit = "all requests in flight" if fault.part == "picker" else "requests in flight on it"
    return f"{fault.part} {fault.way} after {fault.at_s:g} s. Hit: {hit} at that time. {_TERMS}"


def _cells(turns: Sequence[Harm]) -> Iterator[str]:
    for count in ("hit", "lost", "elsewhere", "later"):
        yield f"{sum(getattr(turn, count) for turn in turns):,}"
    for most in ("until_s", "slowest_s"):
        yield _median([max((getattr(turn, most) or 0.0 for turn in turns), default=0.0)])
    for sent in ("before_s", "after_s"):
        completions = [times for turn in turns if (times := getattr(turn, sent))]
        yield _median([float(np.mean(times)) for times in completions])
        yield _median([float(np.percentile(times, 99)) for times in completions])


def _median(values: Sequence[float]) -> str:
    return f"{np.median(values):.2f}" if any(values) else "–"


_KNOWN_LENGTHS = (
    "Warning: requests said how long their answers would be (max_tokens with ignore_eos). Real "
    "callers seldom say it: a router that uses it predicts better here than in production."
)


def outcome(results: Results, every: Sequence[ContenderRuns]) -> list[str]:
    """Sentences on the figures in which this router wins or loses, on failures and warnings."""
    sentences = [
        *([describe_fault(results.fault)] if results.fault else comparison(results, every))
    ]
    if results.about.get("known_lengths"):
        sentences.append(_KNOWN_LENGTHS)
    failed = [
        f"{contender.name} {contender.failed:,} of {contender.counted:,}"
        for contender in every
        if contender.failed
    ]
    if failed:
        sentences.append(
            f"Failed requests: {', '.join(failed)}. Figures are of answered requests only."
        )
    warnings = ((run.name, text) for run in results.runs for text in run.warnings)
    return sentences + [f"Warning, {name}: {text}" for name, text in dict.fromkeys(warnings)]


def comparison(results: Results, every: Sequence[ContenderRuns]) -> Iterator[str]:
    """Sentences that compare this router with the best of the others, and name runs in doubt."""
    subject, others = rivals(every, results.ours)
    if subject is None:
        yield f"{results.ours[0]} has no run: nothing is compared."
    elif not any(subject.figures.values()):
        yield f"{subject.name}: no request was answered."
    else:
        yield from _headlines(subject, others)
    doubtful = [
        f"{contender.name} in {of_turns(contender)}" for contender in every if contender.doubtful
    ]
    if doubtful:
        yield f"In doubt: {', '.join(doubtful)}. Comparisons leave these runs out."


def marked(contender: ContenderRuns) -> str:
    """Name of a contender, with a mark if some of its runs are in doubt."""
    return f"{contender.name} !" if contender.doubtful else contender.name


def figure_cells(contender: ContenderRuns, metrics: Iterable[Metric]) -> list[str]:
    """Cells of a table for the metrics of a contender, in seconds."""
    return [median_and_range(spread(contender, metric)) for metric in metrics]


def of_turns(contender: ContenderRuns) -> str:
    """Share of a contender's runs that are in doubt, as ``1 of 3 runs``."""
    turns = len(contender.runs)
    return f"{len(contender.doubtful)} of {turns} run{'s' * (turns > 1)}"


def _headlines(subject: ContenderRuns, others: list[ContenderRuns]) -> Iterator[str]:
    compared = [beside_best(subject, others, metric) for metric in HEADLINES]
    for metric, beside in zip(HEADLINES, compared, strict=True):
        turns = spread(subject, metric)
        if beside is not None:
            yield (
                f"{metric.name}: {subject.name} is {short(beside.ratio.median)}× the best other "
                f"({', '.join(beside.names)}), {_verdict(beside)}. "
                f"{short(beside.mine.median)} s against {short(beside.best.median)} s."
            )
        elif turns is not None:
            yield f"{metric.name}: {short(turns.median)} s."
    if others and not any(compared):
        yield f"Nothing is compared: in no run are both {subject.name} and another without doubt."


def _verdict(beside: Beside) -> str:
    turns, least, most = beside.ratio.turns, short(beside.ratio.least), short(beside.ratio.most)
    if turns == 1:
        return "in a single run, which shows no spread"
    where = "" if least == most else f" ({least}…{most})"
    if beside.better is None:
        return f"better in {beside.less} of {turns} runs{where}: no clear difference"
    return f"{'better' if beside.better else 'worse'} in all {turns} runs{where}"


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
        f"{label:{_NAME}}{_statistic(summary['ttft_s'], 'mean'):>7}"
        f"{_statistic(summary['ttft_s'], 'p99'):>7}"
        f"{_statistic(summary['completion_s'], 'mean'):>10}"
        f"{_statistic(summary['completion_s'], 'p99'):>8}"
        f"{summary['hits']:>8.0%}{imbalance:>8}"
        f"{machine['cpu_share']:>7.0%}{machine['cpu_own_share']:>7.0%}"
        f"{machine['cpu_busiest_second']:>7.0%}"
        f"{1e3 * machine['client_late_p99_s']:>10.1f}{1e3 * machine['replicas_late_p99_s']:>10.1f}"
    )
    wrong = [f"  wrong: {complaint}" for complaint in run["complaints"]]
    doubtful = [f"  the machine did not keep up: {doubt}" for doubt in machine["doubts"]]
    return "\n".join([cells, *wrong, *doubtful])


def terminal_result(measured: Mapping[str, Any]) -> str:
    """Table and conclusions from the object that ``--json`` writes."""
    results = read(measured)
    every = contenders(results)
    if results.fault:
        heads = [Column("", left=True), *map(Column, HARM_HEAD)]
        rows = list(harm_rows(results, every))
        lines = [*paragraph(describe_fault(results.fault), 0), "", *table(heads, rows)]
    else:
        lines = [*_figures(results, every)]
    health = f"{len(results.runs)} runs of {len(every)} contenders: {_health(results)}"
    return "\n".join([*lines, "", health])


def _figures(results: Results, every: list[ContenderRuns]) -> Iterator[str]:
    turns = max(len(contender.runs) for contender in every)
    yield f"Seconds; median of {turns} runs (least…most)" if turns > 1 else "Seconds"
    heads = [Column("", left=True), *(Column(metric.name) for metric in HEADLINES)]
    yield from table(heads, [[marked(each), *figure_cells(each, HEADLINES)] for each in every])
    if any(contender.doubtful for contender in every):
        yield "!: some runs are in doubt"
    yield ""
    yield from comparison(results, every)


def _health(results: Results) -> str:
    wrong = sum(bool(run.complaints) for run in results.runs)
    doubtful = sum(bool(run.doubts) for run in results.runs)
    if wrong or doubtful:
        return f"{wrong} went wrong, in {doubtful} the machine did not keep up"
    failed = "" if results.fault else "no request failed, "
    return f"each contender applied its own policy, {failed}and the machine kept up"


def median_and_range(turns: TurnSpread | None) -> str:
    """``12.2 (10.7…13.8)``; the median alone for a single run; ``–`` for None."""
    if turns is None:
        return "–"
    least, most = short(turns.least), short(turns.most)
    return short(turns.median) + ("" if least == most else f" ({least}…{most})")


def _statistic(times: Mapping[str, float] | None, name: str) -> str:
    return "–" if not times else short(times[name])


def short(figure: float) -> str:
    """Formats a time in seconds, or a ratio: ``0.412``, ``6.61``, ``1,234``."""
    if figure >= 100 or not figure:
        return f"{figure:,.0f}"
    return f"{figure:.3f}" if figure < 1 else f"{figure:.2f}"
