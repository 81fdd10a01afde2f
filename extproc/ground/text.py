"""Text for terminals: tables, paragraphs, figures, and suggestions for misspelt names."""

import difflib
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeVar

WIDTH = 120  # columns of the terminal
_GAP = "  "

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table, aligned to the right by default."""

    header: str
    left: bool = False
    most: int = WIDTH  # characters; longer cells lose their start, because names differ at the end


Cells = Sequence[tuple[Column, Callable[[T], str]]]  # column, and text of an item's cell


def table_of(cells: Cells[T], items: Iterable[T]) -> list[str]:
    """Returns the lines of a table: a header, and a line for each item."""
    rows = [[cell(item) for _, cell in cells] for item in items]
    return table([column for column, _ in cells], rows)


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], most: float = inf) -> list[str]:
    """Returns the lines of a table: a header, and a line for each row. Leaves out the last columns
    where a line would have over ``most`` characters."""
    cells = [[_fit(*pair) for pair in zip(row, columns, strict=True)] for row in rows]
    headers = [column.header for column in columns]
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    while len(widths) > 1 and sum(widths) + len(_GAP) * (len(widths) - 1) > most:
        widths.pop()
    return [
        _GAP.join(
            cell.ljust(width) if column.left else cell.rjust(width)
            for cell, width, column in zip(line, widths, columns, strict=False)
        ).rstrip()
        for line in (headers, *cells)
    ]


def paragraph(text: str, indent: int, first: str = "", width: int = WIDTH) -> list[str]:
    """Wraps and indents the text; in the first line, ``first`` takes the place of the indent."""
    before, after = first.ljust(indent), " " * indent
    return textwrap.wrap(
        text, width, initial_indent=before, subsequent_indent=after, break_on_hyphens=False
    )


def printable(text: str) -> str:
    """Replaces control characters by ``?``, so that no client or replica controls a terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)


def natural(name: str) -> list[int | str]:
    """Sort key that puts ``r2`` before ``r10``."""
    parts = re.split(r"(\d+)", name.casefold())
    return [int(part) if at % 2 else part for at, part in enumerate(parts)]


def suggest(word: str, known: Iterable[str]) -> str:
    """Returns ``"; did you mean 'x'?"``, or an empty string if no known word is similar."""
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def figure(value: float | None) -> str:
    """Formats a number with 3 decimals below 10, 2 below 100, 1 below 1000; ``-`` for None."""
    if value is None:
        return "-"
    digits = 3 if abs(value) < 10 else 2 if abs(value) < 100 else 1 if abs(value) < 1000 else 0
    return f"{value:.{digits}f}"


def count(value: float | None) -> str:
    """Formats a whole number; ``-`` for None."""
    return "-" if value is None else f"{value:.0f}"


def share(value: float | None) -> str:
    """Formats a fraction in per cent; ``-`` for None."""
    return "-" if value is None else f"{value:.0%}"


def _fit(cell: str, column: Column) -> str:
    return cell if len(cell) <= column.most else f"...{cell[3 - column.most :]}"
