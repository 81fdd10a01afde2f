"""A table of numbers that grows: one row a thing, one named column a quantity."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

_FIRST_CAPACITY = 16


class Table:
    """Rows 0…len−1 of several columns, whose capacity doubles when it is full."""

    def __init__(self, columns: Mapping[str, type]) -> None:
        """Takes the columns' names and numpy types."""
        self._columns: dict[str, NDArray[Any]] = {
            name: np.zeros(_FIRST_CAPACITY, dtype=kind) for name, kind in columns.items()
        }
        self._resize(0)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, column: str) -> NDArray[Any]:
        """A view of one column, until rows come or go: writing to it writes to the table."""
        return self._views[column]

    def append(self, **values: float) -> int:
        """Adds a row, zero where no value is given, and returns its index."""
        row = self._length
        if row == len(next(iter(self._columns.values()))):
            for name, column in self._columns.items():
                self._columns[name] = np.concatenate([column, np.zeros_like(column)])
        self._resize(row + 1)
        self.write(row, **values)
        return row

    def write(self, row: int, **values: float) -> None:
        """Sets a whole row, zero where no value is given."""
        for name, column in self._views.items():
            column[row] = values.get(name, 0.0)

    def drop(self, row: int) -> int:
        """Removes a row by moving the last one into its place; returns the row it moved from."""
        last = self._length - 1
        for column in self._views.values():
            column[row] = column[last]
        self._resize(last)
        return last

    def _resize(self, length: int) -> None:
        self._length = length
        self._views = {name: column[:length] for name, column in self._columns.items()}
