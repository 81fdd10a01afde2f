"""Request body, from bytes to a JSON object."""

import re
from contextlib import suppress
from itertools import islice

import numpy as np
from pydantic_core import from_json

from extproc.request.errors import BadRequest

_BUDGET = 40e6  # nanoseconds that reading a body may take: meanwhile a router decides nothing else

_PER_BYTE = 4.5  # nanoseconds for any byte: to weigh it, and to decode it inside a long string

_COSTS = {ord(","): 130.0, ord('"'): 75.0, ord("["): 350.0, ord("{"): 900.0}
"""Nanoseconds for one of these: to decode the value that begins with it and to walk over it,
wherever it stands and however small it is. A value or a key follows a comma; a string has two
quotes. Measured with pydantic-core 2.50 under Python 3.11; nothing that was tried took half as
long again as these say."""

_PER_LONG_NUMBER = 600.0  # nanoseconds for 19 digits in a row: a number too long for a machine word

_AS_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_LONG_NUMBER = b"0" * 19
_MOST_PER_BYTE = _PER_BYTE + _PER_LONG_NUMBER / len(_LONG_NUMBER)
"""Were all of them digits of such numbers: up to a megabyte there is no need to look for them."""

_SHORT = 131_072  # bytes up to which a body is read unweighed: the worst takes 40 ms

_STRIDE = 32_768  # bytes weighed at a time; all opening braces are within the budget

_TAIL = 4_096  # bytes at the end of a truncated body that tell what follows

_END = 16_384  # bytes at the end of a body that are read for the fields that follow a long prompt

_NAMES = re.compile(
    rb'"(?:model|n|stream|previous_response_id|max_(?:completion_|output_)?tokens)"\s*:'
)
_TRIES = 4

_BASE64 = re.compile(rb"[A-Za-z0-9+/_-]{256}\Z")
_TOKEN_IDS = re.compile(rb"[\d,\s\[\]]{256,}\Z")


def without_mark(body: bytes) -> bytes:
    """``body`` without the byte order mark that UTF-8 may begin with."""
    return body.removeprefix(b"\xef\xbb\xbf")


def decode(body: bytes, partial: bool = False) -> dict[str, object]:
    """The JSON object in ``body``; with ``partial``, as much of one as is there.

    Raises:
        BadRequest: it is not a JSON object in UTF-8, or nests deeper than 200 levels.
    """
    body = without_mark(body)
    if not body:
        if partial:
            return {}
        raise BadRequest("the request body is empty; send a JSON object", code="invalid_json")
    try:
        value = from_json(body, allow_partial="trailing-strings" if partial else False)
    except (ValueError, RecursionError, MemoryError) as error:
        message = f"the request body is not valid JSON: {error}"
        raise BadRequest(message, code="invalid_json") from None
    if not isinstance(value, dict):
        raise BadRequest("the request body is not a JSON object", code="invalid_type")
    return value


def readable(body: bytes) -> bytes:
    """What of ``body`` is decoded and walked: its beginning, as much as ``_BUDGET`` is enough for.

    That is all of any ordinary body: 8 MB of text or images, 200,000 token ids, 10,000 messages.
    Marks inside strings are weighed as if they were outside.
    """
    left = _BUDGET - len(body) * _MOST_PER_BYTE
    if len(body) <= _SHORT or (left >= 0.0 and _cost_of_marks(body) <= left):
        return body
    left = _BUDGET
    for start in range(0, len(body), _STRIDE):
        left -= _cost(body[start : start + _STRIDE])
        if left < 0.0:
            return body[:start]
    return body


def ending(body: bytes) -> dict[str, object]:
    """The last fields of a body that is not read whole, from one of ``_NAMES`` on.

    Clients may name the model, and bound the output, after the prompt. What follows one of the
    body's own names is an object without its opening brace; what follows an inner one is not.
    """
    end = body[-_END:]
    for name in islice(_NAMES.finditer(end), _TRIES):
        with suppress(BadRequest):
            return decode(b"{" + end[name.start() :])
    return {}


def _cost(part: bytes) -> float:
    """Nanoseconds to read so much of a body."""
    long_numbers = part.translate(_AS_ZEROS).count(_LONG_NUMBER)
    return len(part) * _PER_BYTE + _cost_of_marks(part) + long_numbers * _PER_LONG_NUMBER


def _cost_of_marks(part: bytes) -> float:
    each = np.frombuffer(part, np.uint8)  # a fifth of what it takes to count them as bytes
    return sum(np.count_nonzero(each == mark) * cost for mark, cost in _COSTS.items())


def tokens_per_byte(part: bytes, of_text: float) -> float:
    """Prompt tokens in a byte of what follows ``part``, the beginning of a body.

    It may break off inside an image or other media (no tokens follow), token ids (more like its
    last ones follow) or text, which has ``of_text`` tokens in a byte.
    """
    tail = part[-_TAIL:]
    if _BASE64.search(tail):
        return 0.0
    if ids := _TOKEN_IDS.search(tail):
        return ids[0].count(b",") / len(ids[0])
    return of_text
