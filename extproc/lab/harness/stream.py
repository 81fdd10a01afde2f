"""A streamed answer, read after its end from its chunks and their times."""

import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

_DATA = b"data:"
_DONE = b"data: [DONE]"
_TAIL = 16  # lines in which the usage is looked for


@dataclass(frozen=True, slots=True)
class Streamed:
    """What came of a stream."""

    first_at: float | None = None  # when the first token came; None: none did
    gaps_s: Sequence[float] = ()  # seconds from one chunk with tokens to the next
    usage: dict[str, Any] = field(default_factory=dict)
    problem: str = ""  # `error event`, `broken stream`, `not a completion`; empty where it is whole


def read(chunks: Sequence[bytes], times: Sequence[float]) -> Streamed:
    """A stream of OpenAI's, chunk by chunk, and when each of them came.

    Beginning and end are parsed. What lies between has tokens, and is most of it.
    """
    try:
        return _read(chunks, times)
    except (AttributeError, TypeError):  # events of another form than OpenAI's
        return Streamed(problem="not a completion")


def _read(chunks: Sequence[bytes], times: Sequence[float]) -> Streamed:
    lines = b"".join(chunks).splitlines(keepends=True)
    usage, problem = _usage(lines), _problem(lines)
    first = _token_in(lines, range(len(lines)))
    if first is None:
        return Streamed(None, (), usage, problem or ("" if usage else "not a completion"))
    last = _token_in(lines, reversed(range(len(lines))))
    starts, arrived = [0, *accumulate(map(len, lines))], list(accumulate(map(len, chunks)))
    begin, end = (
        bisect_left(arrived, starts[line] + len(lines[line].rstrip()))
        for line in (first, last or first)
    )
    gaps = [later - earlier for earlier, later in pairwise(times[begin : end + 1])]
    return Streamed(times[begin], gaps, usage, problem)


def _token_in(lines: Sequence[bytes], order: Iterable[int]) -> int | None:
    return next((number for number in order if _has_token(_event(lines[number]))), None)


def _usage(lines: Sequence[bytes]) -> dict[str, Any]:
    reported = (_event(line).get("usage") for line in reversed(lines[-_TAIL:]))
    return next((usage for usage in reported if isinstance(usage, dict)), {})


def _problem(lines: Sequence[bytes]) -> str:
    events = [_event(line) for line in lines if b'"error"' in line]
    if any(one.get("error") or one.get("object") == "error" for one in events):
        return "error event"
    return "" if b"".join(lines[-2:]).rstrip().endswith(_DONE) else "broken stream"


def _event(line: bytes) -> dict[str, Any]:
    """What is in a line; nothing where it is no event, or not all of one."""
    if not line.startswith(_DATA):
        return {}
    try:
        event = json.loads(line[len(_DATA) :])
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}


def _has_token(event: dict[str, Any]) -> bool:
    for choice in event.get("choices") or []:
        parts = {"text": choice.get("text"), **(choice.get("delta") or {}), "role": None}
        if any(parts.values()):
            return True
    return False
