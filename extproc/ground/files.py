"""Files that settings name: read with errors of one line, and read again when they change."""

import logging
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from extproc.ground.outage_log import OutageLog

log = logging.getLogger(__name__)

T = TypeVar("T")

_Stamp = tuple[int, int, int]  # inode, time of modification (ns), bytes


def read_file(setting: str, path: Path) -> bytes:
    """Reads a file; raises ValueError with setting, file and reason if that fails."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{setting}: {path}: {error.strerror}") from None


def read_certificates(setting: str, path: Path) -> bytes:
    """Reads a file of certificates (PEM); raises ValueError if that fails or it holds none."""
    content = read_file(setting, path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except ssl.SSLError:
        raise ValueError(f"{setting}: {path} holds no certificate (PEM)") from None
    return content


class WatchedFiles(Generic[T]):
    """Files that people may change while the program runs; a broken change keeps the last content.

    Args:
        what: the name that log lines give the files.
        read: returns their content, or raises OSError or ValueError; the next look tries again.
        files: the files to watch.
    """

    def __init__(self, what: str, read: Callable[[], T], *files: Path) -> None:
        self._what = what
        self._read = read
        self._files = files
        self._seen: list[_Stamp | None] | None = None
        self._was_read = False
        self._extra = {"file": ", ".join(map(str, files))}
        begins, over = f"{what} is not usable, retrying", f"{what} is usable"
        self._missing = OutageLog(log, begins, over, logging.ERROR, each=True, **self._extra)
        begins, over = f"{what} is not usable, keeping its last content", f"{what} is usable again"
        self._broken = OutageLog(log, begins, over, logging.ERROR, each=True, **self._extra)

    def read(self) -> T:
        """Returns the content; raises as ``read`` does."""
        stamps = [_stamp(file) for file in self._files]
        self._seen = None
        content = self._read()
        self._seen, self._was_read = stamps, True
        return content

    def if_changed(self) -> T | None:
        """Returns changed content that can be used, else None; an unusable file is logged once."""
        if self._seen is not None and self._seen == [_stamp(file) for file in self._files]:
            return None
        again = self._was_read
        outage = self._broken if again else self._missing
        try:
            content = self.read()
        except OSError as error:
            outage.failed(error.strerror or error)
        except ValueError as error:
            outage.failed(error)
        else:
            outage.recovered()
            if again:
                log.info(f"{self._what} is read again", extra=self._extra)
            return content
        return None


def _stamp(path: Path) -> _Stamp | None:
    """Identifies a version of the file; None if it cannot be looked at."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
