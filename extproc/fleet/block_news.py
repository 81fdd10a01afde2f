"""What a poller tells of the KV blocks that one replica holds: one value, and its encoding."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from extproc.request.prefix import Keys

_HEADER = struct.Struct("<BxxxIQQII")
"""Version, tokens in a block, number of the one before, its own, keys stored, keys removed."""
_VERSION = 1
_KEY = np.dtype("<u8")
NUMBERS = 2**32
"""That a poller has for one replica, beginning with a multiple of it."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockNews:
    """Keys of blocks, as :func:`~extproc.request.prefix.token_keys` makes them."""

    number: int
    """Of this news. No other poller gives the same ones."""
    previous: int
    """Number of the news that it continues; 0: it says all that there is."""
    block_size: int
    """Tokens in a block; 0 where none was stored yet."""
    stored: Keys
    removed: Keys

    @property
    def whole(self) -> bool:
        """Whether nothing else is held."""
        return not self.previous

    def encode(self) -> bytes:
        """32 bytes, and 8 a key."""
        sizes = len(self.stored), len(self.removed)
        header = _HEADER.pack(_VERSION, self.block_size, self.previous, self.number, *sizes)
        keys = (keys.astype(_KEY).tobytes() for keys in (self.stored, self.removed))
        return b"".join([header, *keys])


def is_up_to(heard: int, number: int) -> bool:
    """Whether who heard news with the one number heard those with the other, too."""
    return heard // NUMBERS == number // NUMBERS and heard >= number


def decode(data: bytes) -> Iterator[BlockNews]:
    """One news after another, each as :meth:`BlockNews.encode` made it.

    Raises:
        ValueError: they are none, or of a version that this one does not know.
    """
    at = 0
    while at < len(data):
        try:
            header = _HEADER.unpack_from(data, at)
        except struct.error:
            raise ValueError("news of blocks that are cut short") from None
        version, block_size, previous, number, stored, removed = header
        first = at + _HEADER.size
        at = first + (stored + removed) * _KEY.itemsize
        if version != _VERSION or at > len(data):
            raise ValueError("no news of blocks, or of a version that is not known")
        keys = np.frombuffer(data, _KEY, stored + removed, first)
        yield BlockNews(number, previous, block_size, keys[:stored], keys[stored:])
