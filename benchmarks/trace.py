"""Traces: requests with their times and lengths."""

import gzip
import heapq
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
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


def read(paths: Iterable[Path], speed: float = 1.0, most: int | None = None) -> list[TracedRequest]:
    """The traces merged by time, ``speed`` times as fast, and of these the first ``most``.

    Raises:
        OSError: a file cannot be read.
        ValueError: a line is no request; the message names file and line.
    """
    merged = heapq.merge(*(_lines(path) for path in paths), key=lambda request: request.at)
    return [
        TracedRequest(r.at / speed, r.prompt_tokens, r.output_tokens, r.max_tokens, r.hash_ids)
        for r in islice(merged, most)
    ]


def _lines(path: Path) -> Iterator[TracedRequest]:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield _request(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}:{number} is no request of a trace: {error!r}") from None


def _request(fields: dict[str, object]) -> TracedRequest:
    bound, ids = fields.get("max_tokens"), fields.get("hash_ids") or ()
    assert isinstance(ids, list | tuple)
    return TracedRequest(
        at=float(str(fields["timestamp"])) / 1000,
        prompt_tokens=max(int(str(fields["input_length"])), 1),
        output_tokens=max(int(str(fields["output_length"])), 1),
        max_tokens=None if bound is None else int(str(bound)),
        hash_ids=tuple(ids),
    )
