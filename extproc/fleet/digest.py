"""Digest of a router's requests, which the other routers add to their own load."""

from enum import IntEnum

import msgspec
import numpy as np

from extproc.ground.address import split_address
from extproc.predict.inputs import Floats
from extproc.replica_state import Finite

FIGURES = 10
(
    REQUESTS,
    QUEUED,  # requests without a token yet
    QUEUED_SEQUENCES,  # of the queued requests
    BACKLOG,  # prompt tokens of the queued requests that are not prefilled
    DECODING,  # sequences
    KV,  # tokens of the decoding sequences, and of prompts prefilled in part
    REMAINING,  # tokens that all sequences are still expected to generate
    DECODED,  # seconds that recent requests took to decode
    EXPECTED,  # seconds that these requests were predicted to take
    PARTS,  # sequences as the engine counts them
) = range(FIGURES)
"""Rows of a digest's figures, which have one column for each replica."""

EVERY_S = 0.02  # shortest time between two digests
ALIVE_S = 0.04
"""Longest time between two digests of a router with requests in flight: other routers discard its
load after 0.1 s without a digest."""
WHOLE_EVERY_S = 0.5
"""Time between two whole digests, which make up for lost digests, and show that a router without
requests is alive."""

_FLOAT = np.dtype("<f4")


class DigestKind(IntEnum):
    """Meaning of a digest for the replicas that it does not name."""

    CHANGES = 0  # their figures and queues are unchanged
    WHOLE = 1  # no requests are there; for replicas without an entry in `queued` none are queued
    FAREWELL = 2  # the router stops, and has no requests anywhere


class Digest(msgspec.Struct, eq=False, array_like=True):
    """Requests in flight of one router, by replica, and its queue, at one moment.

    For each replica, the newest digest that names the replica counts. The next whole digest makes
    up for a lost digest.
    """

    router: str
    number: int  # grows from one digest of a router to its next
    sent_at: Finite  # seconds since the epoch, on the router's clock
    kind: DigestKind
    replicas: tuple[str, ...]  # ``ip:port``
    figures: Floats  # shape (FIGURES, replicas)
    admin: str = ""  # ``host:port`` of the router's admin server, in whole digests; empty: unknown
    queued: dict[str, dict[int, Finite]] = {}
    """Work queued at the router in replica-seconds, by awaited replica and by priority; empty: no
    work is queued for the replica any more."""

    def __post_init__(self) -> None:
        if self.admin:
            split_address(self.admin)
        self.figures = self.figures.reshape(FIGURES, len(self.replicas))


NOTHING = np.zeros((FIGURES, 0))  # figures of a digest that names no replica


def pack(figures: Floats) -> bytes:
    """Encodes a digest's figures for msgspec: 4 bytes each."""
    return figures.astype(_FLOAT).tobytes()


def unpack(_: type, data: bytes) -> Floats:
    """Decodes a digest's figures for msgspec.

    Raises:
        ValueError: a figure is negative or not finite.
    """
    figures = np.frombuffer(data, _FLOAT).astype(np.float64)
    if not ((figures >= 0.0) & (figures < np.inf)).all():
        raise ValueError("the digest has a figure that is negative or not finite")
    return figures
