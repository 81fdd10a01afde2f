"""Asks the admin addresses of a router's workers for their decisions."""

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp

from extproc.config import AdminSettings
from extproc.observe.client import AskError, answer, no_router, open_session, url_of

_OPEN = AdminSettings()


async def ask(
    routers: Sequence[str],
    request_id: str | None,
    most: int,
    access: AdminSettings = _OPEN,
) -> list[Any]:
    """The newest decisions, ``most`` of them, or all about one request, as JSON, oldest first.

    Args:
        routers: admin address of each worker: ``host:port`` or ``http://host:port``.
        access: TLS of those whose address names no scheme, and the token to show.
    """
    urls = [url_of(one, access) for one in routers]
    async with open_session(access) as session:
        asking = (
            _last(session, url, most) if request_id is None else _about(session, url, request_id)
            for url in urls
        )
        answers = await asyncio.gather(*asking, return_exceptions=True)
    errors = [one for one in answers if isinstance(one, BaseException)]
    for error in errors:
        if not isinstance(error, AskError):
            raise error
    if len(errors) == len(answers):
        raise AskError("\n".join(map(str, errors)))
    found = [record for one in answers if isinstance(one, list) for record in one]
    if len(urls) > 1:  # the numbers of one worker say nothing of another's
        found.sort(key=lambda record: record.get("decided_at", 0.0))
    return found if request_id is not None else found[-most:]


async def _about(session: aiohttp.ClientSession, url: str, request_id: str) -> list[Any]:
    if found := await _get(session, url, request_id=request_id):
        return found
    raise AskError(
        f"the router at {url} keeps no decision about request {request_id!r}: it was not asked, "
        "had no replica to choose, or has dropped it since (serve.decisions_kept)"
    )


async def _last(session: aiohttp.ClientSession, url: str, most: int) -> list[Any]:
    """The newest decisions; a router shows them page by page."""
    newest = await _get(session, url)
    if len(newest) >= most or not newest:
        return newest[-most:]
    end = newest[-1]["number"]
    found: list[Any] = []
    after = max(end - most, 0)
    while after < end and (page := await _get(session, url, after=str(after))):
        found += page
        after = page[-1]["number"]
    return found[:most]


async def _get(session: aiohttp.ClientSession, url: str, **query: str) -> list[Any]:
    async with answer(session, url, "/decisions", "application/json", query) as response:
        found = await response.json()
    records = found if isinstance(found, list) else [None]
    if not all(isinstance(one, dict) and isinstance(one.get("number"), int) for one in records):
        raise no_router(url, "something else than decisions")
    return records
