"""A file that is read again when it changes."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from extproc.trouble import Trouble

log = logging.getLogger(__name__)

T = TypeVar("T")

Stamp = tuple[int, int, int]


class WatchedFile(Generic[T]):
    """What people may change while the program runs; what is broken changes nothing.

    The log calls it ``what``; ``read`` raises OSError or ValueError where it cannot be used.
    """

    def __init__(self, path: Path, what: str, read: Callable[[Path], T]) -> None:
        self._path = path
        self._read_file = read
        self._seen: Stamp | None = None
        begins, over = f"{what} is not usable, keeping its last content", f"{what} is usable again"
        self._trouble = Trouble(log, begins, over, logging.ERROR, each=True, file=str(path))

    def read(self) -> T:
        """What is in it.

        Raises:
            OSError: it cannot be read.
            ValueError: it cannot be used.
        """
        self._seen = stamp(self._path)
        try:
            return self._read_file(self._path)
        except OSError:
            self._seen = None  # it may be there, or readable, the next time without any change
            raise

    def news(self) -> T | None:
        """What is in it, if it changed and can be used; what cannot be is logged once."""
        if self._seen is not None and stamp(self._path) == self._seen:
            return None
        try:
            read = self.read()
        except OSError as error:
            self._trouble.failed(error.strerror or error)
        except ValueError as error:
            self._trouble.failed(error)
        else:
            self._trouble.works()
            return read
        return None


def stamp(path: Path) -> Stamp | None:
    """Differs when the file was replaced or written to; None where it cannot be looked at."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
