"""Recordings of a real vLLM server: its limits, the requests it served, and its counters."""

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from extproc.predict.windows import EngineCounts


@dataclass(frozen=True, slots=True)
class Limits:
    max_num_seqs: int
    token_budget: int  # `max_num_batched_tokens`
    block_size: int  # tokens in a KV block
    kv_tokens: int  # tokens the KV cache holds


@dataclass(frozen=True, slots=True)
class Request:
    at_s: float  # when it was sent, in seconds from the first of its run
    prompt_tokens: int
    output_tokens: int  # generated; the request asked for exactly so many
    ttft_s: float
    completion_s: float


@dataclass(frozen=True, slots=True)
class Run:
    name: str
    requests: list[Request]  # in the order they were sent
    polls: list[EngineCounts]  # times are in seconds from the first request


@dataclass(frozen=True, slots=True)
class Recording:
    about: dict[str, str]  # where it comes from: server, model, machine, date
    limits: Limits
    calibration: Run  # of :func:`benchmarks.fit.replay.bursts`
    runs: list[Run]


_FILE = TypeAdapter(Recording)


def write(recording: Recording, path: Path) -> None:
    """Writes a recording as JSON, compressed if the name ends in ``.gz``."""
    text = _FILE.dump_json(recording)
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def read(path: Path) -> Recording:
    """Recording in a file; raises OSError or a ValueError that names the file."""
    text = path.read_bytes()
    try:
        return _FILE.validate_json(gzip.decompress(text) if path.suffix == ".gz" else text)
    except (gzip.BadGzipFile, zlib.error, EOFError, ValidationError) as error:
        raise ValueError(f"{path} is no recording: {error}") from None
