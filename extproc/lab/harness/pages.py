"""Downloads of HTTP pages: text, JSON, metrics and a router's decisions."""

import json
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_TIMEOUT = aiohttp.ClientTimeout(total=5.0)


async def get_text(url: str) -> str | None:
    """Return the text at a URL; None after an error or a status other than 200."""
    try:
        async with aiohttp.ClientSession(timeout=_TIMEOUT) as session, session.get(url) as response:
            return await response.text() if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError):
        return None


async def get_json(url: str) -> Any:
    """Return the JSON at a URL; None after an error or a status other than 200."""
    return json.loads(await get_text(url) or "null")


def samples_of(text: str) -> list[Sample]:
    """Return the samples of a metrics page."""
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


async def decisions(admin: str, after: int = 0) -> list[dict[str, Any]]:
    """Return the decision records that a router still has, from number ``after`` + 1 on."""
    records: list[dict[str, Any]] = []
    while page := await get_json(f"{admin}/decisions?after={after}"):
        records += page
        after = page[-1]["number"]
    return records
