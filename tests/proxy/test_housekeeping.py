"""Figures that a router updates every second."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from extproc.proxy.housekeeping import Housekeeping
from tests.proxy.conftest import config_of, put_replicas, router_of, samples


@pytest.mark.parametrize(
    ("serve", "external"),
    [({}, {("default",): 3.0}), ({"mode": "observe"}, {}), ({"share": 0.5}, {})],
)
async def test_external_load_is_a_figure_of_routers_that_route_every_request(
    serve: dict[str, Any], external: dict[tuple[str, ...], float]
) -> None:
    services = router_of(config_of(serve=serve))
    for later in (1.0, 2.0):  # load counts from the second poll on
        put_replicas(services, 1, running=3, steps=later, scraped_at=services.wall() + later)
    with suppress(TimeoutError):
        async with asyncio.timeout(0.0):  # one pass, until the first wait
            await Housekeeping([services]).run()
    assert samples(services.metrics.external_requests) == external
