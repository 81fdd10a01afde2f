"""What a router has in flight, as it tells the others: one value, and its encoding."""

from dataclasses import dataclass
from enum import IntEnum
from math import isfinite

import msgspec
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

_VERSION = 3
_FLOAT = np.dtype("<f4")
_COUNT = np.dtype("u1")


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
        """MessagePack: some 50 bytes and, a replica, 38 and its name, and 12 for each bar of its
        histogram."""
        bars = np.bincount(self.on, minlength=len(self.replicas))
        return msgspec.msgpack.encode(
            _Encoded(
                self.router,
                self.number,
                self.sent_at,
                self.kind,
                self.replicas,
                self.figures.astype(_FLOAT).tobytes(),
                bars.astype(_COUNT).tobytes(),
                self.sequences.astype(_FLOAT).tobytes(),
            )
        )


NOTHING = (
    np.zeros((len(FIGURES), 0)),
    np.zeros(0, dtype=np.intp),
    np.zeros((PER_SEQUENCE, 0)),
)
"""Figures, and which replicas hold which sequences, of a digest that names none."""


class _Encoded(msgspec.Struct, array_like=True, tag=_VERSION):
    router: str
    number: int
    sent_at: float
    kind: Kind
    replicas: tuple[str, ...]
    figures: bytes
    bars: bytes
    """Of each replica's histogram, how many."""
    sequences: bytes


_DECODER = msgspec.msgpack.Decoder(_Encoded)


def decode(data: bytes) -> Digest:
    """What :meth:`Digest.encode` made.

    Raises:
        ValueError: it is none, or of a version that this one does not know.
    """
    try:
        one = _DECODER.decode(data)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a digest of a version that is known: {error}") from None
    bars = np.frombuffer(one.bars, _COUNT)
    figures = _figures(one.figures, len(FIGURES), len(one.replicas))
    sequences = _figures(one.sequences, PER_SEQUENCE, int(bars.sum()))
    if not isfinite(one.sent_at):
        raise ValueError("a digest with figures that are none")
    if len(bars) != len(one.replicas):
        raise ValueError("a digest whose parts do not fit together")
    on = np.repeat(np.arange(len(bars)), bars)
    return Digest(
        one.router, one.number, one.sent_at, one.kind, one.replicas, figures, on, sequences
    )


def _figures(data: bytes, rows: int, columns: int) -> Floats:
    figures = np.frombuffer(data, _FLOAT).astype(np.float64)
    if not (np.isfinite(figures) & (figures >= 0.0)).all():
        raise ValueError("a digest with figures that are none")
    return figures.reshape(rows, columns)
