"""Prefix cache hits from KV blocks that replicas report."""

from collections import deque
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from extproc.fleet.fleet import Fleet
from extproc.fleet.held_blocks import LATE_S, NUMBERS, BlockUpdate
from extproc.fleet.members import ModelNames
from extproc.predict.lengths import OutputLengths
from extproc.request.endpoint import Endpoint
from extproc.request.prefix import NO_PREFIX, Prefix, seed_of, token_keys
from extproc.request.profile import RequestProfile
from tests.fakes import A10, MODEL, ManualClock, replica, state

IDS = np.arange(1000, 1321, dtype=np.uint32)
PREFIX = Prefix(NO_PREFIX.keys, 64.0, 0.0, ids=IDS)  # twenty blocks and a token
FIRST = 7 * NUMBERS


def keys(blocks: int, salt: str = "") -> list[int]:
    return [int(key) for key in token_keys(IDS, 16, seed_of("", salt))[:blocks]]


class ReportingFleet:
    """Fleet of three replicas, of which the first two report their blocks."""

    def __init__(self, names: ModelNames | None = None) -> None:
        self.clock = ManualClock()
        self.fleet = Fleet(OutputLengths(), self.clock, self.clock, names)
        self.numbers = {1: FIRST, 2: FIRST + NUMBERS}
        self.poll()
        for number in self.numbers:
            self.report(number, whole=True)
        self.poll()

    def poll(self, reporting: Collection[int] = (1, 2)) -> None:
        for number in (1, 2, 3):
            self.put(number, number in reporting)

    def put(self, number: int, reports: bool = True, **figures: Any) -> None:
        if reports:
            figures["kv_update"] = self.numbers[number]
        self.fleet.put(state(number, A10, self.clock, kv_tokens=100_000, **figures))

    def send(self, number: int, prefix: Prefix = PREFIX, model: str = MODEL) -> None:
        profile = RequestProfile(Endpoint.COMPLETIONS, model, 321, 0, 10, prefix=prefix)
        self.fleet.dispatch(replica(number), profile)

    def report(
        self,
        number: int,
        stored: Sequence[int] = (),
        removed: Sequence[int] = (),
        whole: bool = False,
        lost: bool = False,
    ) -> None:
        previous = 0 if whole else self.numbers[number]
        self.numbers[number] += 1
        arrays = (np.array(some, np.uint64) for some in (stored, removed))
        update = BlockUpdate(self.numbers[number], previous, 16, *arrays)
        if not lost and self.fleet.blocks.follows(replica(number), update):
            deque(self.fleet.blocks.apply(replica(number), update))

    def hits(self, prefix: Prefix = PREFIX) -> list[float]:
        view = self.fleet.view(MODEL)
        assert view.ids == [replica(number) for number in (1, 2, 3)]
        return [float(tokens) for tokens in self.fleet.prefix_hits(prefix, view).cached]


@pytest.fixture
def pool() -> ReportingFleet:
    return ReportingFleet()


def test_hits_end_at_the_first_missing_block(pool: ReportingFleet) -> None:
    assert pool.hits() == [0, 0, 0]
    pool.report(1, keys(20))
    pool.report(2, keys(5))
    assert pool.hits() == [320, 80, 0]
    pool.report(1, removed=keys(20)[3:])
    assert pool.hits() == [48, 80, 0]
    pool.report(2, whole=True, stored=keys(2))
    assert pool.hits() == [48, 32, 0]


def test_last_token_and_other_salts_are_no_hits(pool: ReportingFleet) -> None:
    pool.report(1, keys(20))
    pool.report(2, keys(3, "pepper"))
    assert pool.hits(Prefix(NO_PREFIX.keys, 64.0, 0.0, ids=IDS[:320])) == [304, 0, 0]
    assert pool.hits(Prefix(NO_PREFIX.keys, 64.0, 0.0, ids=IDS, salt="pepper")) == [0, 48, 0]


def test_blocks_of_an_adapter_are_no_hits_for_the_model(pool: ReportingFleet) -> None:
    pool.report(1, keys(20))
    pool.report(2, [int(key) for key in token_keys(IDS, 16, seed_of("sql", ""))[:3]])
    for number in pool.numbers:
        pool.put(number, models=(MODEL, "sql"), adapters=("sql",), max_loras=1)
    view = pool.fleet.view("sql")
    assert pool.fleet.prefix_hits(PREFIX, view).cached.tolist() == [0, 48]
    assert pool.hits() == [320, 0, 0]


def test_adapter_blocks_are_found_under_each_replicas_name() -> None:
    pool = ReportingFleet(ModelNames({"sql": ("sql-1", "sql-2")}))
    for number in pool.numbers:
        name = f"sql-{number}"
        pool.report(number, keys(20))
        own = token_keys(IDS, 16, seed_of(name, ""))[:number]
        pool.report(number, [int(key) for key in own])
        pool.put(number, models=(MODEL, name), adapters=(name,), max_loras=1)
    view = pool.fleet.view("sql")
    assert pool.fleet.prefix_hits(PREFIX, view).cached.tolist() == [16, 32]
    pool.send(2, model="sql")
    assert pool.fleet.prefix_hits(PREFIX, view).cached.tolist() == [16, 320]


