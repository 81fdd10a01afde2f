"""Fleets that a test polls, on a clock that the test moves."""

from typing import Any

import pytest

from extproc.fleet.fleet import Fleet
from extproc.predict.lengths import OutputLengths
from tests.fakes import A10, ManualClock, state


class PolledFleet(Fleet):
    """Idle replicas ``10.0.0.1:8000``, … with the same hardware profile."""

    def __init__(self, count: int, profile: str = A10) -> None:
        self.clock = ManualClock(1000.0)
        super().__init__(OutputLengths(), self.clock, wall=self.clock)
        self._profile = profile
        for number in range(1, count + 1):
            self.poll(number)

    def poll(self, number: int, /, **figures: Any) -> None:
        """Puts the state of a replica, scraped now."""
        self.put(state(number, self._profile, self.clock, **figures))


@pytest.fixture
def fleet() -> PolledFleet:
    return PolledFleet(1)


@pytest.fixture
def pair() -> PolledFleet:
    return PolledFleet(2)
