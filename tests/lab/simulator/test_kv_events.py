"""KV events of a simulated replica beside those that tests/e2e/test_kv_events.py reads."""

from dataclasses import replace

import pytest

from extproc.lab.harness.processes import free_port
from extproc.lab.simulator.replica import Replica
from extproc.lab.simulator.server import serving
from tests.lab.simulator.conftest import SETTINGS

PUBLISHING = replace(SETTINGS, kv_events_ports=(free_port(), free_port()))


async def test_sleep_publishes_that_all_blocks_are_cleared() -> None:
    engine = Replica(PUBLISHING).engine
    assert engine.events is not None
    engine.sleep(1)
    assert await engine.events.take() == [{"type": "AllBlocksCleared"}]


async def test_taken_events_port_is_an_error() -> None:
    async with serving(Replica(PUBLISHING), "127.0.0.1", 0):
        with pytest.raises(OSError, match="for KV events: Address"):
            async with serving(Replica(PUBLISHING), "127.0.0.1", 0):
                pass
