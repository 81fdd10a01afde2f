"""HTTP client of a router's admin address: fetches decisions and live snapshots.

Functions here raise :class:`RouterUnavailableError` if the router does not answer or has
stopped, and ValueError if a file of ``access`` cannot be used.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from json import loads
from typing import Any

import aiohttp

from extproc.config import AdminSettings
from extproc.ground.tls import trusting
from extproc.observe.admin import read_token

_TIMEOUT_S = 10.0
_MOST_BYTES = 2**24  # of an event; the snapshot of 1,000 replicas takes 0.25 MB


class RouterUnavailableError(Exception):
    """The router gives no answer; the message names the remedy."""


async def fetch_decisions(
    router: str, request_id: str | None, most: int, access: AdminSettings
) -> list[Any]:
    """Get the newest ``most`` decisions, or all decisions about one request, oldest first.

    Args:
        router: admin address: ``host:port`` or a URL.
        request_id: request to look up; None: the newest decisions of any request.
        most: limit of the newest decisions.
        access: the token to send, and the certificate to trust; with a certificate, addresses
            without a scheme are https.
    """
    async with _connected(router, access) as client:
        if request_id is None:
            return await client.decisions(last=str(most))
        if found := await client.decisions(request_id=request_id):
            return found
        raise RouterUnavailableError(
            f"the router at {client.url} has no decision about request {request_id!r}: Envoy did "
            "not ask this router, no replica was available, or the decision was dropped since "
            "(serve.decisions_kept)"
        )


async def fetch_pages(router: str, paths: Sequence[str], access: AdminSettings) -> list[bytes]:
    """Get pages of a router's admin address."""
    async with _connected(router, access) as client:
        return [await client.page(path) for path in paths]


async def follow(router: str, access: AdminSettings) -> AsyncGenerator[dict[str, Any]]:
    """Yield live snapshots, as :mod:`extproc.observe.dashboard.snapshot` describes them."""
    async with (
        _connected(router, access) as client,
        client.get("/dashboard/events", "text/event-stream", {}, total_s=None) as events,
    ):
        try:
            while event := await events.content.readuntil(b"\n\n"):
                yield loads(event.removeprefix(b"data: "))
        finally:  # abort: the response never ends, and a TLS shutdown would wait for the router
            if events.connection and events.connection.transport:
                events.connection.transport.abort()
    raise RouterUnavailableError(f"the router at {client.url} has stopped")


class _Client:
    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self._session = session

    async def decisions(self, **query: str) -> list[Any]:
        async with self.get("/decisions", "application/json", query) as response:
            records = await response.json()
        if not isinstance(records, list) or not all(map(_is_decision, records)):
            raise self._no_router("JSON that is no list of decisions")
        return records

    async def page(self, path: str) -> bytes:
        async with self.get(path, "", {}) as response:
            return await response.read()

    @asynccontextmanager
    async def get(
        self, path: str, kind: str, query: dict[str, str], total_s: float | None = _TIMEOUT_S
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        timeout = aiohttp.ClientTimeout(total_s, connect=_TIMEOUT_S, sock_read=_TIMEOUT_S)
        request = self._session.get(f"{self.url}{path}", params=query, timeout=timeout)
        try:
            async with request as response:
                if response.status == 401:
                    raise RouterUnavailableError(
                        f"the router at {self.url} needs another token (admin.token_file)"
                    )
                if response.status != 200:
                    raise self._no_router(f"status {response.status}")
                if kind and response.content_type != kind:
                    raise self._no_router(f"{response.content_type} instead of {kind}")
                yield response
        except aiohttp.SocketTimeoutError:
            raise RouterUnavailableError(
                f"the router at {self.url} accepts connections, but does not answer: restart it if "
                "it hangs (/livez does not answer, either)"
            ) from None
        except (aiohttp.ClientError, TimeoutError, ValueError):
            raise RouterUnavailableError(
                f"no router answers at {self.url}: check that a router runs and that this is its "
                "serve.admin, or name another address with --router"
            ) from None

    def _no_router(self, answer: str) -> RouterUnavailableError:
        return RouterUnavailableError(
            f"{self.url} is not the admin address (serve.admin) of a router: it answers {answer}"
        )


def _is_decision(record: object) -> bool:
    return isinstance(record, dict) and isinstance(record.get("number"), int)


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
