"""What a router has in flight, as it tells the others: one value, and its encoding."""

from enum import IntEnum
from math import isfinite

import msgspec
import numpy as np

from extproc.predict.inputs import Floats

FIGURES = 10
(
    REQUESTS,
    QUEUED,  # requests without a token yet
    JOINING,  # sequences of those
    BACKLOG,  # their prompt tokens that are not prefilled
    DECODING,  # sequences
    KV,  # tokens: of the sequences decoding, and of prompts prefilled in part
    REMAINING,  # tokens that all sequences are expected to generate still
    DECODED,  # seconds that requests decoded of late
    EXPECTED,  # seconds that they were predicted to
    PARTS,  # sequences as the engine counts them
) = range(FIGURES)
"""Rows of a digest's figures, which has a column a replica."""

EVERY_S = 0.02  # seconds between two digests, at least
ALIVE_S = 0.04
"""Seconds of silence, at most, of a router that has requests in flight: those who hear nothing for
longer than 0.1 s no longer count on what they heard."""
WHOLE_EVERY_S = 0.5
"""Seconds between two whole digests: what was lost is repaired, and a router without requests is
known to be alive."""

_FLOAT = np.dtype("<f4")


class DigestKind(IntEnum):
    """What a digest says of the replicas it does not name."""

    CHANGES = 0  # they are as they were
    WHOLE = 1  # the router has nothing there
    FAREWELL = 2  # the router stops, and has nothing anywhere


class Digest(msgspec.Struct, eq=False, array_like=True):
    """What one router has in flight on replicas, at one moment.

    The last one wins, replica by replica, and one that was lost is repaired by the next whole one.
    """

    router: str
    number: int  # grows from one digest of a router to its next
    sent_at: float  # seconds since the epoch, on the router's clock
    kind: DigestKind
    replicas: tuple[str, ...]  # ``ip:port``
    figures: Floats  # a row for each of the FIGURES, a column a replica

    def __post_init__(self) -> None:
        self.figures = self.figures.reshape(FIGURES, len(self.replicas))
        if not isfinite(self.sent_at):
            raise ValueError("a digest whose time is not finite")

    def encode(self) -> bytes:
        """MessagePack: some 50 bytes and, a replica, 40 and its name."""
        return _ENCODER.encode(self)


NOTHING = np.zeros((FIGURES, 0))  # figures of a digest that names no replica


def decode(data: bytes) -> Digest:
    """Returns what :meth:`Digest.encode` encoded.

    Raises:
        ValueError: it is no digest.
    """
    return _DECODER.decode(data)


def pack(figures: Floats) -> bytes:
    """Encodes an array of a digest, for msgspec."""
    return figures.astype(_FLOAT).tobytes()


def unpack(_: type, data: bytes) -> Floats:
    """Decodes an array of a digest, for msgspec."""
    figures = np.frombuffer(data, _FLOAT).astype(np.float64)
    if not ((figures >= 0.0) & (figures < np.inf)).all():
        raise ValueError("figures that are none")
    return figures


_ENCODER = msgspec.msgpack.Encoder(enc_hook=pack)
_DECODER = msgspec.msgpack.Decoder(Digest, dec_hook=unpack)
