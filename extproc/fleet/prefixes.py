"""Which prompts' beginnings each replica should hold in its prefix cache, by what was sent."""

from bisect import bisect_left
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import repeat
from operator import ne

import numpy as np

from extproc.fleet.belief import DEPTHS, Belief
from extproc.fleet.state import ReplicaState
from extproc.fleet.view import Floats, Indices
from extproc.request.prefix import Prefix

_ENOUGH_TOKENS = 10_000.0
"""Prompt tokens that a replica counts before its hits are compared with what was expected: some of
them were sent before the last comparison."""


@dataclass(slots=True)
class Held:
    """What the candidates hold of a prompt, an entry each."""

    expected: Floats
    """Tokens, by what was sent there."""
    depths: Indices
    """How deep in the cache: 0 is what was used last; −1: it is known, and teaches nothing."""
    cached: Floats
    """Tokens, as far as that is believed."""


@dataclass(slots=True)
class _Cache:
    """One replica's."""

    recent: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """The keys it holds, the next to be evicted first; and ``entered`` when each was used last."""
    entered: int = 0
    """Keys, in all."""
    room: int = 1
    """For so many keys."""
    sent: float = 0.0
    """Prompt tokens sent since the last comparison with what the replica counts."""
    expected: Floats = field(default_factory=lambda: np.zeros(DEPTHS))
    """Of these, tokens that were taken to be cached, by depth."""
    reports: bool = False
    """Whether its answers tell what was cached."""
    before: ReplicaState | None = None
    """What it counted at the last comparison."""

    def depth(self, key: int) -> int:
        since = self.entered - self.recent[key]
        return min(since * DEPTHS // self.room, DEPTHS - 1)


@lru_cache
def _nothing(candidates: int) -> Held:
    none = np.zeros(candidates)
    none.flags.writeable = False
    return Held(none, np.zeros(candidates, np.intp), none)


class Prefixes:
    """What replicas hold, unit by unit: entered when a prompt is sent, evicted as vLLM evicts.

    vLLM frees the blocks of a request from its last to its first, and evicts what was freed the
    longest ago. So whoever holds a unit of a prompt holds all before it, and the holders of a
    prompt's units get fewer from each unit to the next.
    """

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        """By key: the rows that hold it, a bit each."""
        self._caches: list[_Cache] = []
        self._blocks = np.ones(0)
        """By row: tokens in a block; a replica finds whole ones."""
        self._belief = Belief()

    def clear(self, row: int) -> None:
        """The replica in that row holds nothing: it started anew, or is another one."""
        if row == len(self._caches):
            self._caches.append(_Cache())
            self._blocks = np.append(self._blocks, 1.0)
        for key in self._caches[row].recent:
            self._drop(key, 1 << row)
        self._caches[row] = _Cache()
        self._belief.reset(row)

    def enter(self, row: int, prefix: Prefix, capacity: float) -> None:
        """A prompt is sent to the replica in that row, whose KV cache holds ``capacity`` tokens."""
        keys = prefix.keys.tolist()
        if not keys:
            return
        cache, holders, bit = self._caches[row], self._holders, 1 << row
        recent, room = cache.recent, max(int(capacity / prefix.unit), 1)
        new = [key for key in keys if key not in recent]
        cache.sent += len(keys) * prefix.unit
        if known := len(keys) - len(new):
            cache.expected[cache.depth(keys[known - 1])] += known * prefix.unit
        if prefix.whole:
            keys.append(prefix.whole)
            new.append(prefix.whole)
        cache.room = room
        cache.entered += len(new)
        keys.reverse()
        recent.update(dict.fromkeys(keys, cache.entered))
        deque(map(recent.move_to_end, keys), maxlen=0)
        for key in new:
            holders[key] = holders.get(key, 0) | bit
        for _ in range(len(recent) - room):
            self._drop(recent.popitem(last=False)[0], bit)

    def held(self, prefix: Prefix, rows: Indices) -> Held:
        """What the replicas in these rows should hold of a prompt."""
        keys = prefix.keys.tolist()
        masks = list(map(self._holders.get, keys, repeat(0)))
        if not masks or not masks[0]:
            return _nothing(len(rows))
        expected, depths = np.zeros(len(rows)), np.zeros(len(rows), np.intp)
        end = 0
        while end < len(masks) and (mask := masks[end]):
            end = bisect_left(masks, True, end, key=lambda other: ne(mask, other))
            self._mark(expected, depths, rows, mask, keys[end - 1], end * prefix.unit)
        if answered := self._holders.get(prefix.asked, 0):
            self._mark(expected, depths, rows, answered, prefix.asked, prefix.answered)
        blocks = self._blocks[rows]
        expected = expected // blocks * blocks
        return Held(expected, depths, expected * self._belief.share(rows, depths))

    def reported(self, row: int, expected: float, depth: int, tokens: float) -> None:
        """The replica in that row said how many tokens of a prompt it had, where so many at that
        depth were expected."""
        self._caches[row].reports = True
        at_depth = np.zeros(DEPTHS)
        at_depth[depth] = expected
        self._belief.observe(row, at_depth, tokens)

    def polled(self, row: int, state: ReplicaState) -> None:
        """What the replica in that row counts: of use where its answers tell nothing."""
        cache = self._caches[row]
        self._blocks[row] = state.block_size
        before = cache.before = cache.before or state
        prompts = state.prompt_tokens - before.prompt_tokens
        if cache.reports or prompts < _ENOUGH_TOKENS:
            return
        hits = (state.cached_tokens - before.cached_tokens) / prompts
        self._belief.observe(row, cache.expected, hits * cache.sent)
        cache.before, cache.sent, cache.expected = state, 0.0, np.zeros(DEPTHS)

    def _mark(
        self, expected: Floats, depths: Indices, rows: Indices, mask: int, key: int, tokens: float
    ) -> None:
        """The replicas in the mask hold so many tokens, up to that key."""
        size = (max(mask.bit_length(), len(self._caches)) + 7) // 8
        octets = np.frombuffer(mask.to_bytes(size, "little"), np.uint8)
        there = np.unpackbits(octets, bitorder="little")[rows].nonzero()[0]
        expected[there] = np.maximum(expected[there], tokens)
        depths[there] = [self._caches[row].depth(key) for row in rows[there].tolist()]

    def _drop(self, key: int, bit: int) -> None:
        left = self._holders[key] & ~bit
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]
