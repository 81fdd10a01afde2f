"""Reads the record of traffic that routers wrote."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from extproc.observe.record import (
    FORMAT,
    PATTERN,
    Line,
    LostLine,
    RefusedLine,
    ReplicaLine,
    RequestLine,
    StartLine,
)

_UNREADABLE, _FEW_UNREADABLE = 0.01, 10  # share and number of lines cut by a crash or full disk
_NUMBER = re.compile(r"(\.\d+)?\.jsonl$")  # the names of a router's files differ in this


@dataclass(slots=True)
class Recorded:
    """Record since the routers last changed the way they decide."""

    start: StartLine  # their configuration, and the time from which on the record is complete
    requests: list[RequestLine]  # those that were served, in the order of arrival
    replicas: dict[str, list[ReplicaLine]]  # their states, in order of time
    left_out: Counter[str] = field(
        default_factory=Counter
    )  # requests that are not replayed, by why


def read(path: Path, pool: str = "") -> Recorded:
    """Record of a pool in a file, or in all files of a folder; or OSError or ValueError."""
    if not path.exists():
        raise ValueError(
            f"{path} does not exist: name the folder that is record.path of the router"
        )
    files = sorted(path.glob(PATTERN)) if path.is_dir() else [path]
    pools: dict[str, dict[str, list[Line]]] = defaultdict(lambda: defaultdict(list))
    left_out = Counter[str]()
    for file in files:
        found, wrong = _lines_of(file)
        if wrong:
            left_out["whose line cannot be read"] += wrong
        if not found:
            continue  # the disk was full when it was begun
        starts = [line for line in found if isinstance(line, StartLine)]
        if not starts:
            raise ValueError(f"{file} is no record: it does not begin as one")
        pools[starts[0].pool][_NUMBER.sub("", file.name)] += found
    if not pools:
        raise ValueError(f"{path} holds no record: no line of a router, or no file {PATTERN}")
    if not pool and len(pools) > 1:
        raise ValueError(f"{path} holds records of several pools, {', '.join(pools)}: say --pool")
    routers = pools.get(pool or next(iter(pools)))
    if routers is None:
        raise ValueError(f"{path} holds no record of pool {pool!r}, but of {', '.join(pools)}")
    return _of(list(routers.values()), left_out)


def _lines_of(file: Path) -> tuple[list[Line], int]:
    found: list[Line] = []
    wrong = 0
    for text in file.read_bytes().splitlines():
        if not text:
            continue
        try:
            fields = msgspec.json.decode(text, type=dict[str, Any])
            _check_format(file, fields)
            found.append(msgspec.convert(fields, Line))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            wrong += 1
    if wrong > max(len(found) * _UNREADABLE, _FEW_UNREADABLE):
        raise ValueError(f"{file} is no record: {wrong} of its lines cannot be read")
    return found, wrong


def _check_format(file: Path, fields: dict[str, Any]) -> None:
    if fields.get("kind") == "start" and fields.get("format") != FORMAT:
        raise ValueError(
            f"{file} has format {fields.get('format')}, and this version reads {FORMAT}: use the "
            "version of extproc that recorded it, or record anew"
        )


def _of(routers: Sequence[Sequence[Line]], left_out: Counter[str]) -> Recorded:
    """Record from when all routers wrote and decided by their last configuration."""
    lines = sorted(chain.from_iterable(routers), key=lambda line: line.at)
    starts = [line for line in lines if isinstance(line, StartLine)]
    same = replace(starts[-1], at=0.0)
    others = [one.at for one in starts if replace(one, at=0.0) != same]
    alike = next(one.at for one in starts if not others or one.at > max(others))
    every = max(min(one.at for one in of if isinstance(one, StartLine)) for of in routers)
    start = replace(same, at=max(alike, every))
    replicas: dict[str, list[ReplicaLine]] = defaultdict(list)
    for line in lines:
        if isinstance(line, ReplicaLine):
            replicas[line.id].append(line)
    told = {name: of for name, of in replicas.items() if any(one.state for one in of)}
    recorded = Recorded(start, [], told, left_out)
    for line in lines:
        if line.at < start.at:
            continue
        match line:
            case RefusedLine():
                left_out[f"refused ({line.why})"] += 1
            case LostLine():
                left_out["not written (the disk was full, or too slow)"] += line.requests
            case RequestLine(failed=True):
                left_out["failed"] += 1
            case RequestLine() if line.replica not in told:
                left_out["on an unknown replica"] += 1
            case RequestLine():
                recorded.requests.append(line)
    if not recorded.requests:
        raise ValueError("the record holds no request that was served")
    return recorded
