"""The token that whoever looks at an admin address has to show."""

from functools import partial
from hmac import compare_digest
from pathlib import Path

from extproc.ground.files import Watched, read_file


class Token:
    """The one in a file; another one from when the file has changed."""

    def __init__(self, path: Path) -> None:
        """Reads it.

        Raises:
            ValueError: the file holds none, or cannot be read.
        """
        self._file = Watched("admin token", partial(read_token, path), path)
        self._token = self._file.read()

    def is_in(self, header: str) -> bool:
        """Whether a request shows it in this header, ``Authorization``."""
        self._token = self._file.news() or self._token
        scheme, _, shown = header.partition(" ")
        right = compare_digest(shown.encode(errors="surrogateescape"), self._token.encode())
        return right and scheme.lower() == "bearer"


def read_token(path: Path) -> str:
    """The token in a file.

    Raises:
        ValueError: it holds none, or cannot be read.
    """
    token = read_file("admin.token_file", path).decode().strip()
    if not token or not token.isascii() or not token.isprintable():
        raise ValueError(f"admin.token_file: {path} holds no token: one line of ASCII")
    return token
