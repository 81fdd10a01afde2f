"""The HTTP server that people and Prometheus look at."""

from collections.abc import AsyncIterator, Awaitable, Callable, Container, Sequence
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from extproc.address import join_address, split_address
from extproc.config import AdminSettings
from extproc.observe.token import Token
from extproc.tls.context import server_context

_OPEN = AdminSettings()
"""To everybody who reaches the port."""
Check = Callable[[], str]
"""Why something is not as it should be, in a few words; empty: it is."""


def _well() -> str:
    return ""


@asynccontextmanager
async def serve_admin(
    address: str,
    registry: CollectorRegistry,
    routes: Sequence[web.RouteDef] = (),
    public: Sequence[web.RouteDef] = (),
    access: AdminSettings = _OPEN,
    live: Check = _well,
    ready: Check = _well,
) -> AsyncIterator[str]:
    """Serve metrics, health and ``routes``; yields the address, for a port of 0 too.

    Args:
        address: ``host:port``.
        registry: what ``/metrics`` shows.
        routes: what is served beside.
        public: what is served to those without the token, too, as health is.
        access: TLS, and the token.
        live: what ``/livez`` and ``/healthz`` say: whoever is not is to be started again.
        ready: what ``/readyz`` says: whoever is not should get no work for now.

    Raises:
        OSError: the address is taken, or is not one of this machine.
        ValueError: it is not ``host:port``, or a file of ``access`` cannot be used.
    """

    async def metrics(_: web.Request) -> web.Response:
        page = generate_latest(registry)
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_LATEST})

    host, port = split_address(address)
    health = [web.get(path, _answering(live)) for path in ("/livez", "/healthz")]
    health.append(web.get("/readyz", _answering(ready)))
    context = server_context(access, "admin")
    app = web.Application()
    if access.token_file is not None:
        open_to_all = {route.path for route in (*health, *public)}
        app.middlewares.append(_asking_for(Token(access.token_file), open_to_all))
    app.add_routes([web.get("/metrics", metrics), *health, *public, *routes])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, ssl_context=context).start()
        bound_host, bound_port, *_ = runner.addresses[0]
        yield join_address(bound_host, bound_port)
    finally:
        await runner.cleanup()


def _asking_for(token: Token, open_to_all: Container[str]) -> Middleware:
    @web.middleware
    async def asking(request: web.Request, handler: Handler) -> web.StreamResponse:
        shown = request.headers.get("Authorization", "")
        if request.path in open_to_all or token.is_in(shown):
            return await handler(request)
        raise web.HTTPUnauthorized(
            text="show the token (admin.token_file): Authorization: Bearer ...\n",
            headers={"WWW-Authenticate": "Bearer"},
        )

    return asking


def _answering(check: Check) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(_: web.Request) -> web.Response:
        why = check()
        return web.Response(text=f"{why or 'ok'}\n", status=503 if why else 200)

    return answer
