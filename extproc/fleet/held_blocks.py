"""KV blocks that replicas hold, as their own KV events report through pollers."""

from bisect import bisect_left
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, repeat
from math import inf, nan
from typing import Annotated, TypeVar

import numpy as np
from msgspec import Meta, Struct

from extproc.fleet.prefix_index import Bitmaps, clear_bit, set_bit
from extproc.ground.clock import Clock
from extproc.predict.inputs import Floats
from extproc.replica_state import ReplicaState
from extproc.request.prefix import Keys, Prefix, seed_of, token_keys

NUMBERS = 2**32  # each poller numbers its updates of a replica from a multiple of this number
LARGEST_BLOCK = 2**20  # tokens; far above real block sizes
LATE_S = 2.0  # time for which blocks stay known after a poll that confirmed the last update
_MAX_BLOCKS_AT_ONCE = 2048  # KV blocks applied in a step, which takes about a millisecond
_STORED_WITHIN_S = 10.0  # time within which a replica stores a sent prompt and reports the blocks
_KEY = np.dtype("<u8")
_Part = TypeVar("_Part", Keys, list[int])


class BlockUpdate(Struct, frozen=True, eq=False, array_like=True):
    """Blocks that a replica stored and removed.

    The keys are those of :func:`~extproc.request.prefix.token_keys`.
    """

    number: int  # unique among all pollers of the replica
    previous: int  # number of the update before; 0: this update lists all blocks
    block_size: Annotated[int, Meta(ge=0, le=LARGEST_BLOCK)]  # tokens; 0: none stored yet
    stored: Keys
    removed: Keys

    @property
    def whole(self) -> bool:
        return not self.previous


def is_up_to(applied: int, number: int) -> bool:
    """Returns True if the updates with these numbers are of the same poller, and ``number`` is not
    newer than ``applied``."""
    return applied // NUMBERS == number // NUMBERS and applied >= number


def pack(keys: Keys) -> bytes:
    """Encodes keys for msgspec: 8 bytes each."""
    return keys.astype(_KEY, copy=False).tobytes()


def unpack(_: type, data: bytes) -> Keys:
    """Decodes keys for msgspec."""
    return np.frombuffer(data, _KEY)


@dataclass(slots=True)
class _ReplicaBlocks:
    bit: int  # in the bitmaps
    keys: set[int] = field(default_factory=set)  # of blocks that are stored, or about to be stored
    expected: dict[int, float] = field(default_factory=dict)
    """Keys not reported as stored yet → when this router stops expecting the report."""
    number: int = 0  # of the last applied update
    block_size: int = 0
    known_until: float = -inf


