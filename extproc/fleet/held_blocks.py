"""Which KV blocks replicas hold, by their own word: what polls brought of vLLM's KV events."""

import logging
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import inf, nan

import numpy as np
from msgspec import Struct

from extproc.fleet.prefix_index import ReplicaBitmaps
from extproc.ground.clock import Clock
from extproc.predict.inputs import Floats
from extproc.replica_state import ReplicaState
from extproc.request.prefix import Keys, Prefix, seed_of, token_keys

_KEY = np.dtype("<u8")
NUMBERS = 2**32  # that a poller has for one replica, beginning with a multiple of it


class BlockUpdate(Struct, frozen=True, eq=False, array_like=True):
    """Keys of blocks, as :func:`~extproc.request.prefix.token_keys` makes them."""

    number: int  # its own; no other poller gives the same ones
    previous: int  # of the news that it continues; 0: it says all that there is
    block_size: int  # tokens in a block; 0 where none was stored yet
    stored: Keys
    removed: Keys

    @property
    def whole(self) -> bool:
        return not self.previous


def is_up_to(heard: int, number: int) -> bool:
    """Tells whether who heard news with the one number heard those with the other, too."""
    return heard // NUMBERS == number // NUMBERS and heard >= number


def pack(keys: Keys) -> bytes:
    """Encodes keys, for msgspec."""
    return keys.astype(_KEY, copy=False).tobytes()


def unpack(_: type, data: bytes) -> Keys:
    """Decodes keys, for msgspec."""
    return np.frombuffer(data, _KEY)


log = logging.getLogger(__name__)

LATE_S = 2.0  # seconds for which blocks count as known since a poll saw no news missing
_IN_A_TURN = 2048
"""Blocks that are applied at once: a millisecond, in which a router does nothing else."""
_SENT_S = 10.0  # seconds within which the blocks of a sent prompt are stored and told


@dataclass(slots=True)
class _Replica:
    bit: int  # its place in the masks
    keys: set[int] = field(default_factory=set)  # of the blocks that it holds, or is about to
    sent: dict[int, float] = field(default_factory=dict)
    """Of these, the ones that it did not tell of yet: until when it is waited for."""
    number: int = 0  # of the last news
    block_size: int = 0
    known_until: float = -inf
    known: bool = False  # whether its blocks were known when last looked at


