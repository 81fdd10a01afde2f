"""HTTP server for people and Prometheus: metrics, health, and further routes of a process."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from hmac import compare_digest
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from extproc.config import AdminSettings
from extproc.ground.address import join_address, split_address
from extproc.ground.files import WatchedFiles, read_file
from extproc.ground.tls import server_context

_STOP_S = 0.1  # time for open responses to end at the stop; the dashboard's events never end
_OPEN = AdminSettings()  # no TLS, no token
_DIGITS = 15
AUTHORIZED: web.AppKey[Callable[[web.Request], bool]] = web.AppKey("authorized")
"""Check of a request's token. Long responses repeat the check, because the token may change."""
Check = Callable[[], str]  # returns a problem in a few words, or ""


@asynccontextmanager
async def serve_admin(
    address: str,
    registry: CollectorRegistry,
    routes: Sequence[web.RouteDef] = (),
    public: Sequence[web.RouteDef] = (),
    access: AdminSettings = _OPEN,
    live: Check = str,  # no problem: "" is what str() returns
    ready: Check = str,
    setting: str = "serve.admin",
) -> AsyncIterator[str]:
    """Serve metrics, health and ``routes``; yield the bound address. If the port is 0, the system
    chooses a free port.

    Args:
        address: ``host:port``.
        registry: metrics that ``/metrics`` shows.
        routes: further routes behind the token.
        public: further routes that need no token, like health.
        access: TLS files and the token file.
        live: check of ``/livez`` and ``/healthz``; on failure the process should be restarted.
        ready: check of ``/readyz``; on failure the process should get no work.
        setting: key of the address in the configuration.

    Raises:
        OSError: the address is taken, or not of this machine; the message names the setting.
        ValueError: ``address`` is not ``host:port``, or a file of ``access`` cannot be used.
    """
    health = {"/livez": live, "/healthz": live, "/readyz": ready}
    without_token = {*health, *(route.path for route in public)}

    async def metrics(_: web.Request) -> web.Response:
        parts = list[bytes]()
        for metric in registry.collect():
            parts.append(generate_latest(_Single(metric)))
            await asyncio.sleep(0)  # the series of a thousand replicas take long in all
        return web.Response(body=b"".join(parts), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def probe(request: web.Request) -> web.Response:
        problem = health[request.path]()
        return web.Response(text=f"{problem or 'ok'}\n", status=503 if problem else 200)

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in without_token and not app[AUTHORIZED](request):
            raise web.HTTPUnauthorized(
                text="a token is needed (admin.token_file): Authorization: Bearer ...\n",
                headers={"WWW-Authenticate": "Bearer"},
            )
        try:
            return await handler(request)
        except ConnectionError:  # the client hung up; aiohttp would log a traceback
            return web.Response()

    host, port = split_address(address)
    context = server_context("admin", access.tls_cert, access.tls_key)
    app = web.Application(middlewares=[guard])
    app[AUTHORIZED] = _authorization(access)
    app.add_routes([web.get(path, probe) for path in health])
    app.add_routes([web.get("/metrics", metrics), *public, *routes])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_STOP_S)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port, ssl_context=context).start()
        except OSError as error:
            raise OSError(f"cannot listen on {address} ({setting}): {error.strerror}") from None
        bound_host, bound_port, *_ = runner.addresses[0]
        yield join_address(bound_host, bound_port)
    finally:
        await runner.cleanup()


@dataclass(frozen=True, slots=True)
class _Single(Collector):
    """Collector of one metric, which was collected already."""

    metric: Metric

    def collect(self) -> Iterable[Metric]:
        return (self.metric,)


def whole_number(request: web.Request, name: str, default: int | None = None) -> int:
    """Read a number from the query parameter ``name``; without default, the parameter is needed.

    Raises:
        HTTPBadRequest: the parameter is no number, or has more than 15 digits.
    """
    text = request.query.get(name, "" if default is None else str(default))
    if not text.isdecimal() or len(text) > _DIGITS:
        raise web.HTTPBadRequest(text=f"{name}={text[:_DIGITS]!r} is not a whole number\n")
    return int(text)


def read_token(path: Path) -> str:
    """Read the token that clients have to send.

    Raises:
        ValueError: the file cannot be read, or does not hold one line of printable ASCII.
    """
    token = read_file("admin.token_file", path).decode(errors="replace").strip()
    if not token or not token.isascii() or not token.isprintable():
        raise ValueError(f"admin.token_file: {path} must hold a token: one line of ASCII")
    return token


def _authorization(access: AdminSettings) -> Callable[[web.Request], bool]:
    if access.token_file is None:
        return lambda _: True
    file = WatchedFiles("admin token", partial(read_token, access.token_file), access.token_file)
    file.read()

    def has_token(request: web.Request) -> bool:
        scheme, _, sent = request.headers.get("Authorization", "").partition(" ")
        right = compare_digest(sent.encode(errors="surrogateescape"), file.newest().encode())
        return right and scheme.lower() == "bearer"

    return has_token