class HeldBlocks:
    """Blocks of each replica that reports them, for prompts whose token ids are known.

    A replica's blocks are unknown while updates are late, or its poller misses events.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._replicas: dict[str, _ReplicaBlocks] = {}
        self._forgotten: list[_ReplicaBlocks] = []  # keys that are still in the bitmaps
        self._bitmaps: Bitmaps = {}

    def follows(self, replica: str, update: BlockUpdate) -> bool:
        """Returns True if an update can be applied: it is whole and new, or comes directly after
        the last applied update."""
        blocks = self._replicas.get(replica)
        last = 0 if blocks is None else blocks.number
        return not is_up_to(last, update.number) if update.whole else update.previous == last

    def apply(self, replica: str, update: BlockUpdate) -> Iterator[None]:
        """Applies an update that :meth:`follows`, in steps between which the event loop may run."""
        blocks = self._replicas.get(replica)
        if blocks is None:
            taken = {other.bit for other in (*self._replicas.values(), *self._forgotten)}
            bit = next(bit for bit in range(len(taken) + 1) if bit not in taken)
            blocks = self._replicas[replica] = _ReplicaBlocks(bit)
        for _ in self._steps(blocks, update):
            yield
            if self._replicas.get(replica) is not blocks:  # forgotten meanwhile
                return
        blocks.number, blocks.block_size = update.number, update.block_size

    def _steps(self, blocks: _ReplicaBlocks, update: BlockUpdate) -> Iterator[None]:
        stored: set[int] = set()
        removed = [*blocks.keys] if update.whole else update.removed.tolist()
        for part in _parts(update.stored):
            keys = part.tolist()
            self._add(blocks, {*keys} - blocks.keys)
            _expect_no_more(blocks, keys)
            stored.update(keys)
            yield
        for keys in _parts(removed):
            expected = blocks.expected.keys() if update.whole else set[int]()
            self._drop(blocks, {*keys} - stored - expected)
            yield

    def polled(self, state: ReplicaState) -> None:
        self._clear_forgotten()
        blocks = self._replicas.get(state.id)
        if blocks is None:
            return
        now = self._clock()
        if state.kv_update is None:
            blocks.known_until = -inf
        elif is_up_to(blocks.number, state.kv_update):
            blocks.known_until = now + LATE_S
        self._drop(blocks, [key for key, until in blocks.expected.items() if until < now])

    def sent(self, replica: str, prefix: Prefix, adapter: str) -> None:
        """Adds the blocks of a dispatched prompt at once, because the replica stores them before it
        looks up the next prompt."""
        if blocks := self._known(replica):
            until = self._clock() + _STORED_WITHIN_S
            keys = _keys(prefix, adapter, blocks.block_size)
            new = [key for key in keys if key not in blocks.keys]
            self._add(blocks, new)
            blocks.expected.update(dict.fromkeys(new, until))

    def forget(self, replica: str) -> None:
        """Forgets a replica; each poll of any replica then clears a part of its blocks, because a
        million blocks take almost a second."""
        if (blocks := self._replicas.pop(replica, None)) is not None:
            self._forgotten.append(blocks)

    def _clear_forgotten(self) -> None:
        if self._forgotten:
            last = self._forgotten[-1]
            keys = [last.keys.pop() for _ in range(min(len(last.keys), _MAX_BLOCKS_AT_ONCE))]
            clear_bit(self._bitmaps, keys, last.bit)
            if not last.keys:
                self._forgotten.pop()

    def keep(self, replicas: Container[str]) -> None:
        """Forgets all replicas except ``replicas``."""
        for gone in [name for name in self._replicas if name not in replicas]:
            self.forget(gone)

    def count(self, replica: str) -> int | None:
        """Returns the number of blocks that a replica reported; None: unknown at present."""
        blocks = self._known(replica)
        return None if blocks is None else len(blocks.keys) - len(blocks.expected)

    def hits(
        self, prefix: Prefix, adapters: Sequence[str], replicas: Sequence[str]
    ) -> Floats | None:
        """Returns the tokens of a prompt that each replica holds; NaN: not known; None: not known
        of any replica.

        ``adapters``: LoRA adapter of the request on each replica; empty: no adapter.
        """
        if not len(prefix.ids) or not self._replicas:
            return None
        tokens = np.full(len(replicas), nan)
        runs: dict[tuple[int, str], list[tuple[int, int]]] = {}  # by block size and adapter
        for place, replica in enumerate(replicas):
            if blocks := self._known(replica):
                kind = size, adapter = blocks.block_size, adapters[place] if adapters else ""
                if kind not in runs:
                    runs[kind] = [*self._runs(_keys(prefix, adapter, size))]
                tokens[place] = size * _blocks_held(blocks.bit, runs[kind])
        return tokens if runs else None

    def count_known(self) -> int:
        return sum(self._known(replica) is not None for replica in self._replicas)

    def _runs(self, keys: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yields pairs: a bitmap of replicas, and the number of leading blocks that all of these
        replicas hold.

        From pair to pair the number of blocks rises and replicas drop out. Each bitmap is
        intersected with those before, because a replica may lack a block and hold a later one.
        """
        end, all_before = 0, -1
        for bitmap, same in groupby(map(self._bitmaps.get, keys, repeat(0))):
            all_before &= bitmap
            if not all_before:
                return
            end += len([*same])
            yield all_before, end

    def _known(self, replica: str) -> _ReplicaBlocks | None:
        """Returns the blocks of a replica, or None if they are unknown at present."""
        blocks = self._replicas.get(replica)
        return blocks if blocks is not None and self._clock() <= blocks.known_until else None

    def _add(self, blocks: _ReplicaBlocks, keys: Collection[int]) -> None:
        blocks.keys.update(keys)
        set_bit(self._bitmaps, keys, blocks.bit)

    def _drop(self, blocks: _ReplicaBlocks, keys: Iterable[int]) -> None:
        gone = blocks.keys.intersection(keys)
        blocks.keys -= gone
        clear_bit(self._bitmaps, gone, blocks.bit)
        _expect_no_more(blocks, gone)


def _keys(prefix: Prefix, adapter: str, block_size: int) -> list[int]:
    """Returns the keys of a prompt's whole blocks. The last token does not count, because vLLM
    always computes it."""
    if not block_size:
        return []
    seed = seed_of(adapter, prefix.salt)
    keys: list[int] = token_keys(prefix.ids[:-1], block_size, seed).tolist()
    return keys


def _parts(keys: _Part) -> Iterator[_Part]:
    step = _MAX_BLOCKS_AT_ONCE
    return (keys[first : first + step] for first in range(0, len(keys), step))


def _expect_no_more(blocks: _ReplicaBlocks, keys: Iterable[int]) -> None:
    for key in blocks.expected.keys() & keys:
        del blocks.expected[key]


def _blocks_held(bit: int, runs: Sequence[tuple[int, int]]) -> int:
    ends = bisect_left(runs, True, key=lambda run: not run[0] >> bit & 1)
    return runs[ends - 1][1] if ends else 0
