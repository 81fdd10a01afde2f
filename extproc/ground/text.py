"""Plain text for people: tables, paragraphs, figures, and suggestions for misspelt names."""

import difflib
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

WIDTH = 120  # columns of the terminal
_GAP = "  "
_BAR = 10

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: numbers to the right, by default."""

    header: str
    left: bool = False
    most: int = WIDTH  # characters; of longer cells the end is kept, which tells names apart


Cells = Sequence[tuple[Column, Callable[[T], str]]]  # columns, and what each shows of a row's item


def table_of(cells: Cells[T], items: Iterable[T]) -> list[str]:
    """The header and a line for each item."""
    return table([column for column, _ in cells], [row_of(cells, item) for item in items])


def row_of(cells: Cells[T], item: T) -> list[str]:
    """Cells of an item in a table."""
    return [cell(item) for _, cell in cells]


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[str]:
    """The header and a line for each row."""
    cells = [[_fit(cell, one.most) for cell, one in zip(row, columns, strict=True)] for row in rows]
    headers = [column.header for column in columns]
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    return [
        _GAP.join(
            cell.ljust(width) if column.left else cell.rjust(width)
            for cell, width, column in zip(line, widths, columns, strict=True)
        ).rstrip()
        for line in (headers, *cells)
    ]


def paragraph(text: str, indent: int, first: str = "", width: int = WIDTH) -> list[str]:
    """Wrapped text, indented; ``first`` stands before its first line."""
    before, after = first.ljust(indent), " " * indent
    return textwrap.wrap(
        text, width, initial_indent=before, subsequent_indent=after, break_on_hyphens=False
    )


def printable(text: str) -> str:
    """Replaces characters that a terminal would obey in text of a client or a replica."""
    return "".join(char if char.isprintable() else "?" for char in text)


def suggest(word: str, known: Iterable[str]) -> str:
    """Returns ``"; did you mean 'x'?"``, or nothing where no known word is near."""
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def figure(value: float | None) -> str:
    """A number to three or four digits; ``-`` where there is none."""
    if value is None:
        return "-"
    digits = 3 if abs(value) < 10 else 2 if abs(value) < 100 else 1 if abs(value) < 1000 else 0
    return f"{value:.{digits}f}"


def count(value: float | None) -> str:
    """A whole number; ``-`` where there is none."""
    return "-" if value is None else f"{value:.0f}"


def share(value: float | None) -> str:
    """A fraction in per cent; ``-`` where there is none."""
    return "-" if value is None else f"{value:.0%}"


def bar(value: float | None) -> str:
    """A fraction as a bar and in per cent; ``-`` where there is none."""
    return "-" if value is None else f"{'█' * round(value * _BAR):░<{_BAR}} {value:6.1%}"


def _fit(cell: str, most: int) -> str:
    return cell if len(cell) <= most else f"...{cell[3 - most :]}"
