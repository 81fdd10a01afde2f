"""The name that was asked for, in place of the replica's own, in a response while it passes."""

from pydantic_core import to_json


class AnswerNamer:
    """Replaces the value of every ``model`` in a body, in chunks however split.

    It knows JSON and server-sent events as replicas write them, with one blank after a colon or
    none. The key cannot occur inside generated text, since JSON escapes the quotes there.
    """

    __slots__ = ("_kept", "_pairs")

    def __init__(self, served: str, asked: str) -> None:
        """Takes the name in the response, and the one to put there."""
        keys = (b'"model":', b'"model": ')
        self._pairs = [(key + to_json(served), key + to_json(asked)) for key in keys]
        self._kept = b""

    def feed(self, chunk: bytes, last: bool) -> bytes:
        """The next bytes of the body, with the name replaced; what may be the beginning of one is
        kept for the next chunk, unless this is the last."""
        body = self._kept + chunk
        for served, asked in self._pairs:
            body = body.replace(served, asked)
        kept = 0 if last else max(_begun(body, served) for served, _ in self._pairs)
        whole = len(body) - kept
        self._kept = body[whole:]
        return body[:whole]


def _begun(body: bytes, word: bytes) -> int:
    """With how many bytes of a word the body ends."""
    longest = min(len(word) - 1, len(body))
    return next((size for size in range(longest, 0, -1) if body.endswith(word[:size])), 0)
