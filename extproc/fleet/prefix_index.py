"""Which prompts' beginnings each replica should hold in its prefix cache, by what was sent."""

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import repeat

import numpy as np

from extproc.predict.inputs import Floats, Indices
from extproc.replica_state import ReplicaState
from extproc.request.prefix import Keys, Prefix


class ReplicaBitmaps:
    """For each key a number in which every replica has a bit: of a thousand replicas, whoever holds
    a key is found in one look."""

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}

    def add(self, keys: Iterable[int], bit: int) -> None:
        masks, one = self._masks, 1 << bit
        for key in keys:
            masks[key] = masks.get(key, 0) | one

    def drop(self, keys: Iterable[int], bit: int) -> None:
        masks, others = self._masks, ~(1 << bit)
        for key in keys:
            left = masks[key] & others
            if left:
                masks[key] = left
            else:
                del masks[key]

    def mask(self, key: int) -> int:
        return self._masks.get(key, 0)

    def masks(self, keys: Iterable[int]) -> list[int]:
        return list(map(self._masks.get, keys, repeat(0)))


_ENOUGH_TOKENS = 10_000.0
"""Prompt tokens that a replica counts before its hits are compared with what was expected: some of
them were sent before the last comparison."""
_PLACES_REMEMBERED = 1000
_DEPTHS = 4  # parts of a cache that are told apart, from what was used last to what is evicted next
_PRIOR_TOKENS = 2_000.0  # tokens' worth of evidence that all of it is there
_SURE = 0.98  # reported ÷ expected from which on nothing is doubted
_MOST = 2.0  # reported ÷ expected, at most: no surplus is believed blindly later
_MEMORY_TOKENS = 50_000.0  # expected tokens after which older reports weigh 1/e as much


@dataclass(slots=True)
class PrefixHits:
    """What the candidates hold of a prompt, an entry each."""

    expected: Floats  # tokens, by what was sent there
    depths: Indices  # in the cache: 0 is what was used last; −1: known, teaches nothing
    cached: Floats  # tokens, as far as that is believed


