import asyncio

import pytest

from extproc.fleet import announcements
from extproc.fleet.announcements import OwnerMap
from tests.fakes import replica


def test_the_newest_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcements, "MAX_OWNERS", 3)
    responses = OwnerMap()
    for name in ("a", "b", "c", "a", "d"):
        responses.remember(name, replica(1))
    held = [name for name in "abcd" if responses.owner(name)]
    assert held == ["a", "c", "d"]


def test_the_last_word_counts() -> None:
    responses = OwnerMap()
    responses.remember("a", replica(1))
    responses.record("a", replica(2))
    assert responses.owner("a") == replica(2)


async def test_what_was_seen_is_told_once_and_what_was_heard_is_not() -> None:
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
