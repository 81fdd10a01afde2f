"""What processes say of themselves over HTTP."""

import json
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_TIMEOUT = aiohttp.ClientTimeout(total=5.0)


async def get_text(url: str) -> str:
    """The page at a URL; empty where there is none."""
    try:
        async with aiohttp.ClientSession(timeout=_TIMEOUT) as session, session.get(url) as response:
            return await response.text() if response.status == 200 else ""
    except (aiohttp.ClientError, TimeoutError):
        return ""


async def get_json(url: str) -> Any:
    """The JSON at a URL; None where there is none."""
    return json.loads(await get_text(url) or "null")


async def get_samples(url: str) -> list[Sample]:
    """The metrics at a URL; none where there is no such page."""
    families = text_string_to_metric_families(await get_text(url))
    return [sample for family in families for sample in family.samples]


async def decisions(admin: str, after: int = 0) -> list[dict[str, Any]]:
    """The records of a router's decisions that it still has, from a number on."""
    records: list[dict[str, Any]] = []
    while page := await get_json(f"{admin}/decisions?after={after}"):
        records += page
        after = page[-1]["number"]
    return records
