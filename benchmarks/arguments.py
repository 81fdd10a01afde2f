"""What command lines have in common: shared options, and values that make sense."""

import argparse
import json
from collections.abc import Mapping
from math import inf, nan
from pathlib import Path
from typing import Any

from benchmarks import report


def command(module: str, doc: str | None, **more: Any) -> argparse.ArgumentParser:
    """The parser of ``python -m benchmarks.MODULE``; its help is the module's docstring."""
    shown = argparse.RawDescriptionHelpFormatter
    prog = f"python -m benchmarks.{module}"
    return argparse.ArgumentParser(prog=prog, description=doc, formatter_class=shown, **more)


def add_part(parser: argparse.ArgumentParser, start: str, requests: bool = True) -> None:
    """Which part of a trace; ``start`` is the option that leaves out its beginning."""
    add = parser.add_argument
    add("--speed", type=positive, default=1.0, metavar="X", help="times as fast as the trace")
    out = "leave out what arrives in the first S seconds; time counts from there"
    add(start, dest="skip", type=time, default=0.0, metavar="S", help=out)
    add("--duration", type=positive, default=inf, metavar="S", help="only the first S seconds")
    if requests:
        add("--requests", type=count, metavar="N", help="only the first N")


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Where results go."""
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="write all figures and every request")
    add("--report", type=Path, metavar="DIR", help="write a page with pictures: needs matplotlib")


def check_outputs(args: argparse.Namespace) -> None:
    """Raises OSError or ValueError now, not after minutes, where a result could not be written."""
    if args.json:
        args.json.open("a").close()
    if args.report:
        report.writable(args.report)


def keep(args: argparse.Namespace, result: Mapping[str, Any]) -> None:
    """Writes a result where it was asked for."""
    if args.json:
        args.json.write_text(json.dumps(result) + "\n")
    if args.report:
        print(report.write(result, args.report))


def paths(text: str) -> list[Path]:
    """Files with commas between."""
    return [Path(part) for part in text.split(",")]


def positive(text: str) -> float:
    """A finite number above 0."""
    number = _float(text)
    require(0 < number < inf, text, "a finite number above 0")
    return number


def time(text: str) -> float:
    """A finite number of at least 0."""
    number = _float(text)
    require(0 <= number < inf, text, "a finite number of at least 0")
    return number


def share(text: str) -> float:
    """A number from 0 to 1."""
    number = _float(text)
    require(0 <= number <= 1, text, "a number from 0 to 1")
    return number


def count(text: str) -> int:
    """A whole number of at least 1."""
    require(_counts(text), text, "a whole number of at least 1")
    return int(text)


def counts(text: str) -> list[int]:
    """Whole numbers of at least 1 with commas between."""
    parts = text.split(",")
    require(all(map(_counts, parts)), text, "whole numbers of at least 1 with commas between")
    return [int(part) for part in parts]


def switch(text: str) -> bool:
    """``on`` or ``off``."""
    require(text in ("on", "off"), text, "on or off")
    return text == "on"


def number(text: str) -> int:
    """A whole number of at least 0."""
    require(text.isdecimal(), text, "a whole number of at least 0")
    return int(text)


def among(text: str, known: list[str]) -> list[str]:
    """Names with commas between, all of them known."""
    for part in text.split(","):
        if part not in known:
            raise argparse.ArgumentTypeError(f"{part!r} is none of {', '.join(known)}")
    return text.split(",")


def require(sensible: bool, text: str, what: str) -> None:
    """Raises ArgumentTypeError unless a value is sensible."""
    if not sensible:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")


def _counts(text: str) -> bool:
    return text.isdecimal() and int(text) >= 1


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return nan
