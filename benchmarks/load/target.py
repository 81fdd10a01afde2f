"""What is asked of a server before the first request: model, context, how it counts tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

from benchmarks.load.prompts import DECK, Counting, some_words

Endpoint = Literal["chat", "completions"]

PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}

_PROBES = (DECK, 6 * DECK)
"""Words of the prompts whose tokens are asked for."""


class TargetError(Exception):
    """The server cannot be put under load; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server that takes requests."""

    model: str
    context: int | None
    """Most tokens of a prompt and its answer; None where the server does not say."""
    counting: dict[Endpoint, Counting]
    """For each endpoint that requests may go to."""


async def ask(url: str, endpoints: Sequence[Endpoint], model: str | None, salt: str) -> Target:
    """Asks the server, which answers two short prompts for each endpoint.

    Raises:
        TargetError: it cannot be reached, or does not take such requests.
    """
    try:
        async with aiohttp.ClientSession() as session:
            name, context = await _model(session, url, model)
            counting = {
                endpoint: await _counting(session, f"{url}{PATHS[endpoint]}", name, salt)
                for endpoint in endpoints
            }
    except (aiohttp.ClientError, TimeoutError) as error:
        reason = str(error) or type(error).__name__
        raise TargetError(f"{url} cannot be reached: {reason}; is it running?") from None
    return Target(name, context, counting)


async def _model(
    session: aiohttp.ClientSession, url: str, model: str | None
) -> tuple[str, int | None]:
    """The model's name, and the context length where the server tells it."""
    async with session.get(f"{url}/v1/models") as response:
        served = _served(await _json(response)) if response.status == 200 else {}
    if model is None and len(served) != 1:
        names = ", ".join(served) or f"nothing (status {response.status})"
        raise TargetError(f"{url}/v1/models lists {names}: say which model with --model NAME")
    name = model or next(iter(served))
    return name, served.get(name)


def _served(page: Any) -> dict[str, int | None]:
    try:
        return {str(one["id"]): one.get("max_model_len") for one in page["data"]}
    except (KeyError, TypeError, AttributeError):
        return {}


async def _counting(session: aiohttp.ClientSession, url: str, model: str, salt: str) -> Counting:
    fewer, more = [(words, await _tokens(session, url, model, words, salt)) for words in _PROBES]
    try:
        return Counting.of(fewer, more)
    except ValueError as error:
        raise TargetError(f"{url} counts no tokens that make sense: {error}") from None


async def _tokens(
    session: aiohttp.ClientSession, url: str, model: str, words: int, salt: str
) -> int:
    """Tokens that the server counts in a prompt."""
    text = some_words(f"{salt}/probe", words).rstrip()
    body: dict[str, Any] = {"model": model, "max_tokens": 1}
    chat = url.endswith(PATHS["chat"])
    body |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    async with session.post(url, json=body) as response:
        answer = await _json(response)
        status = response.status
    try:
        return int(answer["usage"]["prompt_tokens"])
    except (KeyError, TypeError, ValueError):
        said = str(answer)[:300] if status == 200 else f"status {status}: {str(answer)[:300]}"
        raise TargetError(
            f"{url} did not answer as a model: {said}; --endpoint leaves one of the two out"
        ) from None


async def _json(response: aiohttp.ClientResponse) -> Any:
    """The answer, or its text where it is no JSON."""
    try:
        return await response.json(content_type=None)
    except ValueError:
        return await response.text()
