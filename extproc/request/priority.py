"""vLLM's ``priority`` in a request's body."""

import re

_EMPTY = re.compile(rb"(?:\xef\xbb\xbf)?\s*\{\s*\}")


def with_priority(body: bytes, priority: int) -> bytes:
    """``body``, a whole JSON object, with this ``priority`` of vLLM: the lower goes first.

    It comes last: of several, whoever decodes a body takes the last one, so that what a client said
    does not count.
    """
    end = body.rfind(b"}")
    comma = b"" if _EMPTY.match(body) else b","
    return b'%b%b"priority":%d%b' % (body[:end], comma, priority, body[end:])
