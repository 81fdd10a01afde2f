"""KV cache blocks, kept and reused as vLLM V1 does (``vllm/v1/core/block_pool.py``)."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from hashlib import blake2b
from itertools import islice


class BlockPool:
    """Blocks of ``block_size`` tokens, shared by prefix.

    A block is *blank* (free, holding nothing of use), *in use*, or *idle*: free, but found again by
    the hash of its content until it is evicted. Free blocks are taken blank ones first, then idle
    ones, the least recently released first. Only hashed blocks have an identity here; the rest are
    counted, so taking a thousand of them costs as much as taking one.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self._blank = blocks
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._users: dict[int, int] = {}
        self.evicted: Callable[[int], None] = lambda _: None  # called with each evicted hash

    @property
    def free(self) -> int:
        """Blocks that can be taken, idle ones included."""
        return self._blank + len(self._idle)

    @property
    def usage(self) -> float:
        """Fraction of blocks in use, 0…1."""
        return 1 - self.free / self.blocks

    def blocks_for(self, tokens: int) -> int:
        """Blocks that ``tokens`` tokens fill, the last one perhaps in part."""
        return -(-tokens // self.block_size)

    def cached(self, hashes: Sequence[int], limit: int) -> int:
        """Number of blocks held without a gap from the first on, ``limit`` at most."""
        held = 0
        for key in islice(hashes, limit):
            if key not in self._users and key not in self._idle:
                break
            held += 1
        return held

    def idle(self, hashes: Iterable[int]) -> int:
        """Number of these held blocks without a user."""
        return sum(key in self._idle for key in hashes)

    def share(self, hashes: Iterable[int]) -> None:
        for key in hashes:
            if key in self._users:
                self._users[key] += 1
            else:
                del self._idle[key]
                self._users[key] = 1

    def take(self, count: int) -> None:
        """Take ``count`` free blocks; there must be as many."""
        blank = min(count, self._blank)
        self._blank -= blank
        for _ in range(count - blank):
            self.evicted(self._idle.popitem(last=False)[0])

    def publish(self, hashes: Iterable[int]) -> list[int]:
        """Make blocks that were taken known by their content; returns the hashes that are new. The
        others have a block already, and the copy stays private."""
        unknown = (key for key in hashes if key not in self._users and key not in self._idle)
        new = [*dict.fromkeys(unknown)]
        self._users.update(dict.fromkeys(new, 1))
        return new

    def clear(self) -> None:
        self._blank += len(self._idle)
        self._idle.clear()

    def release(self, private: int, hashes: Collection[int]) -> None:
        """Give back ``private`` blocks without a hash, and a use of each hashed one.

        Hashed blocks are released last one first, so that a prefix outlives what follows it.
        """
        self._blank += private
        for key in reversed(list(hashes)):
            if self._users[key] == 1:
                del self._users[key]
                self._idle[key] = None
            else:
                self._users[key] -= 1


def chain_hashes(content: bytes, block_bytes: int, seed: bytes = b"") -> list[int]:
    """Hashes of the full blocks of ``content``; each covers the seed and all before it."""
    hashes: list[int] = []
    parent = seed
    for end in range(block_bytes, len(content) + 1, block_bytes):
        parent = blake2b(parent + content[end - block_bytes : end], digest_size=8).digest()
        hashes.append(int.from_bytes(parent, "little"))
    return hashes