@dataclass(slots=True)
class _Cache:
    recent: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """The keys it holds, the next to be evicted first; and ``entered`` when each was used last."""
    entered: int = 0  # keys, in all
    unit: float = 0.0  # tokens of a key, in the mean of what came of late
    room: int = 1  # for so many keys
    sent: float = 0.0  # prompt tokens sent since the last comparison with what the replica counts
    told: float = 0.0  # of these, the ones of prompts whose answers told what was cached
    expected: Floats = field(default_factory=lambda: np.zeros(_DEPTHS))
    """And the ones that were taken to be cached, by depth."""
    before: ReplicaState | None = None  # what it counted at the last comparison

    def fit(self, prefix: Prefix, capacity: float) -> None:
        """Makes room for as many keys as ``capacity`` tokens are, of which more come."""
        keys = len(prefix.keys)
        self.unit += (prefix.unit - self.unit) * keys / (keys + min(self.entered, self.room))
        self.room = max(int(capacity / self.unit), 1)

    def depth(self, key: int) -> int:
        # One that is not there: two prompts may share a later key, and not those before.
        since = self.entered - self.recent.get(key, self.entered)
        return min(since * _DEPTHS // self.room, _DEPTHS - 1)


@lru_cache
def _nothing(candidates: int) -> PrefixHits:
    none, depths = np.zeros(candidates), np.zeros(candidates, np.intp)
    none.flags.writeable = depths.flags.writeable = False
    return PrefixHits(none, depths, none)


class _Belief:
    """Reported ÷ expected hits of each replica, by how much was sent there since.

    What others send, a cache that is smaller than it seems, or none at all: whatever the reason,
    what was used long ago is gone first.
    """

    def __init__(self) -> None:
        self._sums = np.zeros((2, 0, _DEPTHS))  # reported and expected tokens, by row and depth
        self.share = np.zeros((0, _DEPTHS))  # of what is expected, what is there
        self.doubted = np.zeros(0, np.bool_)
        """By row: whether less was found than expected at any depth, so that depth matters."""

    def reset(self, row: int) -> None:
        """The replica in that row is believed to hold all, until it reports something else."""
        missing = row + 1 - self._sums.shape[1]
        if missing > 0:
            self._sums = np.pad(self._sums, ((0, 0), (0, missing), (0, 0)))
            self.share = np.pad(self.share, ((0, missing), (0, 0)))
            self.doubted = np.pad(self.doubted, (0, missing))
        self._sums[:, row] = _PRIOR_TOKENS
        self.share[row], self.doubted[row] = 1.0, False

    def observe(self, row: int, expected: Floats, reported: float) -> None:
        """The replica in that row found ``reported`` tokens, where so many of each depth were
        expected."""
        total = float(expected.sum())
        if total <= 0.0:
            return
        keep = 1.0 / (1.0 + expected / _MEMORY_TOKENS)
        share = min(reported / total, _MOST)
        self._sums[:, row] = self._sums[:, row] * keep + (expected * share, expected)
        reported, expected = self._sums[:, row]
        self.share[row] = np.minimum(reported / expected, 1.0)
        self.doubted[row] = bool((reported < expected * _SURE).any())


class PrefixIndex:
    """What replicas hold, unit by unit: entered when a prompt is sent, evicted as vLLM evicts.

    vLLM frees the blocks of a request from its last to its first, and evicts what was freed the
    longest ago. So whoever holds a unit of a prompt holds all before it, and the holders of a
    prompt's units get fewer from each unit to the next.
    """

    def __init__(self) -> None:
        self._holders = ReplicaBitmaps()  # a bit a row
        self._caches: list[_Cache] = []
        self._blocks = np.ones(0)  # by row: tokens in a block; a replica finds whole ones
        self._belief = _Belief()
        self._rows = np.zeros(0, np.intp)
        self._places: dict[int, Indices] = {}
        """By holders: where they stand in ``_rows``, the last candidates that were asked about."""

    def clear(self, row: int) -> None:
        """The replica in that row holds nothing: it started anew, or is another one."""
        if row == len(self._caches):
            self._caches.append(_Cache())
            self._blocks = np.append(self._blocks, 1.0)
        self._holders.drop(self._caches[row].recent, row)
        self._caches[row] = _Cache()
        self._belief.reset(row)

    def enter(self, row: int, prefix: Prefix, capacity: float) -> None:
        """A prompt is sent to the replica in that row, whose KV cache holds ``capacity`` tokens."""
        keys, cache = prefix.keys.tolist(), self._caches[row]
        cache.sent += prefix.tokens
        if not keys or prefix.unit <= 0.0:
            return
        recent = cache.recent
        new = [key for key in keys if key not in recent]
        if known := len(keys) - len(new):
            cache.expected[cache.depth(keys[known - 1])] += known * prefix.unit
        if prefix.whole:
            keys.append(prefix.whole)
            new.append(prefix.whole)
        cache.fit(prefix, capacity)
        cache.entered += len(new)
        keys.reverse()
        recent.update(dict.fromkeys(keys, cache.entered))
        deque(map(recent.move_to_end, keys), maxlen=0)
        self._holders.add(new, row)
        evicted = range(len(recent) - cache.room)
        self._holders.drop([recent.popitem(last=False)[0] for _ in evicted], row)

    def hits(self, prefix: Prefix, rows: Indices) -> PrefixHits:
        """What the replicas in these rows should hold of a prompt."""
        keys, holders = prefix.keys, self._holders
        mask = holders.mask(keys.item(0)) if len(keys) else 0
        if not mask:
            return _nothing(len(rows))
        expected, depths = np.zeros(len(rows)), np.zeros(len(rows), np.intp)
        end = 0
        while mask:
            end = self._end_of_run(keys, end, mask)
            after = holders.mask(keys.item(end)) if end < len(keys) else 0
            last = self._find(mask & ~after, rows)
            expected[last] = end * prefix.unit
            self._sound(depths, last, rows, keys.item(end - 1))
            mask = after
        if answered := holders.mask(prefix.previous_key):
            there = self._find(answered, rows)
            expected[there] = np.maximum(expected[there], prefix.previous_tokens)
            self._sound(depths, there, rows, prefix.previous_key)
        blocks = self._blocks[rows]
        expected = expected // blocks * blocks
        return PrefixHits(expected, depths, expected * self._belief.share[rows, depths])

    def tokens(self, row: int) -> float:
        cache = self._caches[row]
        return len(cache.recent) * cache.unit

    def _end_of_run(self, keys: Keys, start: int, mask: int) -> int:
        """Up to where these replicas, no more and no fewer, hold the keys from there on: found in a
        dozen looks, however long the prompt."""
        mask_of = self._holders.mask
        places = range(len(keys))
        return bisect_left(places, True, start, key=lambda at: mask_of(keys.item(at)) != mask)

    def reported(self, row: int, expected: float, depth: int, prompt: float, tokens: float) -> None:
        """The replica in that row said how many tokens of a prompt it had, where so many at that
        depth were expected."""
        self._caches[row].told += prompt
        at_depth = np.zeros(_DEPTHS)
        at_depth[depth] = expected
        self._belief.observe(row, at_depth, tokens)

    def polled(self, row: int, state: ReplicaState) -> None:
        """What the replica in that row counts: of use where its answers tell little."""
        cache = self._caches[row]
        self._blocks[row] = state.block_size
        before = cache.before = cache.before or state
        prompts = state.prompt_tokens - before.prompt_tokens
        if prompts < _ENOUGH_TOKENS:
            return
        if cache.told < cache.sent / 2:
            hits = (state.cached_tokens - before.cached_tokens) / prompts
            self._belief.observe(row, cache.expected, hits * cache.sent)
        cache.before, cache.sent, cache.told = state, 0.0, 0.0
        cache.expected = np.zeros(_DEPTHS)

    def _find(self, mask: int, rows: Indices) -> Indices:
        if rows is not self._rows or len(self._places) > _PLACES_REMEMBERED:
            self._rows, self._places = rows, {}
        there = self._places.get(mask)
        if there is None:
            octets = np.frombuffer(mask.to_bytes(len(self._caches) // 8 + 1, "little"), np.uint8)
            there = np.unpackbits(octets, bitorder="little")[rows].nonzero()[0]
            self._places[mask] = there
        return there

    def _sound(self, depths: Indices, there: Indices, rows: Indices, key: int) -> None:
        """How deep a key is in the caches of those that are there: of use where depth matters."""
        there = there[self._belief.doubted[rows[there]]]
        if len(there):
            depths[there] = [self._caches[row].depth(key) for row in rows[there].tolist()]
