"""Changes to a request's body and its answer: the model's name, and vLLM's priority."""

import re

from pydantic_core import from_json, to_json

from extproc.request.body import ending, readable
from extproc.request.endpoint import Endpoint
from extproc.request.media import model_in_form

_TOKEN = re.compile(rb'"[^"]*+(?:"|\Z)|[\[\]{}]')
"""Of a body that was cut, the last may be the beginning of a string."""
_VALUE = re.compile(rb'\s*:\s*("[^"]*+")')
_FIRST = re.compile(rb'\s*\{\s*"model"\s*:\s*("[^"\\]*+")')

_AGAIN = (b'"model"', rb"\u006")
"""How the key may be written once more: the escapes of its letters begin alike."""

_DEPTH = {b"{": 1, b"[": 1, b"}": -1, b"]": -1}

Span = tuple[int, int]


def rename(endpoint: Endpoint, body: bytes, asked: str, name: str) -> bytes:
    """``body`` with ``name`` in place of ``asked`` as its model; itself where none is named in
    it."""
    form = endpoint.takes_audio
    span = model_in_form(body) if form else _span(body, asked)
    if span is None:
        return body
    first, last = span
    return body[:first] + (name.encode() if form else to_json(name)) + body[last:]


def _span(body: bytes, asked: str) -> Span | None:
    """Of the value of ``model``, with its quotes."""
    first = _FIRST.match(body)
    again = first and any(body.find(key, first.end()) >= 0 for key in _AGAIN)
    if first and not again and from_json(first[1]) == asked:
        return first.span(1)
    part = readable(body)
    if len(part) < len(body):
        start, _ = ending(body)
        if found := _last_model(b"{" + body[start:]):
            return found[0] + start - 1, found[1] + start - 1
    return _last_model(part)


def _last_model(text: bytes) -> Span | None:
    """In the outermost object; of several the last counts, as for whoever decodes it."""
    # Quotes inside strings are passed over by what stands for them here, in as many bytes.
    plain = text.replace(rb"\\", b"__").replace(rb"\"", b"__")
    depth, found = 0, None
    for token in _TOKEN.finditer(plain):
        step = _DEPTH.get(token[0])
        if step is not None:
            depth += step
            continue
        value = _VALUE.match(plain, token.end()) if depth == 1 else None
        if value and from_json(text[slice(*token.span())]) == "model":
            found = value.span(1)
    return found


_EMPTY = re.compile(rb"(?:\xef\xbb\xbf)?\s*\{\s*\}")


def with_priority(body: bytes, priority: int) -> bytes:
    """``body``, a whole JSON object, with this ``priority`` of vLLM: the lower goes first.

    It comes last: of several, whoever decodes a body takes the last one, so that what a client said
    does not count.
    """
    end = body.rfind(b"}")
    comma = b"" if _EMPTY.match(body) else b","
    return b'%b%b"priority":%d%b' % (body[:end], comma, priority, body[end:])
