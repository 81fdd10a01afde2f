"""A streamed answer, looked at after its end: while it comes, only bytes and times are kept."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

_DATA = b"data:"
_DONE = b"data: [DONE]"


@dataclass(frozen=True, slots=True)
class Streamed:
    """What came of a stream."""

    first_at: float | None = None
    """When the first token came; None: none did."""
    gaps_s: list[float] = field(default_factory=list)
    """Seconds from one chunk with tokens to the next."""
    usage: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None
    """``error event``, ``broken stream``, ``not a completion``, or None."""


def read(chunks: Sequence[bytes], times: Sequence[float]) -> Streamed:
    """A stream of OpenAI's as it came: chunk by chunk, and when each of them.

    Beginning and end are parsed. What lies between has tokens, and is most of it.
    """
    first = _first(chunks)
    last = _last(chunks)
    usage = _usage(chunks[last:])
    problem = _problem(b"".join(chunks))
    if first is None:
        return Streamed(None, [], usage, problem or (None if usage else "not a completion"))
    with_tokens = times[first : last + 1]
    gaps = [later - earlier for earlier, later in pairwise(with_tokens)]
    return Streamed(times[first], gaps, usage, problem)


def _first(chunks: Sequence[bytes]) -> int | None:
    """The chunk that completes the first event with a token."""
    rest = b""
    for index, chunk in enumerate(chunks):
        *lines, rest = (rest + chunk).split(b"\n")
        if any(_has_token(_event(line)) for line in lines):
            return index
    return None


def _last(chunks: Sequence[bytes]) -> int:
    """The last chunk with a token, or with a part of an event; 0 where there is none."""
    for index in range(len(chunks) - 1, 0, -1):
        lines = [line for line in chunks[index].splitlines() if line and line != _DONE]
        if any((event := _event(line)) is None or _has_token(event) for line in lines):
            return index
    return 0


def _usage(chunks: Sequence[bytes]) -> dict[str, Any]:
    """The last one reported."""
    for line in reversed(b"".join(chunks).splitlines()):
        usage = (_event(line) or {}).get("usage")
        if isinstance(usage, dict):
            return usage
    return {}


def _problem(whole: bytes) -> str | None:
    if b'"error"' in whole:
        events = [_event(line) for line in whole.splitlines() if b'"error"' in line]
        if any(event and "error" in (event.get("object"), *event) for event in events):
            return "error event"
    return None if whole.rstrip().endswith(_DONE) else "broken stream"


def _event(line: bytes) -> dict[str, Any] | None:
    """What is in a line; None where it is no event, or not all of one."""
    if not line.startswith(_DATA):
        return None
    try:
        event = json.loads(line[len(_DATA) :])
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def _has_token(event: dict[str, Any] | None) -> bool:
    """Whether text came with it, or another part of an answer."""
    for choice in (event or {}).get("choices") or []:
        parts = {"text": choice.get("text"), **(choice.get("delta") or {}), "role": None}
        if any(parts.values()):
            return True
    return False
