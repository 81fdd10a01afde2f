"""Fleets of one or two A10 replicas."""

import pytest

from extproc.fleet.fleet import Fleet
from tests.fakes import A10, ManualClock, fleet_of


@pytest.fixture
def fleet(clock: ManualClock) -> Fleet:
    return fleet_of(clock, A10)


@pytest.fixture
def pair(clock: ManualClock) -> Fleet:
    return fleet_of(clock, A10, A10)
