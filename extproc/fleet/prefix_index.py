"""Prefix index: the beginnings of prompts that each replica should hold in its prefix cache.

The index knows what this router and the other routers sent. The index evicts as vLLM evicts, and
learns from hits that replicas report.
"""

from bisect import bisect_left
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import filterfalse

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from extproc.fleet.tables import Replicas
from extproc.predict.inputs import Floats, Indices
from extproc.replica_state import ReplicaState
from extproc.request.prefix import Keys, Prefix

_ENOUGH_TOKENS = 10_000.0
"""Prompt tokens of a replica between two comparisons of its hits with the expected hits: enough for
requests in flight at a comparison to weigh little."""
_PLACES_REMEMBERED = 1000
_PRIOR_TOKENS = 2_000.0  # weight of the prior: all expected tokens are in the cache
_FULL_TRUST = 5.0  # expected ÷ reported tokens up to which all expected tokens count
_MAX_SHARE = 2.0  # bound of reported ÷ expected tokens: a surplus must not outweigh later misses
_MEMORY_TOKENS = 50_000.0  # expected tokens after which older reports weigh 1/e as much

Bitmaps = dict[int, int]  # key → bitmap of its replicas, so that one look-up finds all of them


def set_bit(bitmaps: Bitmaps, keys: Iterable[int], bit: int) -> None:
    """Adds a replica to the bitmaps of the keys."""
    own = 1 << bit
    for key in keys:
        bitmaps[key] = bitmaps.get(key, 0) | own


def clear_bit(bitmaps: Bitmaps, keys: Iterable[int], bit: int) -> None:
    """Removes a replica from the bitmaps of the keys, and keys that no replica holds."""
    others = ~(1 << bit)
    for key in keys:
        left = bitmaps[key] & others
        if left:
            bitmaps[key] = left
        else:
            del bitmaps[key]


class PrefixHits(Struct, eq=False):
    """Tokens of a prompt that each candidate should have in its prefix cache."""

    expected: Floats  # reported by the candidate, or estimated from the prompts sent to it
    cached: Floats  # reported tokens, or estimated tokens × trust, see _Cache.learn_trust
    estimated: NDArray[np.bool_]  # False: the replica reported the tokens itself


@dataclass(slots=True)
class _Cache:
    recent: OrderedDict[int, None] = field(default_factory=OrderedDict)  # next to be evicted first
    entered: int = 0  # keys entered so far
    unit: float = 0.0  # tokens of a key, as the mean of recent prompts
    capacity: int = 1  # keys that fit
    sent: float = 0.0  # prompt tokens since the last comparison with the replica's counters
    reported: float = 0.0  # part of ``sent``: prompts whose responses reported their hits
    expected: float = 0.0  # part of ``sent``: tokens that were expected to be cached
    before: ReplicaState | None = None  # the replica's counters at the last comparison
    hits_reported: float = _PRIOR_TOKENS  # cached tokens by the replica's reports; old ones fade
    hits_expected: float = _PRIOR_TOKENS  # cached tokens that were expected of the same prompts

    def learn_trust(self, expected: float, reported: float) -> float:
        """Adds expected and reported cached tokens to decaying sums, which start at
        ``_PRIOR_TOKENS``. Returns the factor by which the replica's expected hits are multiplied
        from now on: ``min(1, 5·reported / expected)``.

        A replica that reports almost no hits loses trust, because its cache is probably off. A
        replica that reports a fifth of the expected hits probably has a cache that is too small.
        Such a replica keeps full trust: with less trust its conversations would move to other
        replicas, and displace the conversations in those caches. ``docs/tried.md`` compares this
        with ``reported / expected``.
        """
        if expected > 0.0:
            older = 1.0 + expected / _MEMORY_TOKENS
            self.hits_reported = self.hits_reported / older + min(reported, _MAX_SHARE * expected)
            self.hits_expected = self.hits_expected / older + expected
        return min(_FULL_TRUST * self.hits_reported / self.hits_expected, 1.0)


@lru_cache
def _nothing(candidates: int) -> PrefixHits:
    none, estimated = np.zeros(candidates), np.ones(candidates, np.bool_)
    none.flags.writeable = estimated.flags.writeable = False
    return PrefixHits(none, none, estimated)


