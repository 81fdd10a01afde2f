"""The id of a response of the Responses API, read while the response passes."""

import re

_ID = re.compile(rb'"id":\s*"(resp_[^"\\]{1,123})"')
_WITHIN = 4_096
"""Bytes in which it stands: vLLM's JSON begins with it, and so does the first event of a stream."""


class ResponseIdReader:
    """Reads the id from the beginning of a body, in chunks however split."""

    def __init__(self) -> None:
        self._head: bytes | None = b""
        """None: it was found, or is not there."""

    def feed(self, chunk: bytes) -> str | None:
        """Take the next bytes of the body; returns the id once, when it is whole."""
        if self._head is None:
            return None
        self._head += chunk[: _WITHIN - len(self._head)]
        found = _ID.search(self._head)
        if found or len(self._head) >= _WITHIN:
            self._head = None
        return found[1].decode(errors="replace") if found else None
