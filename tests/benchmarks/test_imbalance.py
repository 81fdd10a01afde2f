"""Imbalance of a fleet: its mean over time, unequal speeds, replicas without requests."""

import pytest

from benchmarks.fleet import Stay, imbalance

EQUAL = {"a": 1.0, "b": 1.0}
TOGETHER: list[Stay] = [*[("a", 0, 1)] * 4, ("a", 1, 5), ("b", 1, 5)]
IN_TURN: list[Stay] = [("a", 0, 1), ("b", 1, 2), ("a", 2, 3), ("b", 3, 4)]
THREE_TO_ONE: list[Stay] = [*[("a", 0, 1)] * 3, ("b", 0, 1)]
CASES: dict[str, tuple[list[Stay], dict[str, float], float | None]] = {
    "evenly spread": ([("a", 0, 4), ("b", 0, 4), ("a", 9, 11), ("b", 9, 11)], EQUAL, 1),
    "moments weighted by requests": (TOGETHER, EQUAL, (2 * 4 + 1 * 8) / 12),
    "even over time, but at no moment": (IN_TURN, EQUAL, 2),
    "fast replica with a larger share": (THREE_TO_ONE, {"a": 3.0, "b": 1.0}, 1),
    "equal replicas with equal shares": (THREE_TO_ONE, EQUAL, 1.5),
    "replica without requests": ([("a", 0, 1)], {**EQUAL, "c": 2.0}, 4),
    "no requests": ([], EQUAL, None),
    "unknown replica": ([("elsewhere", 0, 1)], EQUAL, None),
}


@pytest.mark.parametrize("case", CASES)
def test_imbalance_is_the_load_of_the_busiest_replica_for_its_speed(case: str) -> None:
    stays, speeds, expected = CASES[case]
    assert imbalance(stays, speeds) == (expected and pytest.approx(expected))
