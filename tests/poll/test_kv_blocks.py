"""A router that receives all updates holds the blocks that an engine's events report."""

import tracemalloc
from collections import Counter
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from extproc.fleet.held_blocks import BlockUpdate, is_up_to
from extproc.poll.destination import IntoFleet
from extproc.poll.kv_blocks import KvBlocks, Mark
from extproc.poll.kv_events import read_batch
from extproc.request.prefix import seed_of, token_keys
from tests.examples import examples
from tests.fakes import A10, ManualClock, fleet_of, replica, state

IDS = list(range(1000, 1064))
KEYS = token_keys(IDS, 16, seed_of("", "")).tolist()
PLAIN = seed_of("", "")

STORED = {
    "block_hashes": [11, 12],
    "parent_block_hash": None,
    "token_ids": IDS[:32],
    "block_size": 16,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
}


def stored(first: int, hashes: list[Any], parent: Any = None, **more: Any) -> dict[str, Any]:
    ids = IDS[first * 16 : (first + len(hashes)) * 16]
    given = {"block_hashes": hashes, "parent_block_hash": parent, "token_ids": ids}
    return {"type": "BlockStored", **STORED, **given, **more}


def removed(*hashes: Any, **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", **more}


CLEARED = {"type": "AllBlocksCleared"}


def as_maps(events: list[dict[str, Any]]) -> bytes:
    return msgspec.msgpack.encode([1.5, events, 0])


def as_arrays(events: list[dict[str, Any]]) -> bytes:
    return msgspec.msgpack.encode([1.5, [list(event.values()) for event in events]])


def all_maps(events: list[dict[str, Any]]) -> bytes:
    return msgspec.msgpack.encode({"ts": 1.5, "events": events, "data_parallel_rank": 0})


def after(update: BlockUpdate, held: set[int]) -> set[int]:
    before = set() if update.whole else held
    return before - {*update.removed.tolist()} | {*update.stored.tolist()}


class ReceivedBlocks:
    """Blocks of a router that receives every update."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.blocks = KvBlocks(Random(1), self.clock)
        self.blocks.reset(complete=True)
        self._held: set[int] = set()
        self.wholes = 0

    def apply(self, *events: dict[str, Any], encode: Any = as_maps) -> None:
        for event in read_batch(encode([*events])):
            self.blocks.apply(event)

    def held(self) -> set[int]:
        if due := self.blocks.next_update():
            update, whole = due
            self.wholes += whole is not None
            self._held = after(update, self._held)
            if whole:
                assert {*whole.stored.tolist()} == self._held
        return self._held


class EngineAndRouter(RuleBasedStateMachine):
    """An engine with a chain of two blocks, its pollers, and a router that receives updates."""

    def __init__(self) -> None:
        super().__init__()
        self.router = ReceivedBlocks()
        self.copies: Counter[int] = Counter()
        self.known = True

    @rule(
        events=st.lists(st.tuples(st.booleans(), st.integers(0, 1)), min_size=1, max_size=4),
        encode=st.sampled_from([as_maps, as_arrays, all_maps]),
    )
    def batch(self, events: list[tuple[bool, int]], encode: Any) -> None:
        batch = []
        for stores, block in events:
            parent = block - 1 if block else None
            batch.append(stored(block, [block], parent=parent) if stores else removed(block))
            if not stores:
                self.copies[block] = max(self.copies[block] - 1, 0)
            elif self.known and (parent is None or self.copies[parent]):
                self.copies[block] += 1
        self.router.apply(*batch, encode=encode)

    @rule(restart=st.booleans())
    def clear(self, restart: bool) -> None:
        if restart:
            self.router.blocks.reset(complete=True)
        else:
            self.router.apply(CLEARED)
        self.known = True
        self.copies.clear()

    @rule()
    def lose_events(self) -> None:
        self.router.blocks.reset(complete=False)
        self.known = False
        self.copies.clear()

    @rule(seed=st.integers())
    @precondition(lambda self: self.known)
    def hand_over(self, seed: int) -> None:
        mark, before = Mark(7, b"digest"), self.router.blocks
        self.router.blocks = KvBlocks(Random(seed), self.router.clock)
        assert self.router.blocks.restore(before.dump(mark)) == mark

    @rule(seconds=st.sampled_from([0.5, 2.0, 901.0]), is_stored=st.booleans())
    def wait(self, seconds: float, is_stored: bool) -> None:
        if not is_stored:
            self.router.blocks.resend_all(backs_off=True)
        self.router.clock.advance(seconds)

    @invariant()
    def the_router_holds_what_the_engine_holds(self) -> None:
        if self.known:
            expected = {KEYS[block] for block, copies in self.copies.items() if copies}
            assert self.router.held() == expected
        else:
            assert self.router.blocks.next_update() is None


EngineAndRouter.TestCase.settings = settings(
    max_examples=examples(100), stateful_step_count=20, deadline=None
)
TestBlocks = EngineAndRouter.TestCase


LONG = [bytes(24) + number.to_bytes(8, "big") for number in (11, 12)]
FULL = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
SLIDING = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window"}
IMAGE = {"extra_keys": [None, [["digest", 20]], None]}


@pytest.mark.parametrize(
    ("events", "held"),
    [
        pytest.param([stored(0, LONG), removed(12)], [0], id="hash in bytes or as a number"),
        pytest.param([stored(0, [1, 2, 3], **IMAGE), stored(3, [4], parent=3), removed(2, 4)], [0],
         id="image"),
        pytest.param([{"type": "BlockMoved", "to": "CPU"}, stored(0, [11])], [0], id="other event"),
        pytest.param([stored(0, [11, 12], **SLIDING), stored(0, [11], **FULL)], [0], id="sliding"),
        pytest.param([stored(0, [11, 12], **FULL), removed(12, group_idx=0)], [0, 1], id="group"),
        pytest.param([stored(0, [11, 12], **FULL), removed(12, group_idx=1)], [0], id="own group"),
        pytest.param([stored(0, [11], **FULL), stored(1, [12], parent=11, medium="CPU", **FULL)],
         [0], id="stored on the CPU"),
        pytest.param([stored(0, [11], **FULL), removed(11, medium="CPU", group_idx=1)], [0],
         id="removed from the CPU"),
    ],
)  # fmt: skip
def test_blocks_held_after_events(events: list[dict[str, Any]], held: list[int]) -> None:
    received = ReceivedBlocks()
    received.apply(*events)
    assert received.held() == {KEYS[number] for number in held}


def test_adapters_and_salts_change_block_keys() -> None:
    received = ReceivedBlocks()
    received.apply(
        stored(0, [1], lora_name="sql", extra_keys=[["sql"]]),
        stored(0, [2], lora_name="sql", extra_keys=[["sql", "pepper"]]),
        stored(0, [3, 4], extra_keys=[["pepper"], None]),
    )
    seeds = [("sql", ""), ("sql", "pepper"), ("", "pepper")]
    expected = [token_keys(IDS[:16], 16, seed_of(*seed))[0] for seed in seeds]
    expected.append(token_keys(IDS[:32], 16, seed_of("", "pepper"))[1])
    assert received.held() == {*map(int, expected)}


@pytest.mark.parametrize("encode", [as_maps, as_arrays])
def test_blocks_of_an_adapter_without_a_name_are_left_out(encode: Any) -> None:
    received, event = ReceivedBlocks(), stored(0, [1, 2], lora_id=1)
    del event["lora_name"]  # as in older versions of vLLM
    received.apply(event, stored(2, [3], parent=2, lora_id=1), encode=encode)
    assert received.held() == set()


def test_whole_update_follows_many_changes_and_a_long_time() -> None:
    received = ReceivedBlocks()
    assert received.held() == set()
    assert received.wholes == 1
    for _ in range(300):
        received.apply(stored(0, [11, 12]))
        received.held()
        received.apply(removed(11, 12))
        received.held()
    assert received.wholes == 7
    assert received.blocks.next_update() is None
    received.clock.advance(901)
    assert received.held() == set()
    assert received.wholes == 8


def test_reset_invalidates_earlier_updates_until_a_whole_update() -> None:
    received = ReceivedBlocks()
    received.apply(stored(0, [11, 12]))
    received.held()
    last = received.blocks.number
    assert is_up_to(last, received.blocks.number)
    received.blocks.reset(complete=True)
    assert not is_up_to(last, received.blocks.number)
    assert received.held() == set()
    assert is_up_to(received.blocks.number, last)


def test_whole_updates_are_rare_while_redis_stores_nothing_and_changes_are_sent_at_once() -> None:
    received = ReceivedBlocks()
    received.held()
    for second in range(60):
        received.blocks.resend_all(backs_off=True)
        received.clock.advance(1)
        odd = second % 2
        received.apply(removed(11) if odd else stored(0, [11]))
        assert received.held() == ({KEYS[0]} if not odd else set())
    assert received.wholes == 4
    received.blocks.resend_all()
    received.clock.advance(1)
    wholes = received.wholes
    received.held()
    assert received.wholes == wholes + 1


def test_unknown_blocks_take_no_memory() -> None:
    received = ReceivedBlocks()
    received.blocks.reset(complete=False)
    tracemalloc.start()
    try:
        for number in range(2_000):
            received.apply(stored(0, [number]) | {"token_ids": [number] * 16}, removed(number))
        now, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert now < 50_000


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(7),
        msgspec.msgpack.encode([1.5]),
        msgspec.msgpack.encode({"ts": 1}),
        as_maps([{"type": "BlockStored"}]),
        as_maps([stored(0, [1]) | {"token_ids": [1.5]}]),
        msgspec.msgpack.encode([1.5, [7]]),
        msgspec.msgpack.encode([1.5, [[]]]),
        msgspec.msgpack.encode([1.5, [[["BlockStored"]]]]),
        msgspec.msgpack.encode([1.5, [{"type": []}]]),
        b"\x91" * 5_000 + b"\xc0",
    ],
)
def test_malformed_batch_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="not a batch of KV events"):
        list(read_batch(content))


@pytest.mark.parametrize(
    "odd",
    [{"block_size": 0}, {"block_size": -1}, {"token_ids": [-5] * 16}, {"token_ids": [2**40] * 16}],
)
def test_invalid_block_sizes_and_token_ids_are_refused(odd: dict[str, Any]) -> None:
    received = ReceivedBlocks()
    with pytest.raises((OverflowError, ValueError)):
        received.apply(stored(0, [1]) | odd)


async def test_router_that_polls_by_itself_gets_forgotten_blocks_again() -> None:
    clock = ManualClock()
    fleet, blocks = fleet_of(clock, A10), KvBlocks(Random(1), clock)
    fleet.members_known.set()
    blocks.reset(complete=True)
    for number in range(3):
        blocks.apply(*read_batch(as_maps([stored(0, [number]) | {"token_ids": [number] * 16}])))
        await IntoFleet(fleet).blocks_changed(replica(2), blocks)
        if number == 0:
            fleet.drop_stale(10.0)  # forgets the blocks, because the replica has no state yet
        clock.advance(1.0)
    fleet.put(state(2, A10, clock, kv_update=blocks.number))
    assert fleet.blocks.count(replica(2)) == 3
