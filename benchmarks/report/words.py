"""Results in sentences and tables, on the terminal and the page, and figures for people."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.report.figures import (
    HEADLINES,
    Beside,
    Contender,
    Spread,
    beside_best,
    contenders,
    rivals,
    spread,
)
from benchmarks.report.results import Results, Run, read
from extproc.ground.text import Column, paragraph, table

HARM_HEAD = (
    *("hit", "lost", "elsewhere", "later", "until s", "slowest s"),
    *("before: mean", "p99", "after: mean", "p99"),
)
_TERMS = (
    "Failed requests: lost, of those hit; elsewhere, of the others that were in flight; later, of "
    "those sent afterwards, the last of them until so long after the fault. Slowest: from sending "
    "to the end, good or bad. Before and after: completion of the answered requests that were "
    "sent before and after the fault, without those hit. !: some turns are in doubt."
)


@dataclass(frozen=True, slots=True)
class Harm:
    """Harm of a fault in one turn; times in seconds."""

    hit: int  # requests that were in flight on the part when the fault fell
    lost: int  # those of them that failed
    elsewhere: int  # others in flight then that failed
    later: int  # requests sent afterwards that failed
    until_s: float | None  # when the last of these was sent, after the fault
    slowest_s: float | None  # of the requests that ended after the fault, failed ones too
    before_s: list[float]  # completions of requests sent before and not hit
    after_s: list[float]  # completions of requests sent afterwards

    @property
    def failed(self) -> int:
        return self.lost + self.elsewhere + self.later


def harm(run: Run) -> Harm:
    assert run.fault
    at_s = run.fault.at_s
    hit = [one for one in run.counted if one.struck]
    before = [one for one in run.counted if one.sent_s <= at_s and not one.struck]
    after = [one for one in run.counted if one.sent_s > at_s]
    late = [one.sent_s - at_s for one in after if not one.answered]
    ends = [(one.sent_s, one.ended_s) for one in run.counted]
    return Harm(
        hit=len(hit),
        lost=sum(not one.answered for one in hit),
        elsewhere=sum(not one.answered and (one.ended_s or 0.0) > at_s for one in before),
        later=len(late),
        until_s=max(late, default=None),
        slowest_s=max((end - sent for sent, end in ends if end and end > at_s), default=None),
        before_s=[one.completion_s for one in before if one.answered and one.completion_s],
        after_s=[one.completion_s for one in after if one.answered and one.completion_s],
    )


def harm_rows(results: Results, every: Sequence[Contender]) -> Iterator[list[str]]:
    """Rows of name and figures: counts are sums over turns, ``until`` and ``slowest`` the most of
    any turn, other times medians.
    """
    for one in every:
        name = f"{one.name} !" if one.doubtful else one.name
        yield [name, *_cells([harm(run) for run in one.runs if run.fault])]
    for name in results.without_part:
        yield [f"{name}: has none", *["–"] * len(HARM_HEAD)]


def describe_fault(results: Results) -> str:
    """Sentence on the fault, and the terms of the table."""
    assert results.fault
    part, _, way = results.fault.name.partition("-")
    there = "all that were in flight" if part == "picker" else "requests in flight on it"
    return f"{part} {way} after {results.fault.at_s:g} s. Hit: {there} then. {_TERMS}"


def _cells(turns: Sequence[Harm]) -> Iterator[str]:
    for count in ("hit", "lost", "elsewhere", "later"):
        yield f"{sum(getattr(one, count) for one in turns):,}"
    for most in ("until_s", "slowest_s"):
        yield _seconds([max((getattr(one, most) or 0.0 for one in turns), default=0.0)])
    for sent in ("before_s", "after_s"):
        completions = [times for one in turns if (times := getattr(one, sent))]
        yield _seconds([float(np.mean(times)) for times in completions])
        yield _seconds([float(np.percentile(times, 99)) for times in completions])


def _seconds(values: Sequence[float]) -> str:
    return f"{np.median(values):.2f}" if any(values) else "–"


_TOLD = (
    "Warning: requests told how long their answers would be (max_tokens with ignore_eos), which "
    "callers seldom do: whoever predicts from them predicts better than with yours."
)


def outcome(results: Results, contenders: Sequence[Contender]) -> list[str]:
    """Sentences on where our contender wins and loses, on failures and on warnings."""
    said = [describe_fault(results)] if results.fault else list(comparison(results, contenders))
    if results.about.get("known_lengths"):
        said.append(_TOLD)
    failed = [f"{one.name} {one.failed:,} of {one.counted:,}" for one in contenders if one.failed]
    if failed:
        said.append(f"Failed requests: {', '.join(failed)}. Figures are of those answered.")
    warnings = ((run.name, text) for run in results.runs for text in run.warnings)
    return said + [f"Warning, {name}: {text}" for name, text in dict.fromkeys(warnings)]


def comparison(results: Results, contenders: Sequence[Contender]) -> Iterator[str]:
    """Sentences on our contender beside the best of the others, and on turns in doubt."""
    subject, others = rivals(contenders, results.ours)
    if subject is None:
        yield f"{results.ours[0]} has no run: nothing is compared."
    elif not any(subject.figures.values()):
        yield f"{subject.name}: no request was answered."
    else:
        yield from _about(subject, others)
    doubtful = [f"{one.name} in {of_turns(one)}" for one in contenders if one.doubtful]
    if doubtful:
        yield f"In doubt: {', '.join(doubtful)}. Comparisons leave these turns out."


def of_turns(one: Contender) -> str:
    """Share of a contender's turns that are in doubt, as ``1 of 3 turns``."""
    return f"{len(one.doubtful)} of {len(one.runs)} turn{'s' * (len(one.runs) > 1)}"


