"""KV blocks that one replica holds, as its events tell."""

import math
from random import Random
from typing import NamedTuple

import msgspec
import numpy as np

from extproc.fleet.held_blocks import NUMBERS, BlockUpdate
from extproc.ground.clock import Clock
from extproc.poll.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from extproc.request.prefix import seed_of, token_keys

_MOST_BLOCKS = 2**20  # 17 million tokens in blocks of 16: no replica holds as many
_WHOLE_EVERY_S = 900.0
"""Seconds after which all is told again at the latest: Redis drops what was told after a while."""
_REPEAT_S = 1.0
"""Seconds between telling all and telling all again: a Redis that is full takes nothing."""
_REPEAT_MOST_S = 16.0  # the same, where Redis goes on taking nothing
_FEW = 512  # keys that may be told before all are told again, however few are held

_KEYS_OF_A_HEADER = 4  # keys that take as much room as the header of an update

_GPU = (None, "GPU")
_FULL = (None, "full_attention", "mla_attention", "sink_full_attention")
"""Kinds of attention whose blocks are all needed for a hit. vLLM may keep blocks of other layers in
groups of their own."""
_HASH_BITS = 2**64 - 1


class Mark(NamedTuple):
    """The last batch of events that was applied."""

    number: int
    digest: bytes


class _Kept(msgspec.Struct, array_like=True, tag=1):
    """State from which another poller continues; the tag is the version."""

    number: int
    digest: bytes
    block_size: int
    group: int | None
    hashes: bytes
    keys: bytes
    copies: dict[int, int]


_NUMBERS = np.dtype("<u8")


