"""Announcements to other routers are taken once, in batches, and bounded."""

import asyncio

import numpy as np
import pytest

from extproc.fleet import announcements
from extproc.fleet.announcements import OwnerMap, PromptLog
from extproc.request.prefix import Prefix
from tests.fakes import replica
from tests.fleet.test_prefix_index import UNIT, prompt


def test_owner_map_remembers_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcements, "MAX_OWNERS", 3)
    responses = OwnerMap()
    for name in ("a", "b", "c", "a", "d"):
        responses.remember(name, replica(1))
    held = [name for name in "abcd" if responses.owner(name)]
    assert held == ["a", "c", "d"]


def test_last_owner_counts() -> None:
    responses = OwnerMap()
    responses.remember("a", replica(1))
    responses.record("a", replica(2))
    assert responses.owner("a") == replica(2)


async def test_recorded_owners_are_announced_once() -> None:
    responses = OwnerMap()
    waiting = asyncio.create_task(responses.take_announcements(2))
    await asyncio.sleep(0)
    assert not waiting.done()
    responses.remember("heard", replica(1))
    for name in ("a", "b", "c"):
        responses.record(name, replica(1))
    assert await waiting == [("a", replica(1)), ("b", replica(1))]
    assert await responses.take_announcements(2) == [("c", replica(1))]
    later = asyncio.create_task(responses.take_announcements(2))
    await asyncio.sleep(0)
    assert not later.done()
    later.cancel()


def test_prompt_log_is_taken_in_batches() -> None:
    log = PromptLog()
    for _ in range(250):
        log.add("10.0.0.1:8000", prompt("ab"))
    sizes = []
    while batch := log.take():
        sizes.append(len(batch))
    assert sizes == [100, 100, 50]
    for _ in range(5):
        log.add("10.0.0.1:8000", Prefix(np.zeros(1_250, np.uint64), UNIT, UNIT * 1_250))
    assert [len(batch) for batch in iter(log.take, ())] == [2, 2, 1], "20 kB of keys are enough"


def test_pending_prompts_take_at_most_10_mb() -> None:
    log, size = PromptLog(), 12_500
    for number in range(1_000):
        long = Prefix(np.full(size // 8, number, np.uint64), UNIT, UNIT * size / 8)
        log.add("10.0.0.1:8000", long)
    numbers = [int(sent.keys[0]) for batch in iter(log.take, ()) for sent in batch]
    assert 9_900_000 < size * len(numbers) <= 10_000_000
    assert numbers == list(range(1_000 - len(numbers), 1_000)), "the newest"
    assert not log.take()
    log.add("10.0.0.1:8000", prompt("abc"))
    assert len(log.take()) == 1


def test_announced_prompts_have_keys_unit_and_replica() -> None:
    log = PromptLog()
    log.add("10.0.0.1:8000", prompt("abc", whole=5))
    log.add("[::1]:8000", prompt("x"))
    first, last = log.take()
    assert (first.replica, last.replica) == ("10.0.0.1:8000", "[::1]:8000")
    assert list(first.keys) == list(prompt("abc").keys)
    assert (first.unit, first.whole) == (UNIT, 5)
    assert not log.take()
