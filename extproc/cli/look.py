"""``extproc top`` and ``extproc explain``: print the fleet and decisions of a running router.

``top`` shows the router's dashboard in the terminal and updates it every second.
"""

import argparse
import asyncio
import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import aclosing
from typing import Any

from extproc.cli.arguments import CommandError, whole
from extproc.cli.configuration import add_file, configured
from extproc.config import AdminSettings
from extproc.ground.text import WIDTH, Column, count, figure, paragraph, printable, share, table
from extproc.observe.client import RouterUnavailableError, fetch_decisions, follow
from extproc.observe.decision import other_format, read_decisions
from extproc.observe.explain import comparison, decisions

_HOME, _REST_OF_LINE, _REST_OF_PAGE = "\x1b[H", "\x1b[K", "\x1b[J"
_RETRY_S = 1.0
_TROUBLE = {"ok": 0, "draining": 1, "excluded": 2, "unhealthy": 3}
_TEXT = {"name", "text", "health", "decision"}
_FIGURES = {  # cells by the unit of their column, as in observe/dashboard/snapshot.py
    **dict.fromkeys(("count", "load", "tokens"), count),
    **dict.fromkeys(("seconds", "milliseconds", "age", "ratio"), figure),
    "share": share,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    router = "admin address of the router (default: serve.admin)"
    if parser.prog.endswith("top"):
        parser.epilog = "Ctrl-C ends the command."
        parser.add_argument("--router", metavar="URL", help=router)
        once = "print once and exit, which is the default if the output is not a terminal"
        parser.add_argument("--once", action="store_true", help=once)
    else:
        parser.usage = "%(prog)s [OPTION]... [REQUEST_ID]"
        add = parser.add_mutually_exclusive_group().add_argument
        request = "compare all replicas for the request with this x-request-id"
        add("request_id", nargs="?", type=_request_id, metavar="REQUEST_ID", help=request)
        last = "number of decisions to show (default: %(default)s)"
        add("--last", type=whole(1), default=20, metavar="N", help=last)
        parser.add_argument("--router", metavar="URL", help=router)
        parser.add_argument("--json", action="store_true", help="print the router's answer as JSON")
    add_file(parser)


def _request_id(text: str) -> str:
    if text.strip():
        return text
    raise argparse.ArgumentTypeError("the request id is empty; omit it to see the last decisions")


def run(args: argparse.Namespace) -> int:
    config = configured(args)
    router, show = args.router or config.serve.admin, _top if args.command == "top" else _explain
    try:
        text = asyncio.run(show(args, router, config.admin))
    except (RouterUnavailableError, OSError, ValueError) as error:
        raise CommandError(*str(error).splitlines()) from None
    except KeyboardInterrupt:
        if args.command != "top":
            raise
        text = ""
    print(text)
    return 0


async def _explain(args: argparse.Namespace, router: str, access: AdminSettings) -> str:
    answer = await fetch_decisions(router, args.request_id, args.last, access)
    if args.json:
        text = json.dumps(answer, indent=2)
    elif args.request_id is None:
        text = decisions(read_decisions(answer))
    else:
        text = "\n\n\n".join(map(comparison, read_decisions(answer)))
    if remark := other_format(answer):
        print(f"extproc explain: {remark}", file=sys.stderr)
    return text


async def _top(args: argparse.Namespace, router: str, access: AdminSettings) -> str:
    terminal, lines = sys.stdout.isatty(), list[str]()
    while True:
        try:
            async with aclosing(follow(router, access)) as snapshots:
                async for snapshot in snapshots:
                    width = shutil.get_terminal_size().columns if terminal else WIDTH
                    lines = screen(snapshot, width)
                    if args.once or not terminal:
                        return "\n".join(lines)
                    _draw(lines)
        except RouterUnavailableError as error:
            if not lines:
                raise
            _draw([f"! {error}"[: shutil.get_terminal_size().columns], *lines])
        await asyncio.sleep(_RETRY_S)


def _draw(lines: list[str]) -> None:
    page = f"{_REST_OF_LINE}\n".join(lines[: shutil.get_terminal_size().lines - 1])
    print(f"{_HOME}{page}{_REST_OF_LINE}{_REST_OF_PAGE}", end="", flush=True)


def screen(snapshot: Mapping[str, Any], width: int) -> list[str]:
    """Format a snapshot in ``width`` columns: warnings first, then replicas, the worst on top.

    The snapshot may be of a router of another version, and lack any field.
    """
    return [printable(line)[:width] for line in _lines(snapshot, width)]


def _lines(snapshot: Mapping[str, Any], width: int) -> Iterator[str]:
    figures = ", ".join(f"{value} {name}" for name, value in snapshot.get("figures", ()))
    facts = ", ".join(f"{name.lower()}: {value}" for name, value in snapshot.get("facts", ()))
    yield from paragraph(f"{snapshot.get('router')}: {figures}; {facts}", 0, width=width)
    if remark := other_format([snapshot]):
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
        # The worst first. A router of another version may have other words for health.
        rows.sort(key=lambda row: (_TROUBLE.get(row[health], 4), row[backlog] or 0.0), reverse=True)
    formats = [_FIGURES.get(column["unit"], str) for column in columns]
    cells = [[format(value) for format, value in zip(formats, row, strict=True)] for row in rows]
    shown = [Column(column["title"], column["unit"] in _TEXT, most=36) for column in columns]
    for number in range(len(shown), 0, -1):
        lines = table(shown[:number], [row[:number] for row in cells])
        if number == 1 or max(map(len, lines)) <= width:
            yield from ("", *lines)
            break
    yield from paragraph(given.get("note", ""), 0, width=width)
