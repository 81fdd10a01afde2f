"""Files that are read again when they change."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from extproc.ground.outage_log import Trouble

log = logging.getLogger(__name__)

T = TypeVar("T")

_Stamp = tuple[int, int, int]


class Watched(Generic[T]):
    """What people may change while the program runs; what is broken changes nothing.

    The log calls it ``what``; ``read`` raises OSError or ValueError where it cannot be used, and
    then it is tried again at the next look.
    """

    def __init__(self, what: str, read: Callable[[], T], *files: Path) -> None:
        self._what = what
        self._read = read
        self._files = files
        self._seen: list[_Stamp | None] | None = None
        self._was_read = False
        self._extra = {"file": ", ".join(map(str, files))}
        begins, over = f"{what} is not usable, retrying", f"{what} is usable"
        self._missing = Trouble(log, begins, over, logging.ERROR, each=True, **self._extra)
        begins, over = f"{what} is not usable, keeping its last content", f"{what} is usable again"
        self._broken = Trouble(log, begins, over, logging.ERROR, each=True, **self._extra)

    def read(self) -> T:
        """What is in it; raises as ``read`` does."""
        stamps = [_stamp(file) for file in self._files]
        self._seen = None
        content = self._read()
        self._seen, self._was_read = stamps, True
        return content

    def news(self) -> T | None:
        """What is in it, if it changed and can be used; what cannot be is logged once."""
        if self._seen is not None and self._seen == [_stamp(file) for file in self._files]:
            return None
        again = self._was_read
        trouble = self._broken if again else self._missing
        try:
            content = self.read()
        except OSError as error:
            trouble.failed(error.strerror or error)
        except ValueError as error:
            trouble.failed(error)
        else:
            trouble.works()
            if again:
                log.info(f"{self._what} is read again", extra=self._extra)
            return content
        return None


def _stamp(path: Path) -> _Stamp | None:
    """Differs when the file was replaced or written to; None where it cannot be looked at."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