class HeldBlocks:
    """The blocks of each replica that tells, for prompts whose token ids are known.

    A replica whose news are late, or whose poller no longer hears of all its events, is not known
    until they are there again.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._replicas: dict[str, _Replica] = {}
        self._holders = ReplicaBitmaps()

    def follows(self, replica: str, news: BlockUpdate) -> bool:
        """Tells whether an update can be applied: it is whole, or continues the last one."""
        known = self._replicas.get(replica)
        return news.whole or (known is not None and news.previous == known.number)

    def apply(self, replica: str, news: BlockUpdate) -> Iterator[None]:
        """Applies an update that follows, in steps between which other work may come."""
        one = self._replica(replica)
        for _ in self._steps(one, news):
            yield
            if self._replicas.get(replica) is not one:  # forgotten meanwhile
                return
        one.number, one.block_size = news.number, news.block_size

    def _steps(self, one: _Replica, news: BlockUpdate) -> Iterator[None]:
        kept: set[int] = set()
        removed = [*one.keys] if news.whole else news.removed.tolist()
        for keys in _parts(news.stored.tolist()):
            self._add(one, {*keys} - one.keys)
            _expect_no_more(one, keys)
            kept.update(keys)
            yield
        for keys in _parts(removed):
            self._drop(one, {*keys} - kept - (one.sent.keys() if news.whole else set()))
            yield

    def polled(self, state: ReplicaState) -> None:
        one = self._replicas.get(state.id)
        if one is None:
            return
        now = self._clock()
        if state.kv_news is None:
            one.known_until = -inf
        elif is_up_to(one.number, state.kv_news):
            one.known_until = now + LATE_S
        overdue = [key for key, until in one.sent.items() if until < now]
        self._drop(one, overdue)

    def sent(self, replica: str, prefix: Prefix, adapter: str) -> None:
        """A prompt is sent there: its blocks will be stored before what is sent next is looked
        up."""
        one = self._replicas.get(replica)
        if one is not None and self._is_known(one):
            until = self._clock() + _SENT_S
            new = [key for key in _keys(prefix, adapter, one.block_size) if key not in one.keys]
            self._add(one, new)
            one.sent.update(dict.fromkeys(new, until))

    def forget(self, replica: str) -> None:
        one = self._replicas.pop(replica, None)
        if one is not None:
            self._drop(one, [*one.keys])

    def keep(self, replicas: Container[str]) -> None:
        for gone in [name for name in self._replicas if name not in replicas]:
            self.forget(gone)

    def count(self, replica: str) -> int | None:
        """How many blocks it told that it holds; None where that is not known now."""
        one = self._replicas.get(replica)
        if one is None or not self._is_known(one):
            return None
        return len(one.keys) - len(one.sent)

    def held(
        self, prefix: Prefix, adapters: Sequence[str], replicas: Sequence[str]
    ) -> Floats | None:
        """Tokens of a prompt that each of these replicas holds, for the adapter it is asked for or,
        where that is empty or there are no entries, for none; nan where that is not known, and None
        where it is of no replica."""
        if not len(prefix.ids) or not self._replicas:
            return None
        places = [
            (place, one, (one.block_size, adapters[place] if adapters else ""))
            for place, one in enumerate(map(self._replicas.get, replicas))
            if one is not None and self._is_known(one)
        ]
        if not places:
            return None
        tokens = np.full(len(replicas), nan)
        for kind in {kind for _, _, kind in places}:
            size, adapter = kind
            runs = self._runs(_keys(prefix, adapter, size)) if size else []
            for place, one, its_kind in places:
                if its_kind == kind:
                    tokens[place] = size * _held_of(one.bit, runs)
        return tokens

    def count_known(self) -> int:
        """How many replicas' blocks are known; says which no longer are, or are now."""
        for name, one in self._replicas.items():
            known = self._is_known(one)
            if known != one.known:
                one.known = known
                what = "known" if known else "estimated"
                log.info(f"replica's KV blocks are {what}", extra={"replica": name})
        return sum(one.known for one in self._replicas.values())

    def _runs(self, keys: Sequence[int]) -> list[tuple[int, int]]:
        """The replicas that hold the first blocks, and how many: each run holds more, and fewer
        replicas do. One that is about to hold a block may have lost one before it."""
        runs: list[tuple[int, int]] = []
        end, all_before = 0, -1
        for mask, same in groupby(self._holders.masks(keys)):
            all_before &= mask
            if not all_before:
                break
            end += len([*same])
            runs.append((all_before, end))
        return runs

    def _replica(self, name: str) -> _Replica:
        one = self._replicas.get(name)
        if one is None:
            taken = {other.bit for other in self._replicas.values()}
            bit = next(bit for bit in range(len(taken) + 1) if bit not in taken)
            one = self._replicas[name] = _Replica(bit)
        return one

    def _is_known(self, one: _Replica) -> bool:
        return self._clock() <= one.known_until

    def _add(self, one: _Replica, keys: Collection[int]) -> None:
        one.keys.update(keys)
        self._holders.add(keys, one.bit)
        _expect_no_more(one, keys)

    def _drop(self, one: _Replica, keys: Iterable[int]) -> None:
        gone = one.keys.intersection(keys)
        one.keys -= gone
        self._holders.drop(gone, one.bit)
        _expect_no_more(one, gone)


def _keys(prefix: Prefix, adapter: str, block_size: int) -> list[int]:
    """Of the blocks that may be found: the last token is always computed."""
    if not block_size:
        return []
    seed = seed_of(adapter, prefix.salt)
    keys: list[int] = token_keys(prefix.ids[:-1], block_size, seed).tolist()
    return keys


def _parts(keys: Sequence[int]) -> Iterator[Sequence[int]]:
    return (keys[first : first + _IN_A_TURN] for first in range(0, len(keys), _IN_A_TURN))


def _expect_no_more(one: _Replica, keys: Iterable[int]) -> None:
    for key in one.sent.keys() & keys:
        del one.sent[key]


def _held_of(bit: int, runs: Sequence[tuple[int, int]]) -> int:
    return max((end for mask, end in runs if mask >> bit & 1), default=0)
