"""``extproc top``: a router's dashboard in the terminal, redrawn every second."""

import argparse
import asyncio
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import aclosing
from typing import Any

from extproc.cli.arguments import CommandError
from extproc.cli.configuration import add_file, configured
from extproc.config import AdminSettings
from extproc.ground.text import (
    WIDTH,
    Column,
    count,
    figure,
    paragraph,
    printable,
    share,
    table,
)
from extproc.observe.client import AskError, follow

_HOME, _REST_OF_LINE, _REST_OF_PAGE = "\x1b[H", "\x1b[K", "\x1b[J"
_AGAIN_S = 1.0
_WORST_FIRST = ("down", "left out", "draining", "ok")
_TEXT = {"name", "text", "health", "decision"}
_FIGURES = {
    "count": count,
    "load": count,
    "share": share,
    "tokens": count,
    "seconds": figure,
    "age": figure,
    "ratio": figure,
}
"""Cells by the unit of their column, as in :mod:`extproc.observe.dashboard.snapshot`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "--router", metavar="URL", help="admin address of the router (default: serve.admin)"
    )
    parser.add_argument(
        "--once", action="store_true", help="print it once, as where the output is no terminal"
    )
    parser.epilog = "Ctrl-C ends it."
    add_file(parser)


def run(args: argparse.Namespace) -> int:
    """Print the dashboard once, or until Ctrl-C."""
    config = configured(args)
    live = not args.once and sys.stdout.isatty()
    try:
        asyncio.run((_live if live else _once)(args.router or config.serve.admin, config.admin))
    except (AskError, OSError, ValueError) as error:
        raise CommandError(*str(error).splitlines()) from None
    except KeyboardInterrupt:
        print()
    return 0


async def _once(router: str, access: AdminSettings) -> None:
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH
    async with aclosing(follow(router, access)) as snapshots:
        print("\n".join(screen(await anext(snapshots), width)))


async def _live(router: str, access: AdminSettings) -> None:
    lines: list[str] = []
    while True:
        try:
            async with aclosing(follow(router, access)) as snapshots:
                async for snapshot in snapshots:
                    lines = screen(snapshot, shutil.get_terminal_size().columns)
                    _draw(lines)
        except AskError as error:
            if not lines:
                raise
            _draw([f"! {error}"[: shutil.get_terminal_size().columns], *lines])
        await asyncio.sleep(_AGAIN_S)


def _draw(lines: list[str]) -> None:
    page = f"{_REST_OF_LINE}\n".join(lines[: shutil.get_terminal_size().lines - 1])
    print(f"{_HOME}{page}{_REST_OF_LINE}{_REST_OF_PAGE}", end="", flush=True)


def screen(snapshot: Mapping[str, Any], width: int) -> list[str]:
    """Lines of at most ``width`` characters: warnings first, the worst replicas on top."""
    return [printable(line)[:width] for line in _lines(snapshot, width)]


def _lines(snapshot: Mapping[str, Any], width: int) -> Iterator[str]:
    figures = ", ".join(f"{value} {name}" for name, value in snapshot["figures"])
    facts = ", ".join(f"{name.lower()}: {value}" for name, value in snapshot["facts"])
    yield from paragraph(f"{snapshot['router']}: {figures}; {facts}", 0, width=width)
    for warning in dict.fromkeys(snapshot["warnings"]):
        yield from paragraph(warning, 2, "!", width)
    for pool in snapshot["pools"]:
        if len(snapshot["pools"]) > 1:
            yield from ("", f"pool {pool['name']}")
        yield from _table(pool["replicas"], width)
        yield from paragraph(pool["accuracy"]["words"], 0, width=width)
        yield from _table(pool["waiting"], width)
    yield from _table(snapshot["decisions"], width)


def _table(given: Mapping[str, Any], width: int) -> Iterator[str]:
    """As many of the columns as fit, the first ones first."""
    if not given["keys"]:
        return
    columns = [one for one in given["columns"] if one["unit"] != "words"]
    values = {one["title"]: one["values"] for one in columns}
    order = list(range(len(given["keys"])))
    if "Health" in values:
        order.sort(
            key=lambda row: (
                _WORST_FIRST.index(values["Health"][row]),
                -(values["Backlog"][row] or 0.0),
            )
        )
    cells = [
        [_FIGURES.get(one["unit"], str)(one["values"][row]) for row in order] for one in columns
    ]
    made = [Column(one["title"], left=one["unit"] in _TEXT, most=36) for one in columns]
    for many in range(len(made), 0, -1):
        lines = table(made[:many], list(zip(*cells[:many], strict=True)))
        if many == 1 or max(map(len, lines)) <= width:
            yield from ("", *lines)
            return
