"""Reader of the records of traffic that routers write."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from msgspec.json import decode
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

_MOST_UNREADABLE = 10  # lines of a file that a crash or a full disk may cut off
_MOST_UNREADABLE_SHARE = 0.01  # in files with more than 1,000 lines
_NUMBER = re.compile(r"(\.\d+)?\.jsonl$")  # end of a file name, by which a router's files differ


@dataclass(slots=True)
class Recorded:
    """Record of a pool since the last change of its routers' configuration."""

    start: StartLine  # configuration, and time since which the record is complete
    requests: list[RequestLine]  # served requests in the order of arrival
    replicas: dict[str, list[ReplicaLine]]  # states in the order of time, by address
    refused: list[RequestLine] = field(default_factory=list)
    """Refused requests for models that also have served requests, in the order of arrival."""
    excluded: Counter[str] = field(default_factory=Counter)  # requests not replayed, by reason
    unused_s: float = 0.0  # length of the part before ``start``
    unused_why: str = ""  # why that part is unused, in a few words


def read(path: Path, pool: str = "") -> Recorded:
    """Read the record of a pool from a file, or from all files of a folder.

    Raises:
        OSError: a file cannot be read.
        ValueError: the path holds no record of the pool.
    """
    if not path.exists():
        raise ValueError(
            f"{path} does not exist: name the folder that is record.path of the router"
        )
    files = sorted(path.glob(PATTERN)) if path.is_dir() else [path]
    pools: dict[str, dict[str, list[Line]]] = defaultdict(lambda: defaultdict(list))
    excluded = Counter[str]()
    for file in files:
        found, unreadable = _lines_of(file)
        if unreadable:
            excluded["whose line cannot be read"] += unreadable
        if not found:
            continue  # empty: the disk was full when the router created the file
        starts = [line for line in found if isinstance(line, StartLine)]
        if not starts:
            raise ValueError(f"{file} is no record: it has no start line")
        pools[starts[0].pool][_NUMBER.sub("", file.name)] += found
    if not pools:
        raise ValueError(f"{path} holds no record: no file {PATTERN}, or no line of a router")
    if not pool and len(pools) > 1:
        raise ValueError(
            f"{path} holds records of several pools, {', '.join(pools)}: choose with --pool"
        )
    routers = pools.get(pool or next(iter(pools)))
    if routers is None:
        raise ValueError(f"{path} holds no record of pool {pool!r}, but of {', '.join(pools)}")
    return _merged(list(routers.values()), excluded)


def _lines_of(file: Path) -> tuple[list[Line], int]:
    """Lines of a file, and the number of unreadable lines."""
    found: list[Line] = []
    unreadable = 0
    for text in filter(None, file.read_bytes().splitlines()):
        try:
            line = decode(text, type=Line)
        except ValueError:
            unreadable += 1
            continue
        if isinstance(line, StartLine) and line.format != FORMAT:
            raise ValueError(
                f"{file} has format {line.format}, but this version reads {FORMAT}: use the "
                "version of extproc that wrote the file, or record anew"
            )
        found.append(line)
    if unreadable > max(len(found) * _MOST_UNREADABLE_SHARE, _MOST_UNREADABLE):
        raise ValueError(f"{file} is no record: {unreadable} of its lines cannot be read")
    return found, unreadable


def _merged(routers: Sequence[Sequence[Line]], excluded: Counter[str]) -> Recorded:
    """Merges the lines of all routers. Leaves out lines from before the last change of the
    configuration, and from before all routers had begun to record."""
    lines = sorted(chain.from_iterable(routers), key=lambda line: line.at)
    starts = [line for line in lines if isinstance(line, StartLine)]
    last = replace(starts[-1], at=0.0)
    outdated = [line.at for line in starts if replace(line, at=0.0) != last]
    configured_at = next(line.at for line in starts if not outdated or line.at > max(outdated))
    complete_at = max(
        min(line.at for line in router if isinstance(line, StartLine)) for router in routers
    )
    start = replace(last, at=max(configured_at, complete_at))
    unused_s = start.at - min(line.at for line in starts)
    changed = configured_at >= complete_at
    why = "the configuration differed" if changed else "not all routers recorded yet"
    states: dict[str, list[ReplicaLine]] = defaultdict(list)
    for line in lines:
        if isinstance(line, ReplicaLine):
            states[line.id].append(line)
    replicas = {name: each for name, each in states.items() if any(line.state for line in each)}
    recorded = Recorded(start, [], replicas, [], excluded, unused_s, why if unused_s else "")
    for line in lines:
        if line.at < start.at:
            continue
        match line:
            case RefusedLine():
                excluded[f"refused ({line.why})"] += 1
            case LostLine():
                excluded["not written (the disk was full, or too slow)"] += line.requests
            case RequestLine(failed=True):
                excluded["failed"] += 1
            case RequestLine() if line.refused:
                recorded.refused.append(line)
            case RequestLine() if line.replica not in replicas:
                excluded["on an unknown replica"] += 1
            case RequestLine():
                recorded.requests.append(line)
    if not recorded.requests:
        raise ValueError("the record has no served request")
    models, refused = {line.model for line in recorded.requests}, recorded.refused
    excluded.update(f"refused ({line.refused})" for line in refused if line.model not in models)
    recorded.refused = [line for line in refused if line.model in models]
    return recorded