def test_sent_blocks_count_until_the_report_is_overdue(pool: ReportingFleet) -> None:
    pool.send(1)
    assert pool.hits() == [320, 0, 0]
    pool.report(1, keys(4))
    pool.clock.advance(11)
    pool.poll()
    assert pool.hits() == [64, 0, 0]


@pytest.mark.parametrize("wrong", ["silent", "late", "lost"])
def test_late_replica_is_estimated(pool: ReportingFleet, wrong: str) -> None:
    pool.report(1, keys(20))
    pool.report(2, keys(20))
    pool.poll()
    assert pool.fleet.blocks.count_known() == 2
    if wrong == "silent":  # the poller gets no events
        pool.poll(reporting=[2])
    elif wrong == "late":  # no polls arrive
        pool.clock.advance(LATE_S + 0.1)
    else:  # an update was lost
        pool.report(1, removed=keys(20), lost=True)
        pool.report(1, stored=keys(20)[:1])
        pool.clock.advance(LATE_S + 0.1)
        pool.poll()
    expected = [0, 0, 0] if wrong == "late" else [0, 320, 0]
    assert pool.hits() == expected
    known = sum(tokens > 0 for tokens in expected)
    assert pool.fleet.blocks.count_known() == known
    pool.report(1, stored=keys(2), whole=True)
    pool.poll()
    assert pool.hits()[0] == 32
    assert pool.fleet.blocks.count_known() == 2


def test_hits_known_from_events_teach_the_index_nothing(pool: ReportingFleet) -> None:
    units = np.arange(1, 6, dtype=np.uint64)
    of_text = Prefix(units, 64.0, 64.0 * len(units))
    pool.send(1, of_text)
    before = pool.hits(of_text)
    assert before[0] > 0
    pool.report(1, keys(20))
    for _ in range(20):
        held = pool.fleet.prefix_hits(
            Prefix(units, 64.0, 64.0 * len(units), ids=IDS), pool.fleet.view(MODEL)
        )
        assert not held.estimated[0]
    assert pool.hits(of_text) == before


def test_removed_replica_loses_its_blocks(pool: ReportingFleet) -> None:
    pool.report(1, keys(20))
    pool.fleet.remove(replica(1))
    pool.report(2, keys(1))
    pool.poll()
    assert pool.hits() == [0, 16, 0]


def test_blocks_of_no_member_are_dropped_once_members_are_known(pool: ReportingFleet) -> None:
    for number in (5, 6):
        pool.numbers[number] = (20 + number) * NUMBERS
        pool.report(number, keys(3), whole=True)
    pool.fleet.drop_stale(10)  # the members are not known yet
    pool.put(5)
    assert pool.fleet.blocks.count(replica(5)) == 3
    pool.fleet.members_known.set()
    pool.fleet.drop_stale(10)
    pool.put(6)
    assert pool.fleet.blocks.count(replica(5)) == 3
    assert pool.fleet.blocks.count(replica(6)) is None


def test_removed_block_ends_the_hits_of_a_sent_prompt(pool: ReportingFleet) -> None:
    pool.report(1, keys(10))
    pool.send(1)
    assert pool.hits() == [320, 0, 0]
    pool.report(1, removed=[keys(20)[5]])
    assert pool.hits() == [80, 0, 0]


def whole(number: int, stored: range) -> BlockUpdate:
    return BlockUpdate(number, 0, 16, np.array(stored, np.uint64), np.zeros(0, np.uint64))


def test_replica_forgotten_within_an_update_leaves_no_blocks(pool: ReportingFleet) -> None:
    steps = pool.fleet.blocks.apply(replica(1), whole(1, range(10_000)))
    next(steps)
    pool.fleet.blocks.forget(replica(1))
    deque(steps)
    assert pool.fleet.blocks.count(replica(1)) is None
    pool.poll()
    assert not pool.fleet.blocks._bitmaps


def test_blocks_of_a_replica_that_left_are_cleared_in_parts(pool: ReportingFleet) -> None:
    """A replica may have a million blocks, which would block the router for 0.7 s."""
    pool.report(1, [*range(10_000)])
    pool.report(2, [*range(5_000, 15_000)])
    bitmaps, held = pool.fleet.blocks._bitmaps, [10_000]
    pool.fleet.remove(replica(1))
    while held[-1]:
        held.append(sum(bitmap & 1 for bitmap in bitmaps.values()))
        pool.fleet.put(state(3, A10, pool.clock))
    assert max(before - after for before, after in pairwise(held)) <= 2048
    assert len(bitmaps) == 10_000
