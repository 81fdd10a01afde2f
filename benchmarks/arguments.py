"""Options that command lines share, and checks of their values."""

import argparse
import json
from collections.abc import Callable, Iterable
from math import inf
from pathlib import Path
from typing import Any

from benchmarks.report.markdown import writable, write
from extproc.cli.arguments import above_zero, number, whole

count = whole(1)


def command(module: str, doc: str | None, **more: Any) -> argparse.ArgumentParser:
    """Parser of ``python -m benchmarks.MODULE``; its help is the module's docstring."""
    shown = argparse.RawDescriptionHelpFormatter
    prog = f"python -m benchmarks.{module}"
    return argparse.ArgumentParser(prog=prog, description=doc, formatter_class=shown, **more)


def add_part(parser: argparse.ArgumentParser, start: str, requests: bool = True) -> None:
    """Adds options for a part of a trace; ``start`` names the one that skips its beginning."""
    add = parser.add_argument
    add("--speed", type=above_zero, default=1.0, metavar="X", help="times as fast as the trace")
    out = "leave out what arrives in the first S seconds; time counts from there"
    add(start, dest="skip", type=number, default=0.0, metavar="S", help=out)
    add("--duration", type=above_zero, default=inf, metavar="S", help="only the first S seconds")
    if requests:
        add("--requests", type=count, metavar="N", help="only the first N")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(report=None)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")


def add_outputs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="write all figures and every request")
    add("--report", type=Path, metavar="DIR", help="write a page with pictures: needs matplotlib")


def check_outputs(args: argparse.Namespace) -> None:
    """Raises OSError or ValueError before minutes of measuring if no result can be written."""
    if args.json:
        args.json.open("a").close()
    if args.report:
        writable(args.report)


def keep(args: argparse.Namespace, result: Any) -> None:
    if args.json:
        args.json.write_text(json.dumps(result) + "\n")
    if args.report:
        print(write(result, args.report))


def paths(text: str) -> list[Path]:
    return [Path(part) for part in text.split(",")]


def counts(text: str) -> list[int]:
    return [*map(count, text.split(","))]


def some_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Type of an argument that lists known names, separated by commas."""
    names = list(known)

    def parse(text: str) -> list[str]:
        for part in text.split(","):
            if part not in names:
                raise argparse.ArgumentTypeError(f"{part!r} is none of {', '.join(names)}")
        return text.split(",")

    return parse
