"""What the page of ``load``, ``compare`` and ``simulate`` says."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from benchmarks.report import latency, load, prediction
from benchmarks.report.figures import (
    METRICS,
    Beside,
    Contender,
    Metric,
    beside_best,
    completion,
    contenders,
    spread,
    ttft,
)
from benchmarks.report.page import Content, Drawing, cell, table
from benchmarks.report.results import Results
from benchmarks.report.sentences import of_turns, outcome
from benchmarks.report.style import looks
from benchmarks.report.units import between, ratio, ratios, seconds

_TERMS = (
    "TTFT is the time until the first token of an answer arrives, completion the time until its "
    "last. Requests are sent when the trace says, whether or not those before are answered. p99 "
    "is the time that 99 of 100 requests stay below. Lower is better everywhere."
)
_SAME = {
    "load": "A recorded trace of requests was sent to one target.",
    "compare": "The same recorded requests were sent to the same replicas once for each way of "
    "choosing the replica of a request.",
    "simulate": "The same recorded requests were played against the same simulated replicas, "
    "under a virtual clock, once for each way of choosing the replica of a request.",
}


def content(results: Results) -> Content:
    """Everything but the files."""
    every = contenders(results)
    return Content(
        _title(results, every),
        f"{_SAME[results.kind]} {_TERMS}",
        outcome(results, every),
        _table(results, every),
        list(_drawings(results, every)),
        results.about,
    )


def _title(results: Results, every: Sequence[Contender]) -> str:
    if len(every) == 1:
        return f"How long requests take: {every[0].name}"
    return f"How long requests take: {len(every)} ways of choosing a replica, side by side"


def _table(results: Results, every: Sequence[Contender]) -> str:
    metrics = [one for one in METRICS if any(spread(each, one) for each in every)]
    rows = (
        [_name(one, every), *_counts(one), *(_cell(one, every, metric) for metric in metrics)]
        for one in every
    )
    head = ["", "Requests", "of them streamed", "Failed", *(one.name for one in metrics)]
    return table(head, rows, " ".join(_notes(results, every)))


def _notes(results: Results, every: Sequence[Contender]) -> Iterator[str]:
    turns = max(len(one.runs) for one in every)
    if turns > 1:
        yield "Requests are those of one turn, failed ones those of all."
        yield f"Median of {turns} turns, below it the least and the greatest."
    if len(every) > 1:
        yield "The figure with × compares with the best other of the same turn: below 1 is better."
        yield (
            "Below it its least and greatest. Shaded: better in all turns. ≈: turns do not agree, "
            "no clear difference."
            if turns > 1
            else "One turn does not show how much of that is chance."
        )
    if any(one.doubtful for one in every):
        yield "Turns in doubt are in the figures, and compared with nothing."
    if len(results.ours) > 1:
        yield "The others, in the sentences above, are those that are not this router's own."
    for one in every:
        if one.reference:
            yield f"{one.name} cannot be had in production, and nobody is compared with it."


def _name(one: Contender, every: Sequence[Contender]) -> str:
    colour = looks(every)[one.name].colour
    style = "" if colour == "black" else f' style="color:{colour}"'
    doubt = f"<small>in doubt: {of_turns(one)}</small>" if one.doubtful else ""
    return f'<td><i class="look"{style}></i>{escape(one.name)}{doubt}</td>'


def _counts(one: Contender) -> list[str]:
    """Requests of a turn, those of them that were streamed, and those that failed in all turns."""
    streamed = [
        sum(each.streamed for each in run.counted if each.streamed is not None) for run in one.runs
    ]
    told = any(each.streamed is not None for run in one.runs for each in run.counted)
    return [
        cell(_count(len(run.counted) for run in one.runs)),
        cell(_count(streamed) if told else "–"),
        cell(f"{one.failed:,}"),
    ]


def _count(of: Iterable[int]) -> str:
    """The same in all turns, or from the least to the greatest."""
    counts = list(of)
    least, most = min(counts), max(counts)
    return f"{most:,}" if least == most else f"{least:,} – {most:,}"


def _cell(one: Contender, every: Sequence[Contender], metric: Metric) -> str:
    its = spread(one, metric)
    if its is None:
        return cell("–")
    small = [between(its.least, its.most)]
    beside = beside_best(one, [other for other in every if not other.reference], metric)
    if beside is None:
        return cell(seconds(its.median), small)
    small += _ratio(beside)
    best = beside.better is True and not one.doubtful and not one.reference
    return cell(seconds(its.median), small, best)


def _ratio(beside: Beside) -> tuple[str, str]:
    """Of the turns, ≈ where they do not agree, and below it their least and greatest."""
    sign = "≈ " if beside.ratio.turns > 1 and beside.better is None else ""
    of = beside.ratio
    return f"{sign}{ratio(of.median)}", ratios(of.least, of.most)


def _drawings(results: Results, every: Sequence[Contender]) -> Iterator[Drawing]:
    unanswered = "no request was answered"
    repeated = any(len(one.runs) > 1 for one in every)
    if len(every) > 1:
        yield Drawing(
            "figures",
            "At a glance",
            "Further left is better. Every panel has a logarithmic scale of its own."
            + (" Dot: median of the turns; bar: from the least to the greatest." * repeated),
            latency.at_a_glance(every),
            unanswered,
        )
    for name, what, heading in (
        ("completion", completion, "Completion: time to the last token"),
        ("ttft", ttft, "TTFT: time to the first token"),
    ):
        yield Drawing(
            name,
            heading,
            "How long requests take, from the fastest on the left to the slowest on the right. The "
            "tail is stretched: from p90 to p99 is as far as from p99 to p99.9. Lower is better."
            + (" The band reaches from the fastest to the slowest turn." * repeated),
            latency.distribution(every, what, heading),
            unanswered if name == "completion" else "no answer has a time to its first token",
        )
    yield Drawing(
        "load",
        "Load of each replica over time",
        "One row for each replica; the brighter, the more requests are on it; empty: none. "
        "Replicas of equal speed should be equally bright, faster ones should hold more."
        + (" The first turn is drawn." * repeated),
        load.over_time(every, results.events),
        "no request says which replica served it",
    )
    yield Drawing(
        "prediction",
        "Predicted beside actual completion",
        "What the router expected when a request came, and what it took: on the line it was right, "
        "above the line the request was done sooner than expected, beyond a dashed line it was "
        "off by more than a factor of 2. The brighter, the more requests.",
        prediction.beside_actual(every),
        "the results hold no predictions",
    )