class KvBlocks:
    """The blocks of one engine, by the engine's hashes and by keys that a router can compute.

    The engine's hashes cannot be made from a prompt, so each block gets a key: of its tokens, and
    of the key of its parent. Blocks with images in them, and what follows them, have none: a router
    does not know their tokens. Nor have those of adapters that are told by number.
    """

    def __init__(self, random: Random, clock: Clock) -> None:
        self.complete = False  # the replica holds nothing but what its events told
        # Of the last update; its multiple of NUMBERS is this poller's alone. A step without an
        # update voids all updates before.
        self.number = random.randrange(1, 2**31) * NUMBERS
        self._clock = clock
        self._block_size = 0
        self._group: int | None = None
        self._keys: dict[int, int] = {}  # by hash
        # By hash, blocks beside the first: sequences computed at the same time have one each.
        self._copies: dict[int, int] = {}
        self._changes: dict[int, bool] = {}  # by key, not told yet: held now?
        self._missed = True  # changes were lost on the way
        self._repeat_s = _REPEAT_S
        self._told = 0  # keys told since all were, headers counted as keys
        self._whole_at = -math.inf

    def __len__(self) -> int:
        return len(self._keys)

    def start(self, complete: bool) -> None:
        """Forgets all blocks; ``complete``: the replica holds none."""
        self._keys.clear()
        self._copies.clear()
        self._changes.clear()
        self._block_size, self._group = 0, None
        self.complete = complete
        self.number += 1  # voids what routers heard until now
        self._whole_at = -math.inf
        self.repeat()

    def dump(self, mark: Mark) -> bytes:
        """Encodes the blocks as of a batch, in 16 bytes a block."""
        parts = [*self._keys], [*self._keys.values()]
        hashes, keys = (np.array(part, _NUMBERS).tobytes() for part in parts)
        kept = _Kept(*mark, self._block_size, self._group, hashes, keys, self._copies)
        return msgspec.msgpack.encode(kept)

    def restore(self, data: bytes) -> Mark | None:
        """Goes on from what :meth:`dump` gave; None: ``data`` is no dump."""
        try:
            kept = msgspec.msgpack.decode(data, type=_Kept)
            parts = (np.frombuffer(part, _NUMBERS).tolist() for part in (kept.hashes, kept.keys))
            held = dict(zip(*parts, strict=True))
        except (msgspec.MsgspecError, ValueError):
            return None
        self.start(complete=True)
        self._keys, self._copies = held, kept.copies
        self._block_size, self._group = kept.block_size, kept.group
        return Mark(kept.number, kept.digest)

    def repeat(self) -> None:
        """Tells all blocks again, within a second: a router may have missed updates."""
        self._missed, self._repeat_s = True, _REPEAT_S

    def not_kept(self) -> None:
        """Tells all blocks again, ever later, and changes meanwhile: routers heard the last update,
        but Redis did not keep it."""
        self._missed = True

    def apply(self, event: Event) -> None:
        """Applies the next event.

        Raises:
            OverflowError, ValueError: its tokens are no tokens, or the blocks are too many.
        """
        match event:
            case AllBlocksCleared():
                self.start(complete=True)
            case _ if not self.complete:
                pass  # the blocks before are not known
            case BlockStored():
                if event.medium in _GPU and event.kv_cache_spec_kind in _FULL:
                    self._store(event)
            case BlockRemoved():
                if event.medium in _GPU and event.group_idx == self._group:
                    for hash_ in map(_number_of, event.block_hashes):
                        self._remove(hash_)

    def news(self) -> tuple[BlockUpdate, BlockUpdate | None] | None:
        """Returns the update not told yet, and all blocks where that is due; None: neither."""
        since = self._clock() - self._whole_at
        if not self.complete:
            return None
        repeat = self._missed and since >= self._repeat_s
        long_ago = since > _WHOLE_EVERY_S or self._told > max(len(self._keys), _FEW)
        if not (self._changes or repeat or long_ago):
            return None
        previous, self.number = self.number, self.number + 1
        stored = [key for key, held in self._changes.items() if held]
        removed = [key for key, held in self._changes.items() if not held]
        self._told += len(self._changes) + _KEYS_OF_A_HEADER
        self._changes.clear()
        changes = self._news(previous, stored, removed)
        if not (repeat or long_ago):
            return changes, None
        whole = self._news(0, [*self._keys.values()], [])
        new = whole if self._missed else changes
        if repeat:
            longer = min(2 * self._repeat_s, _REPEAT_MOST_S)
            self._repeat_s = longer if since < 2 * self._repeat_s else _REPEAT_S
        self._missed, self._told, self._whole_at = False, 0, self._clock()
        return new, whole

    def _news(self, previous: int, stored: list[int], removed: list[int]) -> BlockUpdate:
        keys = (np.array(keys, np.uint64) for keys in (stored, removed))
        return BlockUpdate(self.number, previous, self._block_size, *keys)

    def _store(self, event: BlockStored) -> None:
        if not self._block_size:
            self._block_size, self._group = event.block_size, event.group_idx
        if (event.block_size, event.group_idx) != (self._block_size, self._group):
            return
        before = self._before(event)
        if before is None:
            return
        plain = _plain(event)
        keys = token_keys(event.token_ids, event.block_size, before).tolist()
        for hash_, key in zip(map(_number_of, event.block_hashes), keys[:plain], strict=False):
            if hash_ in self._keys:
                self._copies[hash_] = self._copies.get(hash_, 0) + 1
            else:
                self._keys[hash_] = key
                self._changes[key] = True
        if len(self._keys) > _MOST_BLOCKS:
            raise ValueError(f"more than {_MOST_BLOCKS} blocks")

    def _before(self, event: BlockStored) -> int | None:
        """Key of the block before; None: that block is not known."""
        if event.parent_block_hash is not None:
            return self._keys.get(_number_of(event.parent_block_hash))
        if event.lora_id and not event.lora_name:  # older vLLM: the adapter is not known
            return None
        return seed_of(event.lora_name or "", _salt(event))

    def _remove(self, hash_: int) -> None:
        if copies := self._copies.pop(hash_, 0):
            if copies > 1:
                self._copies[hash_] = copies - 1
        elif (key := self._keys.pop(hash_, None)) is not None:
            self._changes[key] = False


def _number_of(hash_: int | bytes) -> int:
    """Last 64 bits of a hash, which vLLM sends whole or as that number."""
    return (int.from_bytes(hash_, "big") if isinstance(hash_, bytes) else hash_) & _HASH_BITS


def _beside_tokens(event: BlockStored, block: int) -> list[object]:
    keys = event.extra_keys[block] if event.extra_keys else None
    return [key for key in keys or () if key != event.lora_name]


def _salt(event: BlockStored) -> str:
    """Salt of a sequence, which stands alone with its first block."""
    match _beside_tokens(event, 0) if event.parent_block_hash is None else ():
        case [str(salt)]:
            return salt
    return ""


def _plain(event: BlockStored) -> int:
    """Blocks up to the first whose hash covers more than tokens, adapter and salt."""
    if not any(event.extra_keys or ()):
        return len(event.block_hashes)
    salted = bool(_salt(event))
    for block in range(salted, len(event.extra_keys or ())):
        if _beside_tokens(event, block):
            return block
    return len(event.block_hashes)
