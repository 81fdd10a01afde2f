"""Traces: requests with their times and lengths."""

import gzip
import heapq
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from pathlib import Path

ID_TOKENS = 512
"""Prompt tokens that one hash id stands for."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request of a trace."""

    at: float
    """Seconds from the start."""
    prompt_tokens: int
    output_tokens: int
    """What it will generate; no policy may see it."""
    max_tokens: int | None
    hash_ids: tuple[int, ...] = ()
    """One id per 512 prompt tokens: equal leading ids are a shared prefix."""


def read(
    paths: Iterable[Path],
    speed: float = 1.0,
    most: int | None = None,
    start: float = 0.0,
    duration: float = inf,
) -> list[TracedRequest]:
    """The traces merged by time, ``speed`` times as fast, and of these the first ``most``.

    ``start``: leave out what arrives in so many seconds (at that speed), and count time from there;
    ``duration``: leave out what arrives later than that from there.

    Raises:
        OSError: a file cannot be read.
        ValueError: a line is no request, or there is none; the message names the file.
    """
    paths = list(paths)
    merged = heapq.merge(*(_lines(path) for path in paths), key=lambda request: request.at)
    faster = (replace(one, at=one.at / speed - start) for one in merged)
    requests = list(islice((one for one in faster if 0 <= one.at < duration), most))
    if not requests:
        within = f" in the first {duration:g} s" if duration < inf else ""
        later = f" from {start:g} s on" if start else ""
        raise ValueError(f"{' and '.join(map(str, paths))} has no requests{within}{later}")
    return requests


def _lines(path: Path) -> Iterator[TracedRequest]:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                yield _line(path, number, line)
    except (gzip.BadGzipFile, zlib.error, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read to its end: {error}") from None


def _line(path: Path, number: int, line: str) -> TracedRequest:
    try:
        return _request(json.loads(line))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}:{number} is no request of a trace: {error!r}") from None


def _request(fields: object) -> TracedRequest:
    if not isinstance(fields, dict):
        raise TypeError("not an object")
    bound = fields.get("max_tokens")
    return TracedRequest(
        at=_seconds(fields["timestamp"]),
        prompt_tokens=max(int(str(fields["input_length"])), 1),
        output_tokens=max(int(str(fields["output_length"])), 1),
        max_tokens=None if bound is None else int(str(bound)),
        hash_ids=_ids(fields.get("hash_ids") or []),
    )


def _seconds(timestamp: object) -> float:
    at = float(str(timestamp)) / 1000
    if not 0 <= at < inf:
        raise ValueError(f"timestamp {timestamp} is no time since the start")
    return at


def _ids(ids: object) -> tuple[int, ...]:
    if not isinstance(ids, list) or not all(isinstance(one, int) for one in ids):
        raise TypeError("hash_ids is not a list of whole numbers")
    return tuple(ids)
