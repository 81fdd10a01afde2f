"""The forecast of adapter slots follows the requests in flight as polls correct them."""

from dataclasses import replace
from typing import Any

import pytest

from tests.fakes import MODEL, ManualClock, chat, fleet_of, replica, state

A10 = "llama-8b-a10"
ADAPTERS: dict[str, Any] = {
    "models": (MODEL, "first", "second"),
    "adapters": ("first", "second"),
    "max_loras": 1,
}


def test_poll_of_a_slow_replica_extends_the_wait_for_an_adapter_slot(clock: ManualClock) -> None:
    fleet = fleet_of(clock)
    fleet.put(state(1, A10, clock, **ADAPTERS))
    profile = replace(chat(100, 1000), model="first", least_output=1000)
    fleet.first_token(fleet.dispatch(replica(1), profile))
    clock.advance(10.0)
    fleet.put(state(1, A10, clock, running=1, steps=100, adapters_in_use=("first",), **ADAPTERS))
    view = fleet.view("second")
    times = fleet.adapter_times(view)
    assert times is not None
    assert times.wait[0] == pytest.approx(900 * view.decode_step[0], rel=0.02)
