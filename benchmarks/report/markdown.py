"""Report of a benchmark: a page in Markdown, its picture beside it, and the JSON."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from benchmarks.report.figures import METRICS, ContenderRuns, contenders, spread
from benchmarks.report.results import Results, read
from benchmarks.report.words import HARM_HEAD, figure_cells, harm_rows, marked, outcome

PAGE = "report.md"
_TERMS = (
    "TTFT is the time until the first token of an answer arrives, completion the time until its "
    "last. Requests are sent when the trace says, whether or not earlier requests are answered. "
    "99 of 100 requests take less than p99. Lower is better everywhere."
)
_KINDS = {
    "load": "A recorded trace of requests was sent to one target.",
    "compare": "The same recorded requests were sent to the same replicas once for each way of "
    "choosing the replica of a request.",
    "simulate": "The same recorded requests were played against the same simulated replicas, "
    "under a virtual clock, once for each way of choosing the replica of a request.",
}
_PICTURE = "figures.png"
_GLANCE = f"""## At a glance

Shorter is better. Bar: median of the runs; line: from the least to the greatest.

![At a glance]({_PICTURE})"""
_MARKUP = re.compile(r"[\\`*_{}\[\]<>#|~$]")


def check_writable(folder: Path) -> None:
    """Makes the folder. Raises OSError if it is not writable, ValueError without matplotlib."""
    if find_spec("matplotlib") is None:
        raise ValueError("the report needs matplotlib: pip install 'extproc[bench]'")
    folder.mkdir(parents=True, exist_ok=True)
    TemporaryFile(dir=folder).close()


def write(results: Mapping[str, Any], folder: Path) -> Path:
    """Writes ``report.md``, its picture and ``results.json``; returns the path of the page.

    A picture of an earlier report is removed. Raises OSError if the folder cannot be written.
    """
    check_writable(folder)
    from benchmarks.report.pictures import draw  # needs matplotlib

    known = read(results)
    picture, drawn = folder / _PICTURE, draw(known)
    if drawn:
        picture.write_bytes(drawn)
    else:
        picture.unlink(missing_ok=True)
    page = folder / PAGE
    page.write_text(markdown(known, bool(drawn)), encoding="utf-8")
    (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
    return page


def markdown(results: Results, pictured: bool = False) -> str:
    every = contenders(results)
    side_by_side = f"{len(every)} ways of choosing a replica, side by side"
    title = f"How long requests take: {side_by_side if len(every) > 1 else every[0].name}"
    parts = [
        f"# {escaped(title)}",
        escaped(f"{_KINDS[results.kind]} {_TERMS}"),
        "\n".join(f"- {escaped(sentence)}" for sentence in outcome(results, every)),
        _harm(results, every) if results.fault else _figures(results, every),
        *([_GLANCE] if pictured else []),
        "## How it was measured",
        "\n".join(_about(results.about)),
        "All figures, and every request, are in [results.json](results.json).\n",
    ]
    return "\n\n".join(parts)


def escaped(text: str) -> str:
    """Markdown that shows a text unchanged, on one line."""
    return _MARKUP.sub(r"\\\g<0>", " ".join(text.split()))


def table_of(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Lines of a Markdown table; cells are Markdown."""
    columns = list(head)
    for row in (columns, ["---"] * len(columns), *rows):
        yield f"| {' | '.join(row)} |"


def _figures(results: Results, every: Sequence[ContenderRuns]) -> str:
    metrics = [
        metric for metric in METRICS if any(spread(contender, metric) for contender in every)
    ]
    rows = (
        map(escaped, [marked(each), *_counts(each), *figure_cells(each, metrics)]) for each in every
    )
    head = ["", "Requests", "of them streamed", "Failed", *(metric.name for metric in metrics)]
    return "\n".join([*table_of(head, rows), "", escaped(" ".join(_notes(results, every)))])


def _harm(results: Results, every: Sequence[ContenderRuns]) -> str:
    rows = (map(escaped, row) for row in harm_rows(results, every))
    note = (
        "Counts are sums over all runs, until and slowest the highest of all runs, and other "
        "times medians."
    )
    return "\n".join([*table_of(["", *HARM_HEAD], rows), "", note])


def _notes(results: Results, every: Sequence[ContenderRuns]) -> Iterator[str]:
    turns = max(len(contender.runs) for contender in every)
    yield "Times are in seconds."
    if turns > 1:
        yield f"Each is the median of {turns} runs (least…greatest)."
        yield "Requests are those of a single run, failed requests those of all runs."
    if any(contender.doubtful for contender in every):
        yield "!: some runs are in doubt. They are in the figures, but in no comparison."
    if len(results.ours) > 1:
        yield "The sentences above compare with other routers, not with this router's policies."
    for contender in every:
        if contender.reference:
            yield f"{contender.name} cannot exist in production: no contender is compared with it."


def _counts(contender: ContenderRuns) -> Iterator[str]:
    """Cells of a contender: requests in a run, how many of them were streamed, and failed requests
    in all runs."""
    streamed = [[request.streamed for request in run.counted] for run in contender.runs]
    known = any(flag is not None for run in streamed for flag in run)
    yield _count([len(run.counted) for run in contender.runs])
    yield _count([sum(map(bool, run)) for run in streamed]) if known else "–"
    yield f"{contender.failed:,}"


def _count(counts: Sequence[int]) -> str:
    least, most = min(counts), max(counts)
    return f"{most:,}" if least == most else f"{least:,} – {most:,}"


def _about(about: Mapping[str, Any]) -> Iterator[str]:
    for key, value in about.items():
        if value is not None:
            text = "; ".join(_lines(value))
            text = f"`{text}`" if key == "command" else escaped(text)
            yield f"- {escaped(key.replace('_', ' '))}: {text}"


def _lines(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [f"{key}: {', '.join(_lines(part))}" for key, part in value.items()]
    if isinstance(value, list):
        return [", ".join(", ".join(_lines(part)) for part in value)]
    return [f"{value:g}" if isinstance(value, float) else str(value)]
