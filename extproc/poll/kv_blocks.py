"""KV blocks of one replica, tracked from its events."""

import math
from random import Random
from typing import NamedTuple

import msgspec
import numpy as np

from extproc.fleet.held_blocks import NUMBERS, BlockUpdate, pack, unpack
from extproc.ground.clock import Clock
from extproc.poll.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from extproc.request.prefix import Keys, seed_of, token_keys

_MOST_BLOCKS = 2**20  # 17 million tokens in blocks of 16, more than any replica holds
_WHOLE_EVERY_S = 900.0  # longest time between two whole updates: Redis drops old ones
_RESEND_S = 1.0  # shortest time between two whole updates
_REFUSED_S = 16.0  # the same, while a full Redis stores no update
_FEW = 512  # changed keys after which a whole update is due; more if more blocks are held
_KEYS_OF_A_HEADER = 4  # size of an update's header, in keys

_GPU = (None, "GPU")
_FULL = (None, "full_attention", "mla_attention", "sink_full_attention")
"""Kinds of attention that need all blocks of a prefix for a hit; blocks of others are ignored."""
_HASH_BITS = 2**64 - 1


class Mark(NamedTuple):
    """Identity of the last batch of events that was applied."""

    number: int
    digest: bytes


class _Saved(msgspec.Struct, array_like=True, tag=1):
    """State from which another poller continues; the tag is the format version."""

    number: int
    digest: bytes
    block_size: int
    group: int | None
    hashes: Keys
    keys: Keys
    copies: dict[int, int]


_encode = msgspec.msgpack.Encoder(enc_hook=pack).encode
_decode = msgspec.msgpack.Decoder(_Saved, dec_hook=unpack).decode


