"""Traces: times and lengths of requests."""

import gzip
import heapq
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from pathlib import Path

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, ValidationError

from extproc.lab.replay import Traced

ID_TOKENS = 512  # prompt tokens that one hash id stands for


@dataclass(frozen=True, slots=True)
class TracedRequest(Traced):
    max_tokens: int | None
    hash_ids: tuple[int, ...] = ()  # one per 512 prompt tokens; equal leading ids: equal prefix

    def block_hashes(self, block_size: int) -> list[int]:
        """Hashes of the prompt's full blocks; equal prefixes have equal hashes. ``block_size`` must
        divide 512."""
        per_id = ID_TOKENS // block_size
        full = min(self.prompt_tokens // block_size, len(self.hash_ids) * per_id)
        return [self.hash_ids[block // per_id] * per_id + block % per_id for block in range(full)]


def read(
    paths: Iterable[Path],
    speed: float = 1.0,
    most: int | None = None,
    start: float = 0.0,
    duration: float = inf,
) -> list[TracedRequest]:
    """Merges traces by time, ``speed`` times as fast; returns the first ``most`` requests.

    ``start`` and ``duration`` select a part, in seconds at that speed; time counts from ``start``.
    Raises OSError or ValueError with the files' names if one is unreadable or no request is left.
    """
    paths = list(paths)
    merged = heapq.merge(*(_lines(path) for path in paths), key=lambda request: request.at)
    faster = (replace(request, at=request.at / speed - start) for request in merged)
    part = (request for request in faster if 0 <= request.at < duration)
    requests = list(islice(part, most))
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
        fields = _TraceLine.model_validate_json(line)
    except ValidationError as error:
        problem = first_problem(error)
        raise ValueError(f"{path}:{number} is no request of a trace: {problem}") from None
    lengths = max(fields.input_length, 1), max(fields.output_length, 1)
    ids = fields.hash_ids or ()
    return TracedRequest(fields.timestamp / 1000, *lengths, fields.max_tokens, ids)


def first_problem(error: ValidationError) -> str:
    """First problem of a validation, in one line that names the field."""
    first = error.errors()[0]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))


class _TraceLine(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False)

    timestamp: NonNegativeFloat  # milliseconds
    input_length: int
    output_length: int
    max_tokens: int | None = None
    hash_ids: tuple[int, ...] | None = None
