import pytest

from benchmarks.fleet import imbalance

ALIKE = {"a": 1.0, "b": 1.0}


def test_evenly_spread_requests_are_balanced() -> None:
    assert imbalance([("a", 0, 4), ("b", 0, 4), ("a", 10, 11), ("b", 10, 11)], ALIKE) == 1


def test_a_moment_counts_by_the_requests_there_are() -> None:
    """Four requests are on one of two replicas for 1 s; then each has one for 4 s."""
    stays = [("a", 0.0, 1.0)] * 4 + [("a", 1.0, 5.0), ("b", 1.0, 5.0)]
    assert imbalance(stays, ALIKE) == pytest.approx((2 * 4 + 1 * 8) / 12)


def test_what_is_even_over_time_is_not_at_any_moment() -> None:
    assert imbalance([("a", 0, 1), ("b", 1, 2), ("a", 2, 3), ("b", 3, 4)], ALIKE) == 2


def test_a_fast_replica_has_a_larger_share() -> None:
    stays = [("fast", 0, 1)] * 3 + [("slow", 0, 1)]
    assert imbalance(stays, {"fast": 3.0, "slow": 1.0}) == 1
    assert imbalance(stays, {"fast": 1.0, "slow": 1.0}) == 1.5


def test_a_replica_without_requests_has_a_share() -> None:
    assert imbalance([("a", 0, 1)], {**ALIKE, "c": 2.0}) == 4


def test_without_a_known_replica_there_is_none() -> None:
    assert imbalance([], ALIKE) is None
    assert imbalance([("elsewhere", 0, 1)], ALIKE) is None
