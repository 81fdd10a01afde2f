"""Questions to a server before the first request: model, context, how it counts tokens."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

from benchmarks.load.prompts import DECK, Counting, some_words
from extproc.lab.harness.traffic import Client, Request

Endpoint = Literal["chat", "completions"]

PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}

_PROBES = (DECK, 6 * DECK)  # words of the prompts whose tokens are asked for


class TargetError(Exception):
    """Server cannot be put under load; the message gives reason and remedy."""


@dataclass(frozen=True, slots=True)
class Target:
    model: str
    context: int | None  # most tokens of a prompt and its answer; None: unknown
    counting: dict[Endpoint, Counting]  # for each endpoint that requests may go to


async def ask(url: str, endpoints: Sequence[Endpoint], model: str | None, salt: str) -> Target:
    """Asks the server, with two short prompts for each endpoint; raises TargetError."""
    served = await _served(url)
    if model is None and len(served) != 1:
        names = ", ".join(served) or "nothing"
        raise TargetError(f"{url}/v1/models lists {names}: say which model with --model NAME")
    name = model or next(iter(served))
    async with Client(url) as client:
        counting = {one: await _counting(client, one, name, salt) for one in endpoints}
    return Target(name, served.get(name), counting)


def body(model: str, endpoint: Endpoint, text: str, **more: Any) -> dict[str, Any]:
    if endpoint == "chat":
        return {"model": model, **more, "messages": [{"role": "user", "content": text}]}
    return {"model": model, **more, "prompt": text}


async def _served(url: str) -> dict[str, int | None]:
    """Models of the server with their context lengths, as far as it lists them."""
    try:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models") as response:
            page = await response.json(content_type=None)
            return {str(one["id"]): one.get("max_model_len") for one in page["data"]}
    except (aiohttp.ClientError, TimeoutError) as error:
        reason = str(error) or type(error).__name__
        raise TargetError(f"{url} cannot be reached: {reason}; is it running?") from None
    except (ValueError, KeyError, TypeError, AttributeError):  # no such page
        return {}


async def _counting(client: Client, endpoint: Endpoint, model: str, salt: str) -> Counting:
    counted = []
    for words in _PROBES:
        text = some_words(f"{salt}/probe", words).rstrip()
        sent = json.dumps(body(model, endpoint, text, max_tokens=1)).encode()
        path, number = PATHS[endpoint], len(client.answers)
        (answer,) = await client.run([Request(0.0, f"probe-{number}", path, sent, stream=False)])
        tokens = answer.tokens("prompt")
        if tokens is None:
            said = answer.account or "no count of its tokens"
            raise TargetError(
                f"{path} did not answer as a model: {said}; --endpoint leaves one of the two out"
            )
        counted.append((words, tokens))
    try:
        return Counting.of(*counted)
    except ValueError as error:
        raise TargetError(f"{path} counts no tokens that make sense: {error}") from None
