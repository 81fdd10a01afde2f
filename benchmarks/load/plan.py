"""Requests for a server: their prompts and times, and the questions to the server beforehand."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import shake_128
from random import Random
from typing import Any, Literal

import aiohttp
import numpy as np

from benchmarks.trace import ID_TOKENS, TracedRequest
from extproc.lab.harness.traffic import Client, TimedRequest
from extproc.lab.simulator.server import OUTPUT_TOKENS_STATE, REQUEST_STATE
from extproc.lab.simulator.tokens import WORDS

_WORDS = np.array([word.encode() for word in WORDS])

DECK = len(_WORDS)


@dataclass(frozen=True, slots=True)
class Counting:
    """Tokens that a target counts in a prompt: ``overhead + per_word·words``."""

    overhead: float = 0.0  # tokens of the chat template, or that begin every text
    per_word: float = 1.0

    @classmethod
    def of(cls, fewer: tuple[int, int], more: tuple[int, int]) -> "Counting":
        """Solves for the words and tokens of two prompts; ValueError if more words are no more."""
        (words, tokens), (more_words, more_tokens) = fewer, more
        per_word = (more_tokens - tokens) / (more_words - words)
        if per_word <= 0:
            raise ValueError(f"{words} words are {tokens} tokens, {more_words} are {more_tokens}")
        return cls(tokens - per_word * words, per_word)

    def words(self, tokens: int) -> int:
        """Number of words, at least one, that make so many tokens."""
        return max(round((tokens - self.overhead) / self.per_word), 1)


def prompt(request: TracedRequest, number: int, counting: Counting, salt: str) -> str:
    """Text of the request ``number`` of a trace: equal leading hash ids begin with equal text.

    With another ``salt`` all of it differs, so that no prefix cache knows it.
    """
    words = counting.words(request.prompt_tokens)
    return "".join(_pieces(request, number, words, counting, salt)).rstrip()


def some_words(key: str, count: int) -> str:
    """Words drawn by the key, each followed by a space; fewer with the same key are a prefix.

    Every :data:`DECK` words in a row are all words, shuffled: texts of equal length count nearly
    alike even in a vocabulary that splits some of the words.
    """
    decks = -(-count // DECK)
    drawn = np.frombuffer(shake_128(key.encode()).digest(decks * DECK), np.uint8)
    shuffled = np.argsort(drawn.reshape(decks, DECK), axis=1, kind="stable").ravel()
    return _WORDS[shuffled[:count]].tobytes().decode()


def _pieces(
    request: TracedRequest, number: int, words: int, counting: Counting, salt: str
) -> Iterator[str]:
    words_of_an_id = max(round(ID_TOKENS / counting.per_word), 1)
    for one in request.hash_ids:
        yield some_words(f"{salt}/{one}", min(words, words_of_an_id))
        words -= min(words, words_of_an_id)
    yield some_words(f"{salt}/request {number}", words)


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
        (answer,) = await client.run(
            [TimedRequest(0.0, f"probe-{number}", path, sent, stream=False)]
        )
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


OBJECTIVE_HEADER = "x-gateway-inference-objective"  # of the Gateway API Inference Extension
URGENT = "urgent"
_ROOM_TOKENS = 64  # left free of the context, since a prompt's tokens are known only roughly


@dataclass(frozen=True, slots=True)
class Planned:
    number: int  # in the plan, from 1
    traced: TracedRequest
    endpoint: Endpoint
    streamed: bool
    max_tokens: int | None
    ignore_eos: bool  # whether exactly `max_tokens` shall be generated
    objective: str = ""  # name of its objective; empty: it has none

    @property
    def at_s(self) -> float:
        return self.traced.at

    @property
    def conversation(self) -> tuple[int, ...]:
        """Key that is equal for requests whose prompts begin alike."""
        return self.traced.hash_ids[:1] or (-self.number,)

    def request(
        self, target: Target, salt: str, run: str, headers: Mapping[str, str]
    ) -> TimedRequest:
        """TimedRequest for the client.

        ``tracestate``, which other routers let pass, tells a simulated replica how much to generate
        and the name of the request.
        """
        name, tokens = f"{run}-{self.number:05}", self.traced.output_tokens
        state = f"{OUTPUT_TOKENS_STATE}={tokens},{REQUEST_STATE}={name}"
        told = {**headers, "tracestate": state}
        if self.objective:
            told[OBJECTIVE_HEADER] = self.objective
        path, body = PATHS[self.endpoint], json.dumps(self.body(target, salt)).encode()
        return TimedRequest(self.at_s, name, path, body, self.streamed, told)

    def body(self, target: Target, salt: str) -> dict[str, Any]:
        text = prompt(self.traced, self.number, target.counting[self.endpoint], salt)
        more: dict[str, Any] = {"stream": self.streamed}
        if self.max_tokens is not None:
            more["max_tokens"] = self.max_tokens
        if self.ignore_eos:
            more["ignore_eos"] = True
        if self.streamed:
            more["stream_options"] = {"include_usage": True}
        return body(target.model, self.endpoint, text, **more)


def plan(
    requests: Iterable[TracedRequest],
    target: Target,
    stream_share: float,
    known_lengths: bool,
    random: Random,
) -> list[Planned]:
    """Requests that fit into the target's context; a share of 0…1 of them is streamed.

    With ``known_lengths`` each answer is bound to the trace's length; otherwise bounds are the
    trace's, and the target decides.
    """
    planned = []
    endpoints = list(target.counting)
    for number, one in enumerate(requests, 1):
        streamed, drawn = random.random() < stream_share, random.choice(endpoints)
        if target.context and one.prompt_tokens + one.output_tokens > target.context - _ROOM_TOKENS:
            continue
        bound = one.output_tokens if known_lengths else _bound(one, target.context)
        planned.append(Planned(number, one, drawn, streamed, bound, known_lengths))
    return _together(planned, endpoints)


def with_urgent(planned: Iterable[Planned], share: float, random: Random) -> list[Planned]:
    """Plan in which a share of the requests, drawn, has the objective ``urgent``."""
    return [replace(one, objective=URGENT if random.random() < share else "") for one in planned]


def _bound(one: TracedRequest, context: int | None) -> int | None:
    """Bound of the trace, within the context: some servers refuse more."""
    if one.max_tokens is None or context is None:
        return one.max_tokens
    return min(one.max_tokens, context - _ROOM_TOKENS - one.prompt_tokens)


def _together(planned: Sequence[Planned], endpoints: Collection[Endpoint]) -> list[Planned]:
    """Plan with every conversation on the endpoint of its first turn, to share a prefix cache.

    Conversations with an unbounded turn are chats: completions would end after 16 tokens.
    """
    taken: dict[tuple[int, ...], Endpoint] = {}
    for one in planned:
        taken.setdefault(one.conversation, one.endpoint)
        if one.max_tokens is None and "chat" in endpoints:
            taken[one.conversation] = "chat"
    return [replace(one, endpoint=taken[one.conversation]) for one in planned]
