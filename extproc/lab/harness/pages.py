"""HTTP pages of the processes: text, JSON, metrics and decisions."""

import json
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_TIMEOUT = aiohttp.ClientTimeout(total=5.0)


async def get_text(url: str) -> str:
    """Text at a URL; empty if there is none."""
    try:
        async with aiohttp.ClientSession(timeout=_TIMEOUT) as session, session.get(url) as response:
            return await response.text() if response.status == 200 else ""
    except (aiohttp.ClientError, TimeoutError):
        return ""


async def get_json(url: str) -> Any:
    """JSON at a URL; None if there is none."""
    return json.loads(await get_text(url) or "null")


async def get_samples(url: str) -> list[Sample]:
    """Metrics at a URL; empty if there are none."""
    return samples_of(await get_text(url))


def samples_of(text: str) -> list[Sample]:
    """Samples of a page of metrics."""
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


async def decisions(admin: str, after: int = 0) -> list[dict[str, Any]]:
    """Records of a router's decisions after the decision ``after``, as far as the router still has
    them."""
    records: list[dict[str, Any]] = []
    while page := await get_json(f"{admin}/decisions?after={after}"):
        records += page
        after = page[-1]["number"]
    return records
