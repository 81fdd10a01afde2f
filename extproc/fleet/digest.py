"""What a router has in flight, as it tells the others: one value, and its encoding."""

import struct
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, pairwise
from math import isfinite

import numpy as np

from extproc.predict.inputs import Floats, Indices

FIGURES = (
    *("requests", "queued", "joining", "backlog", "decoding", "kv"),
    *("decoded", "expected", "parts"),
)
"""Of each replica: requests; of these, without a token yet; sequences of those; their prompt tokens
not prefilled; sequences decoding; KV tokens of these; seconds that requests decoded of late, and
that they were predicted to; sequences as the engine counts them."""
PER_SEQUENCE = 3
"""Figures of sequences alike: how many, KV tokens each holds, tokens each is to generate still."""

EVERY_S = 0.02
"""Seconds between two digests, at least."""
ALIVE_S = 0.04
"""Seconds of silence, at most, of a router that has requests in flight: those who hear nothing for
longer than 0.1 s no longer count on what they heard."""
WHOLE_EVERY_S = 0.5
"""Seconds between two whole digests: what was lost is repaired, and a router without requests is
known to be alive."""

_VERSION = 2
_HEADER = struct.Struct("<BBHIdIII")
"""Version, kind, bytes of the router's name, number, time, replicas, bytes of their names, rows."""
_FLOAT = np.dtype("<f4")
_COUNT = np.dtype("u1")
_SEPARATOR = "\n"


class Kind(IntEnum):
    """What a digest says of the replicas it does not name."""

    CHANGES = 0
    """They are as they were."""
    WHOLE = 1
    """The router has nothing there."""
    FAREWELL = 2
    """The router stops, and has nothing anywhere."""


@dataclass(frozen=True, slots=True, eq=False)
class Digest:
    """What one router has in flight on replicas, at one moment.

    The last one wins, replica by replica, and one that was lost is repaired by the next whole one.
    """

    router: str
    number: int
    """Grows from one digest of a router to its next."""
    sent_at: float
    """Seconds since the epoch, on the router's clock."""
    kind: Kind
    replicas: tuple[str, ...]
    """``ip:port``."""
    figures: Floats
    """A row for each of :data:`FIGURES`, a column a replica."""
    on: Indices
    """Which of ``replicas`` holds the sequences; in rising order."""
    sequences: Floats
    """Histogram of remaining lengths: a row for each of the figures :data:`PER_SEQUENCE`."""

    def encode(self) -> bytes:
        """44 bytes and, a replica, 38 and its name, and 12 for each bar of its histogram."""
        router, names = self.router.encode(), _SEPARATOR.join(self.replicas).encode()
        bars = np.bincount(self.on, minlength=len(self.replicas))
        header = _HEADER.pack(
            _VERSION,
            self.kind,
            len(router),
            self.number,
            self.sent_at,
            len(self.replicas),
            len(names),
            len(self.on),
        )
        arrays = (
            bars.astype(_COUNT),
            self.figures.astype(_FLOAT),
            self.sequences.astype(_FLOAT),
        )
        return b"".join([header, router, names, *(array.tobytes() for array in arrays)])


NOTHING = (
    np.zeros((len(FIGURES), 0)),
    np.zeros(0, dtype=np.intp),
    np.zeros((PER_SEQUENCE, 0)),
)
"""Figures, and which replicas hold which sequences, of a digest that names none."""


def decode(data: bytes) -> Digest:
    """What :meth:`Digest.encode` made.

    Raises:
        ValueError: it is none, or of a version that this one does not know.
    """
    if not data or data[0] != _VERSION:
        raise ValueError("not a digest of a version that is known")
    try:
        header = _HEADER.unpack_from(data)
    except struct.error:
        raise ValueError("a digest that is cut short") from None
    _, kind, router, number, sent_at, replicas, names, rows = header
    sizes = (
        _HEADER.size,
        router,
        names,
        replicas * _COUNT.itemsize,
        len(FIGURES) * replicas * _FLOAT.itemsize,
        PER_SEQUENCE * rows * _FLOAT.itemsize,
    )
    ends = list(accumulate(sizes, initial=0))
    if ends[-1] != len(data):
        raise ValueError(f"a digest of {len(data)} bytes instead of {ends[-1]}")
    _, router_part, names_part, bars_part, figures_part, rows_part = (
        data[start:end] for start, end in pairwise(ends)
    )
    if not isfinite(sent_at):
        raise ValueError("a digest with figures that are none")
    if not replicas and not rows:
        return Digest(router_part.decode(), number, sent_at, Kind(kind), (), *NOTHING)
    bars = np.frombuffer(bars_part, _COUNT)
    known = tuple(names_part.decode().split(_SEPARATOR)) if replicas else ()
    if len(known) != replicas or int(bars.sum()) != rows:
        raise ValueError("a digest whose parts do not fit together")
    return Digest(
        router_part.decode(),
        number,
        sent_at,
        Kind(kind),
        known,
        _figures(figures_part).reshape(len(FIGURES), replicas),
        np.repeat(np.arange(replicas), bars),
        _figures(rows_part).reshape(PER_SEQUENCE, rows),
    )


def _figures(data: bytes) -> Floats:
    figures = np.frombuffer(data, _FLOAT)
    if not (np.isfinite(figures) & (figures >= 0.0)).all():
        raise ValueError("a digest with figures that are none")
    return figures.astype(np.float64)
