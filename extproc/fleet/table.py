"""A table of numbers that grows: one row a thing, one named column a quantity."""

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from extproc.predict.inputs import Floats, Indices

_FIRST_CAPACITY = 16
_LENGTHS_REMEMBERED = 64


class Table:
    """Rows 0…len−1 of the columns that a subclass names, whose capacity doubles when it is full.

    A column is an annotation, ``Floats`` or ``Indices``, and an attribute: a view until rows come
    or go, and writing to it writes to the table. Columns of a kind are the rows of one array, in
    the order they are named, so that a thing is written, moved and read in one go.
    """

    def __init__(self) -> None:
        kinds = type(self).__annotations__.items()
        self._names = [
            [name for name, kind in kinds if kind is Floats],
            [name for name, kind in kinds if kind is Indices],
        ]
        self._floats: Floats = np.zeros((len(self._names[0]), _FIRST_CAPACITY))
        self._indices: Indices = np.zeros((len(self._names[1]), _FIRST_CAPACITY), dtype=np.intp)
        self._views: dict[int, dict[str, NDArray[Any]]] = {}
        """By length: rows come and go all the time, and to make 17 views anew takes 3 µs."""
        self._resize(0)

    def __len__(self) -> int:
        return self._length

    def append(self, **values: float) -> int:
        """Adds a row, zero where no value is given, and returns its index."""
        row = self._length
        if row == self._floats.shape[1]:
            self._views.clear()
            self._floats = np.hstack([self._floats, np.zeros_like(self._floats)])
            self._indices = np.hstack([self._indices, np.zeros_like(self._indices)])
        self._resize(row + 1)
        self.write(row, **values)
        return row

    def write(self, row: int, **values: float) -> None:
        """Sets a whole row, zero where no value is given."""
        self._floats[:, row] = 0.0
        self._indices[:, row] = 0
        columns = self.__dict__
        for name, value in values.items():
            columns[name][row] = value

    def drop(self, row: int) -> int:
        """Removes a row by moving the last one into its place; returns the row it moved from."""
        last = self._length - 1
        self._floats[:, row] = self._floats[:, last]
        self._indices[:, row] = self._indices[:, last]
        self._resize(last)
        return last

    def first(self, columns: int) -> Floats:
        """The first so many columns of ``Floats``, as the rows of one array."""
        return self._floats[:columns, : self._length]

    def copy(self, columns: int, rows: Indices | None = None) -> Self:
        """Another one, of the first so many columns of ``Floats``; of these rows alone, if given.

        It is there to be read, by the names of its columns.
        """
        floats = self._floats[:columns, : self._length]
        floats = floats.copy() if rows is None else floats.take(rows, axis=1)
        table = object.__new__(type(self))
        table.__dict__.update(zip(self._names[0], floats, strict=False))
        return table

    def _resize(self, length: int) -> None:
        self._length = length
        views = self._views.get(length)
        if views is None:
            if len(self._views) >= _LENGTHS_REMEMBERED:
                self._views.clear()
            floats, indices = self._names
            views = self._views[length] = {
                **dict(zip(floats, self._floats[:, :length], strict=True)),
                **dict(zip(indices, self._indices[:, :length], strict=True)),
            }
        self.__dict__.update(views)
