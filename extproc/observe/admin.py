"""The HTTP server that people and Prometheus look at."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from extproc.address import join_address, split_address

Check = Callable[[], str]
"""Why something is not as it should be, in a few words; empty: it is."""


def _well() -> str:
    return ""


@asynccontextmanager
async def serve_admin(
    address: str,
    registry: CollectorRegistry,
    routes: Sequence[web.RouteDef] = (),
    live: Check = _well,
    ready: Check = _well,
) -> AsyncIterator[str]:
    """Serve metrics, health and ``routes``; yields the address, for a port of 0 too.

    Args:
        address: ``host:port``.
        registry: what ``/metrics`` shows.
        routes: what is served beside.
        live: what ``/livez`` and ``/healthz`` say: whoever is not is to be started again.
        ready: what ``/readyz`` says: whoever is not should get no work for now.

    Raises:
        OSError: the address is taken, or is not one of this machine.
        ValueError: it is not ``host:port``.
    """

    async def metrics(_: web.Request) -> web.Response:
        page = generate_latest(registry)
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_LATEST})

    host, port = split_address(address)
    app = web.Application()
    app.add_routes([web.get("/metrics", metrics), web.get("/readyz", _answering(ready)), *routes])
    app.add_routes([web.get(path, _answering(live)) for path in ("/livez", "/healthz")])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        bound_host, bound_port, *_ = runner.addresses[0]
        yield join_address(bound_host, bound_port)
    finally:
        await runner.cleanup()


def _answering(check: Check) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(_: web.Request) -> web.Response:
        why = check()
        return web.Response(text=f"{why or 'ok'}\n", status=503 if why else 200)

    return answer
