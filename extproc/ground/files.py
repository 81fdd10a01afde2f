"""Reader of files that settings name: errors take one line, and changed files are read again."""

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
    """Reads a PEM file; raises ValueError if that fails or the file holds no certificate."""
    content = read_file(setting, path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except ssl.SSLError:
        raise ValueError(f"{setting}: {path} holds no certificate (PEM)") from None
    return content


class WatchedFiles(Generic[T]):
    """Files that may change while the program runs. If the new content cannot be used, the last
    content stays in use.

    Args:
        what: name of the files in log lines.
        read: reads the content; raises OSError or ValueError if the files cannot be used.
    """

    content: T  # not set before the first successful read

    def __init__(self, what: str, read: Callable[[], T], *files: Path) -> None:
        self._what = what
        self._read = read
        self._files = files
        self._stamps: list[_Stamp | None] | None = None  # None: no read has succeeded yet
        self._extra = {"file": ", ".join(map(str, files))}
        self.outage = OutageLog(
            log,
            f"{what} cannot be used: keeping the last usable content, if any, and retrying",
            f"{what} can be used again",
            logging.ERROR,
            each=True,
            **self._extra,
        )

    def read(self) -> T:
        """Returns the content; raises what the constructor's ``read`` raises."""
        stamps, self._stamps = [_stamp(file) for file in self._files], None
        self.content = self._read()
        self._stamps = stamps
        return self.content

    def newest(self) -> T:
        """Returns the last usable content, after a read of changed files; raises what the
        constructor's ``read`` raises if no read has succeeded yet."""
        if not hasattr(self, "content"):
            return self.read()
        self.if_changed()
        return self.content

    def if_changed(self) -> T | None:
        """Returns the content if the files changed, else None. If the new content cannot be used,
        logs the reason and returns None.

        Files count as changed until a read succeeds.
        """
        if self._stamps == [_stamp(file) for file in self._files]:
            self.outage.recovered()
            return None
        again = hasattr(self, "content")
        try:
            self.read()
        except (OSError, ValueError) as error:
            self.outage.failed(getattr(error, "strerror", None) or error)
            return None
        self.outage.recovered()
        if again:
            log.info(f"{self._what} read again after a change", extra=self._extra)
        return self.content


def _stamp(file: Path) -> _Stamp | None:
    """Returns figures that change with a file, or None if the file cannot be accessed."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
