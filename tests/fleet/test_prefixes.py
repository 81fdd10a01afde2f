"""What replicas should hold of a prompt, by what was sent there."""

from random import Random

import numpy as np
import pytest

from extproc.fleet import sent
from extproc.fleet.prefixes import Prefixes
from extproc.fleet.sent import SentPrompts
from extproc.request.prefix import UNIT_BYTES, Prefix, unit_keys

ROWS = np.arange(3)
UNIT = 64.0
ROOM = 1000 * UNIT


def prompt(text: str, whole: int = 0, asked: int = 0, answered: float = 0.0) -> Prefix:
    """A letter is a unit."""
    data = "".join(letter * UNIT_BYTES for letter in text).encode()
    return Prefix(unit_keys(data, 1), UNIT, whole, asked, answered)


@pytest.fixture
def prefixes() -> Prefixes:
    index = Prefixes()
    for row in ROWS:
        index.clear(int(row))
    return index


def units(prefixes: Prefixes, text: str) -> list[float]:
    return list(prefixes.held(prompt(text), ROWS).expected / UNIT)


def test_of_each_replica_the_beginning_it_was_sent(prefixes: Prefixes) -> None:
    prefixes.enter(0, prompt("abcd"), ROOM)
    prefixes.enter(2, prompt("abx"), ROOM)
    assert units(prefixes, "abcde") == [4, 0, 2]
    assert units(prefixes, "abxy") == [2, 0, 3]
    assert units(prefixes, "bcd") == [0, 0, 0]
    assert units(prefixes, "") == [0, 0, 0]


def test_of_some_replicas_in_their_order(prefixes: Prefixes) -> None:
    prefixes.enter(2, prompt("ab"), ROOM)
    assert list(prefixes.held(prompt("ab"), np.array([0, 2])).expected) == [0, 2 * UNIT]
    assert list(prefixes.held(prompt("ab"), np.array([0, 1])).expected) == [0, 0]


def test_the_end_of_what_was_sent_the_longest_ago_goes_first(prefixes: Prefixes) -> None:
    prefixes.enter(0, prompt("abcd"), 6 * UNIT)
    prefixes.enter(0, prompt("xyz"), 6 * UNIT)
    assert units(prefixes, "abcd")[0] == 3
    prefixes.enter(0, prompt("ab"), 6 * UNIT)
    prefixes.enter(0, prompt("uvw"), 6 * UNIT)
    assert [units(prefixes, text)[0] for text in ("abcd", "xyz", "uvw")] == [2, 1, 3]


def test_one_that_starts_anew_holds_nothing(prefixes: Prefixes) -> None:
    for row in (0, 1):
        prefixes.enter(row, prompt("ab"), ROOM)
    prefixes.clear(0)
    assert units(prefixes, "ab") == [0, 2, 0]


def test_who_gave_the_last_answer_holds_it(prefixes: Prefixes) -> None:
    prefixes.enter(0, prompt("ab", whole=77), ROOM)
    prefixes.enter(1, prompt("ab", whole=78), ROOM)
    following = prompt("abcd", asked=77, answered=230.0)
    assert list(prefixes.held(following, ROWS).expected) == [230.0, 2 * UNIT, 0]


def test_it_holds_no_more_than_there_is_room_for(prefixes: Prefixes) -> None:
    """And forgets as it goes, whatever is sent."""
    random = Random(1)
    for _ in range(500):
        text = "".join(random.choices("abcd", k=random.randrange(1, 12)))
        prefixes.enter(random.randrange(3), prompt(text), 20 * UNIT)
    most = [sum(units(prefixes, letter)[row] for letter in "abcd") for row in range(3)]
    assert 0 < max(most) <= 20
    for row in range(3):
        prefixes.clear(row)
    assert not any(sum(units(prefixes, letter)) for letter in "abcd")


def test_another_router_hears_what_was_sent() -> None:
    told = SentPrompts()
    told.add("10.0.0.1:8000", prompt("abc", whole=5))
    told.add("10.0.0.2:8000", prompt(""))
    told.add("[::1]:8000", prompt("x"))
    heard = sent.read(told.take())
    assert [replica for replica, _ in heard] == ["10.0.0.1:8000", "[::1]:8000"]
    assert list(heard[0][1].keys) == list(prompt("abc").keys)
    assert (heard[0][1].unit, heard[0][1].whole) == (UNIT, 5)
    assert not told.take()


@pytest.mark.parametrize("cut", [1, 20, 40])
def test_what_is_cut_short_is_refused(cut: int) -> None:
    told = SentPrompts()
    told.add("10.0.0.1:8000", prompt("abc"))
    with pytest.raises(ValueError, match=r"cut short|smaller"):
        sent.read(told.take()[:-cut])
