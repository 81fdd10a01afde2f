"""Report of a benchmark: a page in Markdown, its pictures beside it, and the JSON."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from benchmarks.report.figures import METRICS, Contender, Metric, beside_best, contenders, spread
from benchmarks.report.results import Results, read
from benchmarks.report.words import (
    HARM_HEAD,
    between,
    harm_rows,
    of_turns,
    outcome,
    ratio,
    ratios,
    seconds,
)

PAGE = "report.md"
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
_STRETCHED = (
    "How long requests take, from the fastest on the left to the slowest on the right. The tail "
    "is stretched: from p90 to p99 is as far as from p99 to p99.9. Lower is better. A band "
    "reaches from the fastest to the slowest turn."
)
_PICTURES = {  # heading and caption
    "figures": (
        "At a glance",
        "Further left is better. Every panel has a logarithmic scale of its own. Dot: median of "
        "the turns; bar: from the least to the greatest.",
    ),
    "completion": ("Completion: time to the last token", _STRETCHED),
    "ttft": ("TTFT: time to the first token", _STRETCHED),
    "load": (
        "Load of each replica over time",
        "One row for each replica; the brighter, the more requests are on it; empty: none. "
        "Replicas of equal speed should be equally bright, faster ones should hold more. The first "
        "turn is drawn.",
    ),
    "prediction": (
        "Predicted beside actual completion",
        "What the router expected when a request came, and what it took: on the line it was right, "
        "above the line the request was done sooner than expected, beyond a dashed line it was "
        "off by more than a factor of 2. The brighter, the more requests.",
    ),
}
_MARKUP = re.compile(r"[\\`*_{}\[\]<>#|~$]")


def writable(folder: Path) -> None:
    """Makes the folder, or raises OSError or, without matplotlib, ValueError."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("the report needs matplotlib: pip install 'extproc[bench]'") from None
    folder.mkdir(parents=True, exist_ok=True)
    TemporaryFile(dir=folder).close()


def write(results: Mapping[str, Any], folder: Path) -> Path:
    """Writes ``report.md``, PNGs in place of earlier ones, and ``results.json``; returns the page.

    OSError if the folder cannot be written, ValueError if ``results`` is no benchmark's.
    """
    writable(folder)
    from benchmarks.report.pictures import draw  # needs matplotlib

    known = read(results)
    drawn = draw(known)
    for name in _PICTURES:
        (folder / f"{name}.png").unlink(missing_ok=True)
    for name, png in drawn.items():
        (folder / f"{name}.png").write_bytes(png)
    page = folder / PAGE
    page.write_text(markdown(known, list(drawn)), encoding="utf-8")
    (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
    return page


def markdown(results: Results, pictures: Sequence[str]) -> str:
    every = contenders(results)
    many = f"{len(every)} ways of choosing a replica, side by side"
    title = f"How long requests take: {many if len(every) > 1 else every[0].name}"
    shown = [
        f"## {heading}\n\n{caption}\n\n![{heading}]({name}.png)"
        for name in pictures
        for heading, caption in [_PICTURES[name]]
    ]
    parts = [
        f"# {escaped(title)}",
        escaped(f"{_SAME[results.kind]} {_TERMS}"),
        "\n".join(f"- {escaped(one)}" for one in outcome(results, every)),
        _harm(results, every) if results.fault else _figures(results, every),
        *shown,
        "## How it was measured",
        "\n".join(_about(results.about)),
        "All figures, and every request, are in [results.json](results.json).\n",
    ]
    return "\n\n".join(parts)


def escaped(text: str) -> str:
    """Text as Markdown that shows it unchanged, on one line."""
    return _MARKUP.sub(r"\\\g<0>", " ".join(text.split()))


def table_of(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Lines of a Markdown table; cells are Markdown."""
    columns = list(head)
    for row in (columns, ["---"] * len(columns), *rows):
        yield f"| {' | '.join(row)} |"


def _figures(results: Results, every: Sequence[Contender]) -> str:
    metrics = [one for one in METRICS if any(spread(each, one) for each in every)]
    doubts = ([f"in doubt: {of_turns(one)}"] if one.doubtful else [] for one in every)
    rows = (
        [_cell(one.name, doubt), *_counts(one), *(_metric(one, every, of) for of in metrics)]
        for one, doubt in zip(every, doubts, strict=True)
    )
    head = ["", "Requests", "of them streamed", "Failed", *(one.name for one in metrics)]
    return "\n".join([*table_of(head, rows), "", escaped(" ".join(_notes(results, every)))])


def _harm(results: Results, every: Sequence[Contender]) -> str:
    rows = (map(escaped, row) for row in harm_rows(results, every))
    note = "Counts are of all turns, until and slowest the most of any, other times medians."
    return "\n".join([*table_of(["", *HARM_HEAD], rows), "", note])


def _notes(results: Results, every: Sequence[Contender]) -> Iterator[str]:
    turns = max(len(one.runs) for one in every)
    if turns > 1:
        yield "Requests are those of one turn, failed ones those of all."
        yield f"Median of {turns} turns, then the least and the greatest."
    if len(every) > 1:
        yield "The figure with × compares with the best other of the same turn: below 1 is better."
        yield (
            "Then its least and greatest. Bold: better in all turns. ≈: turns do not agree, "
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


def _counts(one: Contender) -> Iterator[str]:
    """Cells: requests of a turn, streamed ones of them, and those that failed in all turns."""
    streamed = [[each.streamed for each in run.counted] for run in one.runs]
    told = any(each is not None for run in streamed for each in run)
    yield _cell(_count([len(run.counted) for run in one.runs]))
    yield _cell(_count([sum(map(bool, run)) for run in streamed]) if told else "–")
    yield _cell(f"{one.failed:,}")


def _count(counts: Sequence[int]) -> str:
    least, most = min(counts), max(counts)
    return f"{most:,}" if least == most else f"{least:,} – {most:,}"


def _metric(one: Contender, every: Sequence[Contender], metric: Metric) -> str:
    its = spread(one, metric)
    if its is None:
        return _cell("–")
    small = [between(its.least, its.most)]
    beside = beside_best(one, [other for other in every if not other.reference], metric)
    if beside is None:
        return _cell(seconds(its.median), small)
    of = beside.ratio
    unclear = "≈ " if of.turns > 1 and beside.better is None else ""
    small += [f"{unclear}{ratio(of.median)}", ratios(of.least, of.most)]
    best = beside.better is True and not one.doubtful and not one.reference
    return _cell(seconds(its.median), small, best)


def _cell(text: str, more: Iterable[str] = (), best: bool = False) -> str:
    first = f"**{escaped(text)}**" if best else escaped(text)
    return " ".join([first, *(escaped(one) for one in more if one)])


def _about(about: Mapping[str, Any]) -> Iterator[str]:
    for key, value in about.items():
        if value is not None:
            said = "; ".join(_lines(value))
            said = f"`{said}`" if key == "command" else escaped(said)
            yield f"- {escaped(key.replace('_', ' '))}: {said}"


def _lines(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [f"{key}: {', '.join(_lines(one))}" for key, one in value.items()]
    if isinstance(value, list):
        return [", ".join(", ".join(_lines(one)) for one in value)]
    return [f"{value:g}" if isinstance(value, float) else str(value)]
