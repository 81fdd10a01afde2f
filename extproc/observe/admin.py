"""The HTTP server that people and Prometheus look at."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from extproc.address import join_address, split_address


@asynccontextmanager
async def serve_admin(
    address: str, registry: CollectorRegistry, routes: Sequence[web.RouteDef] = ()
) -> AsyncIterator[str]:
    """Serve ``/metrics``, ``/healthz`` and ``routes``; yields the address, for a port of 0 too.

    Raises:
        OSError: the address is taken, or is not one of this machine.
        ValueError: it is not ``host:port``.
    """

    async def metrics(_: web.Request) -> web.Response:
        page = generate_latest(registry)
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    host, port = split_address(address)
    app = web.Application()
    app.add_routes([web.get("/metrics", metrics), web.get("/healthz", healthz), *routes])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        bound_host, bound_port, *_ = runner.addresses[0]
        yield join_address(bound_host, bound_port)
    finally:
        await runner.cleanup()
