"""Tables of the dashboard: title, unit and values of each column."""

from typing import Any

from msgspec import Struct


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
