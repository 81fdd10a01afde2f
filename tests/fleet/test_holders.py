import asyncio

import pytest

from extproc.fleet import announcements
from extproc.fleet.announcements import Holders
from tests.fakes import replica


def test_the_newest_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcements, "MOST_HELD", 3)
    responses = Holders()
    for name in ("a", "b", "c", "a", "d"):
        responses.keep(name, replica(1))
    held = [name for name in "abcd" if responses.holder(name)]
    assert held == ["a", "c", "d"]


def test_the_last_word_counts() -> None:
    responses = Holders()
    responses.keep("a", replica(1))
    responses.saw("a", replica(2))
    assert responses.holder("a") == replica(2)


async def test_what_was_seen_is_told_once_and_what_was_heard_is_not() -> None:
    responses = Holders()
    waiting = asyncio.create_task(responses.untold(2))
    await asyncio.sleep(0)
    assert not waiting.done()
    responses.keep("heard", replica(1))
    for name in ("a", "b", "c"):
        responses.saw(name, replica(1))
    assert await waiting == [("a", replica(1)), ("b", replica(1))]
    assert await responses.untold(2) == [("c", replica(1))]
    later = asyncio.create_task(responses.untold(2))
    await asyncio.sleep(0)
    assert not later.done()
    later.cancel()