class PrefixIndex:
    """Expected content of each replica's prefix cache, from the prompts sent to the replica.

    A prompt is cut into units of equal length; a key stands for a unit and all units before it.
    vLLM frees the blocks of a request from its last to its first, and evicts the block that was
    freed longest ago. So a replica that holds a unit of a prompt also holds all units before it;
    :meth:`hits` relies on this.
    """

    def __init__(self, table: Replicas) -> None:
        self._table = table
        self._bitmaps: Bitmaps = {}  # a bit for each row
        self._caches = defaultdict[int, _Cache](_Cache)  # by row
        self._places = lru_cache(_PLACES_REMEMBERED)(self._places_of)

    def clear(self, row: int) -> None:
        """Empties a row: its replica restarted or sleeps, or another replica gets the row."""
        clear_bit(self._bitmaps, self._caches[row].recent, row)
        self._caches[row] = _Cache()
        self._table.prefix_trust[row] = 1.0

    def enter(self, row: int, prefix: Prefix, capacity: float) -> None:
        """Adds a prompt sent to the replica of ``row``; ``capacity``: tokens in the KV cache."""
        keys, cache = prefix.keys.tolist(), self._caches[row]
        cache.sent += prefix.tokens
        if not keys or prefix.unit <= 0.0:
            return
        recent, units = cache.recent, len(keys)
        new = [*filterfalse(recent.__contains__, keys)]
        cache.expected += (units - len(new)) * prefix.unit
        if prefix.whole:
            keys.append(prefix.whole)
            new.append(prefix.whole)
        known = min(cache.entered, cache.capacity)
        cache.unit += (prefix.unit - cache.unit) * units / (units + known)
        cache.capacity = max(int(capacity / cache.unit), 1)
        cache.entered += len(new)
        for key in reversed(keys):  # `update` takes twice as long
            recent[key] = None
            recent.move_to_end(key)
        set_bit(self._bitmaps, new, row)
        evicted = range(len(recent) - cache.capacity)
        clear_bit(self._bitmaps, [recent.popitem(last=False)[0] for _ in evicted], row)

    def hits(self, prefix: Prefix, rows: Indices) -> PrefixHits:
        """Returns the tokens of a prompt that the replicas in these rows should hold."""
        keys, bitmaps = prefix.keys, self._bitmaps
        bitmap = bitmaps.get(keys.item(0), 0) if len(keys) else 0
        if not bitmap:
            return _nothing(len(rows))
        expected, end, among = np.zeros(len(rows)), 0, rows.tobytes()
        while bitmap:
            end = self._end_of_run(keys, end, bitmap)
            after = bitmaps.get(keys.item(end), 0) if end < len(keys) else 0
            last = self._places(bitmap & ~after, among)
            expected[last] = end * prefix.unit
            bitmap = after
        if answered := bitmaps.get(prefix.previous_key):
            places = self._places(answered, among)
            expected[places] = np.maximum(expected[places], prefix.previous_tokens)
        blocks = self._table.block_size[rows]
        expected = expected // blocks * blocks
        estimated = _nothing(len(rows)).estimated
        return PrefixHits(expected, expected * self._table.prefix_trust[rows], estimated)

    def tokens(self, row: int) -> float:
        cache = self._caches[row]
        return len(cache.recent) * cache.unit

    def _end_of_run(self, keys: Keys, start: int, bitmap: int) -> int:
        """Returns the first index after ``start`` at which the replicas that hold the key are no
        longer exactly those of ``bitmap``; found by bisection."""
        bitmap_of = self._bitmaps.get
        return bisect_left(
            range(len(keys)), True, start, key=lambda at: bitmap_of(keys.item(at)) != bitmap
        )

    def reported(self, row: int, expected: float, prompt: float, tokens: float) -> None:
        """Updates the trust in a replica from a response that reports ``tokens`` cached tokens."""
        cache = self._caches[row]
        cache.reported += prompt
        self._table.prefix_trust[row] = cache.learn_trust(expected, tokens)

    def polled(self, row: int, state: ReplicaState) -> None:
        """Updates the trust in a replica from its counters, if most responses report no hits."""
        cache = self._caches[row]
        before = cache.before = cache.before or state
        prompts = state.prompt_tokens - before.prompt_tokens
        if prompts < _ENOUGH_TOKENS:
            return
        if cache.reported < cache.sent / 2:
            hits = max(state.cached_tokens - before.cached_tokens, 0.0) / prompts
            self._table.prefix_trust[row] = cache.learn_trust(cache.expected, hits * cache.sent)
        cache.before, cache.sent, cache.reported, cache.expected = state, 0.0, 0.0, 0.0

    def _places_of(self, bitmap: int, among: bytes) -> Indices:
        """Returns the indices of a bitmap's replicas among these rows.

        Each model has an array of rows of its own, mostly with the same rows. The rows come
        as bytes, so that equal rows share a place in the cache.
        """
        octets = np.frombuffer(bitmap.to_bytes(len(self._table) // 8 + 1, "little"), np.uint8)
        held = np.unpackbits(octets, bitorder="little")
        return held[np.frombuffer(among, np.intp)].nonzero()[0]
