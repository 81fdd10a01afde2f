"""Screen of ``extproc top``: snapshots of routers as lines of text."""

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

from extproc.cli.routers import AskedRouter, Snapshot
from extproc.ground.text import Column, count, figure, paragraph, printable, share, table
from extproc.observe.decision import other_format

_HOME, _REST_OF_LINE, _REST_OF_PAGE = "\x1b[H", "\x1b[K", "\x1b[J"
_TROUBLE = {"ok": 0, "draining": 1, "excluded": 2, "unhealthy": 3}
_TEXT = {"name", "text", "health", "decision"}
_FIGURES = {  # format of cells by unit of the column (observe/dashboard/page_table.py)
    **dict.fromkeys(("count", "load", "tokens"), count),
    **dict.fromkeys(("seconds", "milliseconds", "age", "ratio"), figure),
    "share": share,
}
_OF_ROUTERS = {"In flight": "requests in flight", "Waiting": "waiting at this router"}
"""Titles of columns in the table of routers → names of figures in the routers' snapshots."""
_TIME = re.compile(r"\d\d:\d\d:\d\d")


def draw(lines: Sequence[str]) -> None:
    """Replace the terminal's content; lines that do not fit are not shown."""
    # Erased before the text: behind a line of full width, xterm would erase its last character.
    shown = lines[: shutil.get_terminal_size().lines - 1]
    page = "".join(f"{_REST_OF_LINE}{line}\n" for line in shown)
    print(f"{_HOME}{page}{_REST_OF_PAGE}", end="", flush=True)


def screen(routers: Sequence[AskedRouter], notes: Sequence[str], width: int) -> list[str]:
    """Format routers in ``width`` columns: errors and notes, a table if there are several routers,
    then the fleet as known to the first router that answers, with the warnings of all routers that
    answer. If none answers any more, the last snapshots stand for the routers.

    At least one router must have a snapshot. A router of another version may have made it, so any
    field of a snapshot may be missing.
    """
    problems = [*(router.error for router in routers if router.error), *notes]
    lines = [*chain.from_iterable(paragraph(printable(text), 2, "!", width) for text in problems)]
    known = [router for router in routers if router.snapshot]
    heard = [router for router in known if not router.error] or known
    shown, snapshot = heard[0].title, heard[0].snapshot
    if len(routers) > 1:
        lines += [*_routers(routers, shown, width), ""]
        snapshot = {**snapshot, "warnings": _warnings(heard)}
    lines += _fleet(snapshot, width)
    return [printable(line)[:width] for line in lines]


def _routers(routers: Sequence[AskedRouter], shown: str, width: int) -> Iterator[str]:
    """Yield the lines of a table; ``shown``: the router whose fleet is shown below."""
    figures = [_figures_of(router.snapshot) for router in routers]
    titles = [*dict.fromkeys(chain.from_iterable(figures))]
    rows = [
        [router.title, *("-" if router.error else known.get(title, "-") for title in titles)]
        for router, known in zip(routers, figures, strict=True)
    ]
    columns = [Column("Router", left=True, most=36), *map(Column, titles)]
    yield from ("", *table(columns, rows, width))
    note = f"Rates of the last minute. Below: the fleet as {shown} knows it."
    yield from paragraph(note, 0, width=width)


def _figures_of(snapshot: Snapshot) -> dict[str, str]:
    """Requests in flight and in the queue, and rates of the last minute, by title of the column."""
    figures = dict(snapshot.get("figures", ()))
    return {title: figures[name] for title, name in _OF_ROUTERS.items() if name in figures} | {
        column["title"]: column["values"][0]
        for column in snapshot.get("history", {}).get("columns", ())
        if column["unit"] == "figure"
    }


def _warnings(routers: Sequence[AskedRouter]) -> list[str]:
    """Merge the warnings of routers, the worst of each router first. A warning that only some of
    these routers have begins with their names. Routers see a fault at different times, so warnings
    that differ in nothing but the time are one."""
    warned = {
        router.title: {_TIME.sub("", text): text for text in router.snapshot.get("warnings", ())}
        for router in routers
    }
    lines = list[str]()
    for cause in filter(None, dict.fromkeys(chain.from_iterable(zip_longest(*warned.values())))):
        names = [name for name, texts in warned.items() if cause in texts]
        text = warned[names[0]][cause]
        lines.append(text if len(names) == len(warned) else f"{', '.join(names)}: {text}")
    return lines


def _fleet(snapshot: Snapshot, width: int) -> Iterator[str]:
    """Yield the lines of a snapshot: warnings first, then replicas, the worst on top."""
    figures = ", ".join(f"{value} {name}" for name, value in snapshot.get("figures", ()))
    facts = ", ".join(f"{name.lower()}: {value}" for name, value in snapshot.get("facts", ()))
    yield from paragraph(f"{snapshot.get('router')}: {figures}; {facts}", 0, width=width)
    if remark := other_format([snapshot.get("version", 0)]):
        yield from paragraph(remark, 2, "!", width)
    for warning in dict.fromkeys(snapshot.get("warnings", ())):
        yield from paragraph(warning, 2, "!", width)
    if snapshot.get("warnings") == []:
        yield "No warnings."
    pools = snapshot.get("pools", ())
    for pool in pools:
        if len(pools) > 1:
            yield from ("", f"pool {pool.get('name')}")
        yield from _table(pool.get("replicas", {}), width)
        yield from paragraph(pool.get("accuracy", {}).get("words", ""), 0, width=width)
        yield from _table(pool.get("waiting", {}), width)
    yield from _table(snapshot.get("history", {}), width)
    yield from _table(snapshot.get("decisions", {}), width)


def _table(given: Mapping[str, Any], width: int) -> Iterator[str]:
    """Yield the lines of a table, without the last columns if they do not fit into the width."""
    columns = [column for column in given.get("columns", ()) if column["unit"] != "words"]
    rows = list(zip(*(column["values"] for column in columns), strict=True))
    if not rows:
        return
    titles = [column["title"] for column in columns]
    if {"Health", "Backlog"} <= {*titles}:
        health, backlog = titles.index("Health"), titles.index("Backlog")
        # The worst replicas first. A router of another version may have other words for health.
        rows.sort(key=lambda row: (_TROUBLE.get(row[health], 4), row[backlog] or 0.0), reverse=True)
    formats = [_FIGURES.get(column["unit"], str) for column in columns]
    cells = [[format(value) for format, value in zip(formats, row, strict=True)] for row in rows]
    shown = [Column(column["title"], column["unit"] in _TEXT, most=36) for column in columns]
    yield from ("", *table(shown, cells, width))
    yield from paragraph(given.get("note", ""), 0, width=width)
