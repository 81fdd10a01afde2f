"""A streamed answer, looked at after its end: while it comes, only bytes and times are kept."""

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

_DATA = b"data:"
_DONE = b"data: [DONE]"
_TAIL_BYTES = 4096
"""In which the usage is looked for."""


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
    try:
        return _read(b"".join(chunks), chunks, times)
    except (AttributeError, TypeError):  # events of another form than OpenAI's
        return Streamed(problem="not a completion")


def _read(whole: bytes, chunks: Sequence[bytes], times: Sequence[float]) -> Streamed:
    first, usage, problem = _first_token(whole), _usage(whole), _problem(whole)
    if first is None:
        return Streamed(None, [], usage, problem or (None if usage else "not a completion"))
    arrived = list(accumulate(map(len, chunks)))
    begin, end = (bisect_left(arrived, offset) for offset in (first, _last_token(whole)))
    gaps = [later - earlier for earlier, later in pairwise(times[begin : end + 1])]
    return Streamed(times[begin], gaps, usage, problem)


def _first_token(whole: bytes) -> int | None:
    """Bytes up to the end of the first event with a token."""
    start = 0
    while (end := whole.find(b"\n", start)) >= 0:
        if _has_token(_event(whole[start:end])):
            return end
        start = end + 1
    return None


def _last_token(whole: bytes) -> int:
    """Bytes up to the end of the last event with a token; 0 where there is none."""
    end = len(whole)
    while end > 0:
        start = whole.rfind(b"\n", 0, end) + 1
        if _has_token(_event(whole[start:end])):
            return end
        end = start - 1
    return 0


def _usage(whole: bytes) -> dict[str, Any]:
    """The last one reported."""
    for line in reversed(whole[-_TAIL_BYTES:].splitlines()):
        usage = (_event(line) or {}).get("usage")
        if isinstance(usage, dict):
            return usage
    return {}


def _problem(whole: bytes) -> str | None:
    if b'"error"' in whole:
        events = [_event(line) for line in whole.splitlines() if b'"error"' in line]
        if any(e and (e.get("error") or e.get("object") == "error") for e in events):
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
