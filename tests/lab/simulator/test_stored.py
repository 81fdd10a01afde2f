"""Stored and background responses of a replica."""

from typing import Any

from aiohttp import ClientSession

from tests.lab.simulator.conftest import get, reply

RESPONSES = "/v1/responses"


async def respond(client: ClientSession, status: int = 200, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "input": "Tell me of the sea. " * 20, "max_output_tokens": 5} | fields
    return await reply(client, RESPONSES, body, status=status)


async def stored(client: ClientSession, name: str, status: int = 200) -> Any:
    return await get(client, f"{RESPONSES}/{name}", status)


async def cancel(client: ClientSession, name: str, status: int = 200) -> Any:
    return await reply(client, f"{RESPONSES}/{name}/cancel", {}, status=status)


async def test_stored_response_can_be_read_and_continued(client: ClientSession) -> None:
    first = await respond(client)
    assert await stored(client, first["id"]) == first
    second = await respond(client, input="And the sky?", previous_response_id=first["id"])
    before = first["usage"]["total_tokens"]
    assert second["usage"]["input_tokens"] > before
    assert second["usage"]["input_tokens_details"]["cached_tokens"] > before * 0.8


async def test_response_with_store_false_is_not_found(client: ClientSession) -> None:
    answer = await respond(client, store=False)
    await stored(client, answer["id"], 404)


async def test_background_response_is_complete_later(client: ClientSession) -> None:
    queued = await respond(client, background=True)
    assert (queued["status"], queued["output"]) == ("queued", [])
    while (now := await stored(client, queued["id"]))["status"] == "queued":
        pass
    assert now["output"][0]["content"][0]["text"]
    await cancel(client, queued["id"], 400)
