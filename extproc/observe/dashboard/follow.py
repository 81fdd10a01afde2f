"""A router's news as whoever is not a browser gets them."""

from collections.abc import AsyncGenerator
from json import loads
from typing import Any

from extproc.config import AdminSettings
from extproc.observe.client import AskError, answer, open_session, url_of


async def follow(router: str, access: AdminSettings) -> AsyncGenerator[dict[str, Any]]:
    """Snapshots of the router at ``host:port`` or a URL, in the form of
    :func:`extproc.observe.dashboard.snapshot.snapshot`."""
    url = url_of(router, access)
    async with (
        open_session(access) as session,
        answer(session, url, "/dashboard/events", "text/event-stream", endless=True) as events,
    ):
        try:
            while event := await events.content.readuntil(b"\n\n"):
                yield loads(event.removeprefix(b"data: "))
        finally:  # there is no end to read up to, and TLS would wait for the router's goodbye
            if events.connection and events.connection.transport:
                events.connection.transport.abort()
    raise AskError(f"the router at {url} has stopped")
