import asyncio

import pytest

from extproc.fleet import announcements
from extproc.fleet.announcements import OwnerMap
from tests.fakes import replica


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
