"""KV cache blocks with prefix caching, as in vLLM V1 (``vllm/v1/core/block_pool.py``)."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from hashlib import blake2b
from itertools import islice, takewhile


class BlockPool:
    """KV blocks of ``block_size`` tokens; sequences share the blocks of common prefixes.

    A block is *blank* (free and without content), *in use*, or *idle*: free, but found by the hash
    of its content until it is evicted. Blank blocks are taken first, then idle blocks, the least
    recently released first. Blocks without a hash are only counted, so that taking a thousand of
    them costs no more than taking one.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self._blank = blocks
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._users = Counter[int]()  # blocks in use, with the number of their sequences
        self.evicted: Callable[[int], None] = lambda _: None  # called with each evicted hash

    @property
    def free(self) -> int:
        """Number of blank and idle blocks."""
        return self._blank + len(self._idle)

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that ``tokens`` tokens fill, rounded up."""
        return -(-tokens // self.block_size)

    def cached(self, hashes: Sequence[int], limit: int) -> int:
        """Count the leading blocks that are in the cache, at most ``limit``."""
        return sum(1 for _ in takewhile(self._has, islice(hashes, limit)))

    def idle(self, hashes: Iterable[int]) -> int:
        return sum(key in self._idle for key in hashes)

    def share(self, hashes: Iterable[int]) -> None:
        for key in hashes:
            self._idle.pop(key, None)
            self._users[key] += 1

    def take(self, count: int) -> None:
        """Take ``count`` free blocks, at most :attr:`free`."""
        blank = min(count, self._blank)
        self._blank -= blank
        for _ in range(count - blank):
            self.evicted(self._idle.popitem(last=False)[0])

    def publish(self, hashes: Iterable[int]) -> list[int]:
        """Register taken blocks by their hashes, and return the hashes that are new. A block whose
        hash is already registered stays without a hash."""
        new = [*dict.fromkeys(key for key in hashes if not self._has(key))]
        self._users.update(new)
        return new

    def clear(self) -> None:
        self._blank += len(self._idle)
        self._idle.clear()

    def release(self, private: int, hashes: Collection[int]) -> None:
        """Free ``private`` blocks without a hash; end a sequence's use of the blocks ``hashes``.

        The last block is released first, so that it is evicted before the blocks of its prefix.
        """
        self._blank += private
        for key in reversed(list(hashes)):
            if self._users[key] == 1:
                del self._users[key]
                self._idle[key] = None
            else:
                self._users[key] -= 1

    def _has(self, key: int) -> bool:
        return key in self._users or key in self._idle


def chain_hashes(content: bytes, block_bytes: int, seed: bytes = b"") -> list[int]:
    """Return the hash of each full block of ``content``. A hash covers the seed, its own block and
    all blocks before."""
    hashes: list[int] = []
    parent = seed
    for end in range(block_bytes, len(content) + 1, block_bytes):
        parent = blake2b(parent + content[end - block_bytes : end], digest_size=8).digest()
        hashes.append(int.from_bytes(parent, "little"))
    return hashes