def _about(subject: Contender, others: Sequence[Contender]) -> Iterator[str]:
    compared = [beside_best(subject, others, metric) for metric in HEADLINES]
    for metric, beside in zip(HEADLINES, compared, strict=True):
        its = spread(subject, metric)
        if beside is not None:
            yield (
                f"{metric.name}: {subject.name} is {ratio(beside.ratio.median)} the best other "
                f"({', '.join(beside.names)}), {_verdict(beside)}. "
                f"{seconds(beside.mine.median)} against {seconds(beside.best.median)}."
            )
        elif its is not None:
            yield f"{metric.name}: {seconds(its.median)}."
    if others and not any(compared):
        yield f"Nothing is compared: in no turn are both {subject.name} and another without doubt."


def _verdict(beside: Beside) -> str:
    turns = beside.ratio.turns
    if turns == 1:
        return "in one turn, which shows no spread"
    spread = ratios(beside.ratio.least, beside.ratio.most)
    where = f" ({spread})" if spread else ""
    if beside.better is None:
        return f"better in {beside.less} of {turns} turns{where}: no clear difference"
    return f"{'better' if beside.better else 'worse'} in all {turns} turns{where}"


# -- units ----------------------------------------------------------------------------------


def seconds(value: float) -> str:
    """Time to three digits, in the unit that suits: ``7.20 ms``, ``412 ms``, ``6.61 s``."""
    return f"{_digits(1000 * value)} ms" if value < 0.9995 else f"{_digits(value)} s"


def between(least: float, most: float) -> str:
    """Range with its unit once, ``6.15 – 7.02 s``; empty if both ends are alike."""
    scale, unit = (1000, "ms") if most < 0.9995 else (1, "s")
    return _range(_digits(scale * least), _digits(scale * most), f" {unit}")


def ratio(value: float) -> str:
    return f"{value:.2f}×" if value < 10 else f"{value:.0f}×"


def ratios(least: float, most: float) -> str:
    """Range of ratios, ``0.45 – 0.52×``; empty if both ends are alike."""
    return _range(ratio(least)[:-1], ratio(most)[:-1], "×")


def _range(least: str, most: str, unit: str) -> str:
    return "" if least == most else f"{least} – {most}{unit}"


def _digits(value: float) -> str:
    places = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{places}f}"


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


def terminal_result(of: Mapping[str, Any]) -> str:
    """Table and conclusions of the object that ``--json`` writes."""
    known = read(of)
    every = contenders(known)
    if known.fault:
        heads = [Column("", left=True), *map(Column, HARM_HEAD)]
        rows = list(harm_rows(known, every))
        lines = [*paragraph(describe_fault(known), 0), "", *table(heads, rows)]
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
