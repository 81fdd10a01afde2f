"""The prefix index expects hits by the prompts sent to a replica, and learns from reports."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from extproc.fleet.prefix_index import PrefixIndex
from extproc.fleet.tables import Replicas
from extproc.replica_state import ReplicaState
from extproc.request.prefix import NO_PREFIX, UNIT_BYTES, Prefix, unit_keys

ROWS = np.arange(3)
UNIT = 64.0
ROOM = 1000 * UNIT


def prompt(text: str, whole: int = 0, asked: int = 0, answered: float = 0.0) -> Prefix:
    """Prompt with a unit for each letter."""
    data = "".join(letter * UNIT_BYTES for letter in text).encode()
    return Prefix(unit_keys(data, 1), UNIT, UNIT * len(text), whole, asked, answered)


@pytest.fixture
def table() -> Replicas:
    table = Replicas()
    for _ in ROWS:
        table.append()
    table.block_size[:] = 1.0
    return table


@pytest.fixture
def prefixes(table: Replicas) -> PrefixIndex:
    index = PrefixIndex(table)
    for row in ROWS:
        index.clear(int(row))
    return index


def units(prefixes: PrefixIndex, text: str) -> list[float]:
    return list(prefixes.hits(prompt(text), ROWS).expected / UNIT)


def test_each_replica_holds_the_beginnings_it_was_sent(prefixes: PrefixIndex) -> None:
    prefixes.enter(0, prompt("abcd"), ROOM)
    prefixes.enter(2, prompt("abx"), ROOM)
    assert units(prefixes, "abcde") == [4, 0, 2]
    assert units(prefixes, "abxy") == [2, 0, 3]
    assert units(prefixes, "bcd") == [0, 0, 0]
    assert units(prefixes, "") == [0, 0, 0]


def test_hits_follow_the_order_of_the_rows(prefixes: PrefixIndex) -> None:
    prefixes.enter(2, prompt("ab"), ROOM)
    assert list(prefixes.hits(prompt("ab"), np.array([0, 2])).expected) == [0, 2 * UNIT]
    assert list(prefixes.hits(prompt("ab"), np.array([0, 1])).expected) == [0, 0]


def test_models_on_the_same_rows_share_the_places_of_a_prompt(
    prefixes: PrefixIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefixes.enter(2, prompt("ab"), ROOM)
    expected = units(prefixes, "ab")
    monkeypatch.delattr(np, "unpackbits")  # computes the places
    assert list(prefixes.hits(prompt("ab"), ROWS.copy()).expected / UNIT) == expected


def test_end_of_the_oldest_prompt_is_evicted_first(prefixes: PrefixIndex) -> None:
    prefixes.enter(0, prompt("abcd"), 6 * UNIT)
    prefixes.enter(0, prompt("xyz"), 6 * UNIT)
    assert units(prefixes, "abcd")[0] == 3
    prefixes.enter(0, prompt("ab"), 6 * UNIT)
    prefixes.enter(0, prompt("uvw"), 6 * UNIT)
    assert [units(prefixes, text)[0] for text in ("abcd", "xyz", "uvw")] == [2, 1, 3]


def test_restarted_replica_holds_nothing(prefixes: PrefixIndex) -> None:
    for row in (0, 1):
        prefixes.enter(row, prompt("ab"), ROOM)
    prefixes.clear(0)
    assert units(prefixes, "ab") == [0, 2, 0]


def test_replica_that_answered_holds_the_answer(prefixes: PrefixIndex) -> None:
    prefixes.enter(0, prompt("ab", whole=77), ROOM)
    prefixes.enter(1, prompt("ab", whole=78), ROOM)
    following = prompt("abcd", asked=77, answered=230.0)
    assert list(prefixes.hits(following, ROWS).expected) == [230.0, 2 * UNIT, 0]


def test_repeated_turn_is_held_whole(prefixes: PrefixIndex) -> None:
    for text, whole in (("ab", 77), ("abcd", 0)):
        prefixes.enter(0, prompt(text, whole), ROOM)
    again = prompt("abcd", asked=77, answered=3 * UNIT)
    assert prefixes.hits(again, ROWS).expected[0] == 4 * UNIT


def test_replica_holds_no_more_than_its_capacity(prefixes: PrefixIndex) -> None:
    random = Random(1)
    for _ in range(500):
        text = "".join(random.choices("abcd", k=random.randrange(1, 12)))
        prefixes.enter(random.randrange(3), prompt(text), 20 * UNIT)
    most = [sum(units(prefixes, letter)[row] for letter in "abcd") for row in range(3)]
    assert 0 < max(most) <= 20
    for row in range(3):
        prefixes.clear(row)
    assert not any(sum(units(prefixes, letter)) for letter in "abcd")


def test_hits_are_whole_blocks(prefixes: PrefixIndex, table: Replicas) -> None:
    table.block_size[0] = 100.0
    prefixes.enter(0, prompt("abcd"), ROOM)
    assert list(prefixes.hits(prompt("abcd"), ROWS).expected) == [200, 0, 0]


def believed(prefixes: PrefixIndex, text: str) -> float:
    held = prefixes.hits(prompt(text), ROWS)
    return float(held.cached[0] / held.expected[0])


def test_prompts_that_share_only_a_later_key_are_harmless(prefixes: PrefixIndex) -> None:
    prefixes.enter(0, prompt("abcd"), ROOM)
    held, another = prompt("abcd"), prompt("vwxyz")
    another.keys[2] = held.keys[2]
    prefixes.enter(0, another, ROOM)
    another.keys[0] = held.keys[0]
    another.keys[3] = 1
    assert prefixes.hits(another, ROWS).expected[0] >= UNIT


def test_reports_of_few_hits_lower_the_cached_tokens(prefixes: PrefixIndex) -> None:
    prefixes.enter(0, prompt("abcd" * 10), ROOM)
    assert believed(prefixes, "abcd" * 10) == 1
    held = prefixes.hits(prompt("abcd" * 10), ROWS)
    for _ in range(50):
        prefixes.reported(0, held.expected[0], 2560, 0.0)
    assert believed(prefixes, "abcd" * 10) < 0.1
    for _ in range(60):
        prefixes.reported(0, held.expected[0], 2560, held.expected[0])
    assert believed(prefixes, "abcd" * 10) > 0.9
    prefixes.clear(0)
    prefixes.enter(0, prompt("abcd" * 10), ROOM)
    assert believed(prefixes, "abcd" * 10) == 1


@pytest.mark.parametrize(("found", "counted"), [(0.5, 1.0), (0.25, 1.0), (0.1, 0.5)])
def test_fifth_of_the_expected_hits_keeps_full_trust(
    found: float, counted: float, prefixes: PrefixIndex
) -> None:
    text, tokens = "abcd" * 10, 40 * UNIT
    prefixes.enter(0, prompt(text), ROOM)
    for _ in range(200):
        prefixes.reported(0, tokens, tokens, found * tokens)
    assert believed(prefixes, text) == pytest.approx(counted, rel=0.1)


def polled(prefixes: PrefixIndex, prompts: float, cached: float) -> None:
    prefixes.polled(0, ReplicaState(id="r", prompt_tokens=prompts, cached_tokens=cached))


def test_counters_teach_hits_if_responses_report_none(prefixes: PrefixIndex) -> None:
    """First the replica caches nothing, and later everything."""
    text, tokens = "abcd" * 8, 32 * UNIT
    polled(prefixes, 0, 0)
    for number in range(1, 31):
        prefixes.enter(0, prompt(text), ROOM)
        polled(prefixes, number * tokens, 0)
    assert believed(prefixes, text) < 0.2
    for number in range(31, 90):
        prefixes.enter(0, prompt(text), ROOM)
        polled(prefixes, number * tokens, (number - 30) * tokens)
    assert believed(prefixes, text) > 0.9


def test_single_reporting_response_leaves_the_counters_in_use(prefixes: PrefixIndex) -> None:
    """Answers of /v1/responses always report hits; chats do so only with a flag of the server."""
    text, tokens = "abcd" * 8, 32 * UNIT
    polled(prefixes, 0, 0)
    prefixes.reported(0, 0, 100, 0)
    for number in range(1, 31):
        prefixes.enter(0, prompt(text), ROOM)
        polled(prefixes, number * tokens, 0)
    assert believed(prefixes, text) < 0.2


def test_count_of_cached_tokens_that_fell_is_no_negative_hit(prefixes: PrefixIndex) -> None:
    """The process restarted, and made more steps than before until the next poll."""
    polled(prefixes, 0, 1e6)
    for _ in range(2):
        prefixes.enter(0, prompt("abcd"), ROOM)
    polled(prefixes, 20_000, 0)
    assert believed(prefixes, "abcd") > 0.0


def test_prompts_without_keys_are_no_misses(prefixes: PrefixIndex) -> None:
    text, tokens = "abcd" * 8, 32 * UNIT
    unknown = replace(NO_PREFIX, tokens=tokens)
    polled(prefixes, 0, 0)
    for number in range(1, 40):
        prefixes.enter(0, prompt(text), ROOM)
        prefixes.enter(0, unknown, ROOM)
        polled(prefixes, 2 * number * tokens, (number - 1) * tokens)
    assert believed(prefixes, text) > 0.9


def test_reported_surplus_does_not_outweigh_later_misses(prefixes: PrefixIndex) -> None:
    prefixes.enter(0, prompt("abcd" * 10), ROOM)
    for _ in range(10):
        prefixes.reported(0, 64, 100_000, 100_000)
    for _ in range(16):
        prefixes.reported(0, 2560, 2560, 0)
    assert believed(prefixes, "abcd" * 10) < 0.5


def test_prompt_with_a_huge_unit_evicts_nothing(prefixes: PrefixIndex) -> None:
    """A unit of 256 bytes has 1,300 tokens if the prompt consists of empty messages."""
    for number in range(20):
        prefixes.enter(0, prompt(f"{number:04d}" * 5), 2000 * UNIT)
    prefixes.enter(0, Prefix(unit_keys(b"?" * UNIT_BYTES, 1), 1300.0, 1300.0), 2000 * UNIT)
    assert units(prefixes, "0003" * 5)[0] == 20


def test_prompt_without_tokens_enters_nothing(prefixes: PrefixIndex) -> None:
    prefixes.enter(0, replace(prompt("ab"), unit=0.0, tokens=0.0), ROOM)
    assert units(prefixes, "ab") == [0, 0, 0]
