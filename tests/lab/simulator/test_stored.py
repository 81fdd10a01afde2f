"""Responses are kept by the replica that made them."""

from typing import Any

from aiohttp import ClientSession

from extproc.lab.simulator.replica import Replica
from tests.lab.simulator.conftest import get, reply

RESPONSES = "/v1/responses"


async def ask(client: ClientSession, status: int = 200, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "input": "Tell me of the sea. " * 20, "max_output_tokens": 5} | fields
    return await reply(client, RESPONSES, body, status=status)


async def look(client: ClientSession, name: str, status: int = 200) -> Any:
    return await get(client, f"{RESPONSES}/{name}", status)


async def cancel(client: ClientSession, name: str, status: int = 200) -> Any:
    return await reply(client, f"{RESPONSES}/{name}/cancel", {}, status=status)


async def test_a_response_is_kept_and_gone_on_from(client: ClientSession) -> None:
    first = await ask(client)
    assert await look(client, first["id"]) == first
    second = await ask(client, input="And the sky?", previous_response_id=first["id"])
    before = first["usage"]["total_tokens"]
    assert second["usage"]["input_tokens"] > before
    assert second["usage"]["input_tokens_details"]["cached_tokens"] > before * 0.8


async def test_a_response_not_to_be_stored_is_not(client: ClientSession) -> None:
    answer = await ask(client, store=False)
    await look(client, answer["id"], 404)


async def test_work_in_the_background_is_answered_later(client: ClientSession) -> None:
    queued = await ask(client, background=True)
    assert (queued["status"], queued["output"]) == ("queued", [])
    while (now := await look(client, queued["id"]))["status"] == "queued":
        pass
    assert now["output"][0]["content"][0]["text"]
    await cancel(client, queued["id"], 400)


async def test_work_in_the_background_may_be_cancelled(
    client: ClientSession, replica: Replica
) -> None:
    queued = await ask(client, background=True, max_output_tokens=4_000, ignore_eos=True)
    assert (await cancel(client, queued["id"]))["status"] == "cancelled"
    assert (await look(client, queued["id"]))["status"] == "cancelled"
    assert replica.engine.running == 0