class KvBlocks:
    """Blocks of one engine, each with the engine's hash and a key that routers can compute.

    A router cannot compute the engine's hashes from a prompt, so each block gets a key, computed
    from its tokens and the key of the block before. Blocks with images, the blocks after them, and
    blocks of adapters that events name only by number are skipped: routers cannot compute the keys.
    """

    def __init__(self, random: Random, clock: Clock) -> None:
        # Number of the last update, from a range that only this poller uses. Skipping a number
        # invalidates all earlier updates.
        self.number = random.randrange(1, 2**31) * NUMBERS
        self._clock = clock
        self._sent_keys = 0  # since the last whole update, headers counted as keys
        self.reset(complete=False)

    def reset(self, complete: bool) -> None:
        """Forgets all blocks. ``complete``: the replica holds none; else its blocks are unknown."""
        self._keys: dict[int, int] = {}  # by hash
        # By hash, the copies of a block: sequences computed at the same time do not share blocks.
        self._copies: dict[int, int] = {}
        self._changes: dict[int, bool] = {}  # by key, since the last update; True: held now
        self._block_size = 0
        self._group: int | None = None
        self._stored = False  # the engine stored blocks of any kind
        self.complete = complete  # True: the events have named every block that the replica holds
        self.number += 1  # invalidates earlier updates
        self._whole_at = -math.inf
        self.resend_all()

    @property
    def lacks_full_attention(self) -> bool:
        """True if the engine stored blocks, but none of full attention."""
        return self._stored and not self._block_size

    def dump(self, mark: Mark) -> bytes:
        """Encodes the blocks as they were after the batch ``mark``, in 16 bytes a block."""
        held = self._keys, self._keys.values()
        hashes, keys = (np.fromiter(part, np.uint64) for part in held)
        return _encode(_Saved(*mark, self._block_size, self._group, hashes, keys, self._copies))

    def restore(self, data: bytes) -> Mark | None:
        """Restores the blocks and returns the mark of a :meth:`dump`; None: ``data`` is no dump."""
        try:
            saved = _decode(data)
            held = dict(zip(saved.hashes.tolist(), saved.keys.tolist(), strict=True))
        except ValueError:
            return None
        self.reset(complete=True)
        self._keys, self._copies = held, saved.copies
        self._block_size, self._group = saved.block_size, saved.group
        return Mark(saved.number, saved.digest)

    def resend_all(self, backs_off: bool = False) -> None:
        """Schedules a whole update within a second, because a router may have missed updates.

        ``backs_off``: routers received the last update, but Redis did not store it. Whole updates
        are then ``_REFUSED_S`` apart; changes are still sent in between.
        """
        self._resend_s = _REFUSED_S if backs_off else _RESEND_S  # inf: none is scheduled

    def apply(self, event: Event) -> None:
        """Applies the next event.

        Raises:
            OverflowError, ValueError: invalid token ids, or more than ``_MOST_BLOCKS`` blocks.
        """
        match event:
            case AllBlocksCleared():
                self.reset(complete=True)
            case _ if not self.complete or event.medium not in _GPU:
                pass  # earlier blocks are unknown, or this block is not on the GPU
            case BlockStored():
                if event.kv_cache_spec_kind in _FULL:
                    self._store(event)
                self._stored = True
            case BlockRemoved() if event.group_idx == self._group:
                for hash_ in map(_number_of, event.block_hashes):
                    self._remove(hash_)

    def next_update(self) -> tuple[BlockUpdate, BlockUpdate | None] | None:
        """Returns the next update for routers and, if due, all blocks for Redis.

        Returns None if nothing changed and no whole update is due, or if the blocks are unknown.
        """
        since = self._clock() - self._whole_at
        if not self.complete:
            return None
        resend = since >= self._resend_s
        refresh = since > _WHOLE_EVERY_S or self._sent_keys > max(len(self._keys), _FEW)
        if not (self._changes or resend or refresh):
            return None
        previous, self.number = self.number, self.number + 1
        stored = [key for key, held in self._changes.items() if held]
        removed = [key for key, held in self._changes.items() if not held]
        self._sent_keys += len(self._changes) + _KEYS_OF_A_HEADER
        self._changes.clear()
        changes = self._update(previous, stored, removed)
        if not (resend or refresh):
            return changes, None
        whole = self._update(0, [*self._keys.values()], [])
        update = whole if self._resend_s < math.inf else changes
        self._resend_s, self._sent_keys, self._whole_at = math.inf, 0, self._clock()
        return update, whole

    def _update(self, previous: int, stored: list[int], removed: list[int]) -> BlockUpdate:
        keys = (np.array(keys, np.uint64) for keys in (stored, removed))
        return BlockUpdate(self.number, previous, self._block_size, *keys)

    def _store(self, event: BlockStored) -> None:
        if not self._block_size:
            self._block_size, self._group = event.block_size, event.group_idx
        if (event.block_size, event.group_idx) != (self._block_size, self._group):
            return
        parent = self._parent_key(event)
        if parent is None:
            return
        keys = token_keys(event.token_ids, event.block_size, parent).tolist()[: _computable(event)]
        for hash_, key in zip(map(_number_of, event.block_hashes), keys, strict=False):
            if hash_ in self._keys:
                self._copies[hash_] = self._copies.get(hash_, 0) + 1
            else:
                self._keys[hash_] = key
                self._changes[key] = True
        if len(self._keys) > _MOST_BLOCKS:
            raise ValueError(f"the replica has more than {_MOST_BLOCKS} KV blocks")

    def _parent_key(self, event: BlockStored) -> int | None:
        """Returns the key from which the keys of the event's blocks follow, or None if unknown."""
        if event.parent_block_hash is not None:
            return self._keys.get(_number_of(event.parent_block_hash))
        if event.lora_id and not event.lora_name:  # older vLLM: no name of the adapter
            return None
        return seed_of(event.lora_name or "", _salt(event))

    def _remove(self, hash_: int) -> None:
        if copies := self._copies.pop(hash_, 0):
            if copies > 1:
                self._copies[hash_] = copies - 1
        elif (key := self._keys.pop(hash_, None)) is not None:
            self._changes[key] = False


def _number_of(hash_: int | bytes) -> int:
    """Returns the last 64 bits of a hash; vLLM sends the whole hash or this number."""
    return (int.from_bytes(hash_, "big") if isinstance(hash_, bytes) else hash_) & _HASH_BITS


def _other_keys(event: BlockStored, block: int) -> list[object]:
    """Returns the inputs of a block's hash other than its tokens and the adapter's name."""
    keys = event.extra_keys[block] if event.extra_keys else None
    return [key for key in keys or () if key != event.lora_name]


def _salt(event: BlockStored) -> str:
    """Returns the salt that vLLM adds to the first block of a sequence; empty if it adds none."""
    match _other_keys(event, 0) if event.parent_block_hash is None else ():
        case [str(salt)]:
            return salt
    return ""


def _computable(event: BlockStored) -> int:
    """Counts the leading blocks whose hash covers only tokens, adapter and salt."""
    extra_keys = event.extra_keys or ()
    blocks = range(bool(_salt(event)), len(extra_keys)) if any(extra_keys) else ()
    return next((block for block in blocks if _other_keys(event, block)), len(event.block_hashes))
