"""Tables of the dashboard: title, unit and values of each column."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from extproc.ground.text import Cells, T


class PageColumn(Struct, omit_defaults=True):
    """Column of a table; the unit tells browser and terminal how to show the values."""

    title: str
    unit: str  # a key of UNITS in page/table.js
    values: list[Any]
    notes: list[str] = []  # small print below each value
    estimated: list[bool] = []  # True: mark the value with ≈


class PageTable(Struct):
    """Table for the page, which updates a row in place if the next snapshot has the row's key."""

    caption: str
    keys: list[Any]
    columns: list[PageColumn]
    note: str = ""  # text below the rows


def text_table(
    caption: str, keys: list[Any], cells: Cells[T], items: Sequence[T], units: Mapping[str, str]
) -> PageTable:
    """Make a table of ``explain`` for the page. ``units``: units of columns by title; other columns
    have the unit ``text`` if aligned to the left, else ``figure``."""
    columns = list[PageColumn]()
    for column, cell in cells:
        title = column.header
        if title == "actual":
            title = f"{columns[-1].title.removesuffix(' s')} actual"
        unit = units.get(title, "text" if column.left else "figure")
        columns.append(PageColumn(title, unit, [*map(cell, items)]))
    return PageTable(caption, keys, columns)
