"""A record of traffic, read again from the files that routers wrote."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from extproc.observe.record import FORMAT, PATTERN, Line, Lost, Refused, Replica, Request, Start

_UNREADABLE, _FEW_UNREADABLE = 0.01, 10
"""Share of the lines that may be, or so many: those a crash or a full disk cut short."""
_NUMBER = re.compile(r"(\.\d+)?\.jsonl$")  # what names of one router's files differ in


@dataclass(slots=True)
class Recorded:
    """What happened, since the routers last began to decide otherwise than before."""

    start: Start  # what they decided by; `at`: since when all was recorded but what is left out
    requests: list[Request]  # those that were served, in the order they came
    replicas: dict[str, list[Replica]]  # what was known of each, in order of time
    left_out: Counter[str] = field(default_factory=Counter)
    """Requests that are not among them, by why."""


def read(path: Path, pool: str = "") -> Recorded:
    """The record in a file, or in all files of a folder.

    Raises:
        OSError: a file cannot be read.
        ValueError: there is no record of the pool, or none that can be replayed.
    """
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
        starts = [line for line in found if isinstance(line, Start)]
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
    """The record, from when every router wrote, and all decided as they did in the end."""
    lines = sorted(chain.from_iterable(routers), key=lambda line: line.at)
    starts = [line for line in lines if isinstance(line, Start)]
    same = replace(starts[-1], at=0.0)
    others = [one.at for one in starts if replace(one, at=0.0) != same]
    alike = next(one.at for one in starts if not others or one.at > max(others))
    every = max(min(one.at for one in of if isinstance(one, Start)) for of in routers)
    start = replace(same, at=max(alike, every))
    replicas: dict[str, list[Replica]] = defaultdict(list)
    for line in lines:
        if isinstance(line, Replica):
            replicas[line.id].append(line)
    told = {name: of for name, of in replicas.items() if any(one.state for one in of)}
    recorded = Recorded(start, [], told, left_out)
    for line in lines:
        if line.at < start.at:
            continue
        if isinstance(line, Refused):
            left_out[f"refused ({line.why})"] += 1
        elif isinstance(line, Lost):
            left_out["not written (the disk was full, or too slow)"] += line.requests
        elif isinstance(line, Request) and line.failed:
            left_out["failed"] += 1
        elif isinstance(line, Request) and line.replica not in told:
            left_out["on an unknown replica"] += 1
        elif isinstance(line, Request):
            recorded.requests.append(line)
    if not recorded.requests:
        raise ValueError("the record holds no request that was served")
    return recorded
