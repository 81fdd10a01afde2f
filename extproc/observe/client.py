"""Client of admin addresses: asks routers for decisions and live snapshots."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from json import loads
from typing import Any

import aiohttp

from extproc.config import AdminSettings
from extproc.ground.tls import trusting
from extproc.observe.admin import read_token

_OPEN = AdminSettings()
_PATIENCE_S = 10.0
_MOST_BYTES = 2**24  # of one event: a thousand replicas take a quarter of a megabyte


class AskError(Exception):
    """Failure to get an answer of a router; the message has the remedy."""


async def ask_decisions(
    router: str, request_id: str | None, most: int, access: AdminSettings = _OPEN
) -> list[Any]:
    """Get the newest decisions, ``most`` of them, or all about one request, the oldest first.

    Args:
        router: admin address: ``host:port``, or a URL.
        request_id: None for the newest.
        most: limits the newest.
        access: TLS of addresses without a scheme, and the token to show.

    Raises:
        AskError: the router does not answer.
        ValueError: a file of ``access`` cannot be used.
    """
    async with _connected(router, access) as client:
        if request_id is not None:
            if found := await client.decisions(request_id=request_id):
                return found
            raise AskError(
                f"the router at {client.url} keeps no decision about request {request_id!r}: it "
                "was not asked, had no replica to choose, or has dropped it since "
                "(serve.decisions_kept)"
            )
        newest = await client.decisions()
        if len(newest) >= most or not newest:
            return newest[-most:]
        found, end = [], newest[-1]["number"]
        after = max(end - most, 0)
        while after < end and (page := await client.decisions(after=str(after))):
            found += page
            after = page[-1]["number"]
        return found[:most]


async def follow(router: str, access: AdminSettings) -> AsyncGenerator[dict[str, Any]]:
    """Yield the snapshots of a router, as :mod:`extproc.observe.dashboard.snapshot` makes them.

    Raises:
        AskError: the router does not answer, or stopped.
        ValueError: a file of ``access`` cannot be used.
    """
    async with (
        _connected(router, access) as client,
        client.get("/dashboard/events", "text/event-stream", {}, total_s=None) as events,
    ):
        try:
            while event := await events.content.readuntil(b"\n\n"):
                yield loads(event.removeprefix(b"data: "))
        finally:  # the answer has no end to read up to, and TLS would wait for the router's goodbye
            if events.connection and events.connection.transport:
                events.connection.transport.abort()
    raise AskError(f"the router at {client.url} has stopped")


class _Client:
    """A session with the router at an admin address."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self._session = session

    async def decisions(self, **query: str) -> list[Any]:
        async with self.get("/decisions", "application/json", query) as response:
            found = await response.json()
        records = found if isinstance(found, list) else [None]
        if not all(isinstance(one, dict) and isinstance(one.get("number"), int) for one in records):
            raise self._no_router("something else than decisions")
        return records

    @asynccontextmanager
    async def get(
        self, path: str, kind: str, query: dict[str, str], total_s: float | None = _PATIENCE_S
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        timeout = aiohttp.ClientTimeout(total_s, connect=_PATIENCE_S, sock_read=_PATIENCE_S)
        asked = self._session.get(f"{self.url}{path}", params=query, timeout=timeout)
        try:
            async with asked as response:
                if response.status == 401:
                    where = f"the router at {self.url}"
                    raise AskError(f"{where} asks for another token (admin.token_file)")
                if response.status != 200:
                    raise self._no_router(f"status {response.status}")
                if response.content_type != kind:
                    raise self._no_router(f"something else than {kind}")
                yield response
        except (aiohttp.ClientError, TimeoutError, ValueError):
            raise AskError(
                f"no router answers at {self.url}: is it running, and is that its serve.admin? "
                "Name another with --router"
            ) from None

    def _no_router(self, seen: str) -> AskError:
        where = f"{self.url} is not the admin address (serve.admin) of a router"
        return AskError(f"{where}: it answers {seen}")


@asynccontextmanager
async def _connected(router: str, access: AdminSettings) -> AsyncIterator[_Client]:
    secure = access.tls_cert is not None
    url = router if "://" in router else f"{'https' if secure else 'http'}://{router}"
    token = access.token_file and read_token(access.token_file)
    connector = aiohttp.TCPConnector(ssl=trusting(access.tls_cert) if access.tls_cert else True)
    async with aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {token}"} if token else {},
        connector=connector,
        read_bufsize=_MOST_BYTES,
    ) as session:
        yield _Client(url.rstrip("/"), session)
