"""Plan of a run: requests with prompts and times. To make it, the client first asks the server
for its model, its context and its way of counting tokens."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import shake_128
from math import inf
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
    """Number of tokens that a server counts in a prompt: ``overhead + per_word·words``."""

    overhead: float = 0.0  # tokens beside the words: chat template, mark of the beginning
    per_word: float = 1.0

    @classmethod
    def of(cls, fewer: tuple[int, int], more: tuple[int, int]) -> "Counting":
        """Computes the counting from two prompts, each given by its numbers of words and tokens.
        Raises ValueError unless the longer prompt has more tokens."""
        (words, tokens), (more_words, more_tokens) = fewer, more
        per_word = (more_tokens - tokens) / (more_words - words)
        if per_word <= 0:
            raise ValueError(
                f"{tokens} tokens for {words} words, {more_tokens} tokens for {more_words} words"
            )
        return cls(tokens - per_word * words, per_word)

    def words(self, tokens: int) -> int:
        """Number of words, at least 1, of a prompt with this number of tokens."""
        return max(round((tokens - self.overhead) / self.per_word), 1)


def prompt(request: TracedRequest, number: int, counting: Counting, salt: str) -> str:
    """Text of request ``number`` of a trace: equal leading hash ids give equal leading text.

    Another ``salt`` gives another text, so that no prefix cache contains it.
    """
    words = counting.words(request.prompt_tokens)
    return "".join(_pieces(request, number, words, counting, salt)).rstrip()


def some_words(key: str, count: int) -> str:
    """Draws words, each followed by a space; ``key`` is the seed. A smaller count gives a prefix.

    The words come in blocks of :data:`DECK`, each a permutation of all words. So texts of equal
    length have nearly equal token counts, even if the vocabulary splits some words.
    """
    decks = -(-count // DECK)
    drawn = np.frombuffer(shake_128(key.encode()).digest(decks * DECK), np.uint8)
    shuffled = np.argsort(drawn.reshape(decks, DECK), axis=1, kind="stable").ravel()
    return _WORDS[shuffled[:count]].tobytes().decode()


def _pieces(
    request: TracedRequest, number: int, words: int, counting: Counting, salt: str
) -> Iterator[str]:
    words_of_an_id = max(round(ID_TOKENS / counting.per_word), 1)
    for hash_id in request.hash_ids:
        yield some_words(f"{salt}/{hash_id}", min(words, words_of_an_id))
        words -= min(words, words_of_an_id)
    yield some_words(f"{salt}/request {number}", words)


Endpoint = Literal["chat", "completions"]

PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}

_PROBES = (DECK, 6 * DECK)  # words of the prompts that the server counts before the run


class TargetError(Exception):
    """The server cannot be put under load; the message has reason and remedy."""


@dataclass(frozen=True, slots=True)
class LoadTarget:
    model: str
    context: int | None  # tokens of a prompt and its answer, at most; None: unknown
    counting: dict[Endpoint, Counting]  # by endpoint of the requests


async def ask_server(
    url: str, endpoints: Sequence[Endpoint], model: str | None, salt: str
) -> LoadTarget:
    """Asks for model and context, and for the token counts of two short prompts.

    Raises TargetError if the server cannot be put under load.
    """
    served = await _served(url)
    if model is None and len(served) != 1:
        names = ", ".join(served) or "nothing"
        raise TargetError(f"{url}/v1/models lists {names}: choose a model with --model NAME")
    name = model or next(iter(served))
    async with Client(url) as client:
        counting = {
            endpoint: await _counting(client, endpoint, name, salt) for endpoint in endpoints
        }
    return LoadTarget(name, served.get(name), counting)


def body(model: str, endpoint: Endpoint, text: str, **more: Any) -> dict[str, Any]:
    if endpoint == "chat":
        return {"model": model, **more, "messages": [{"role": "user", "content": text}]}
    return {"model": model, **more, "prompt": text}


async def _served(url: str) -> dict[str, int | None]:
    """Context length of each model that the server lists; None if the server does not say."""
    try:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models") as response:
            page = await response.json(content_type=None)
            return {str(model["id"]): model.get("max_model_len") for model in page["data"]}
    except (aiohttp.ClientError, TimeoutError) as error:
        reason = str(error) or type(error).__name__
        raise TargetError(f"{url} cannot be reached: {reason}; is the server running?") from None
    except (ValueError, KeyError, TypeError, AttributeError):  # not a list of models
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
            reason = answer.account or "the answer has no count of tokens"
            raise TargetError(
                f"{path} does not generate text: {reason}; name other paths with --endpoint"
            )
        counted.append((words, tokens))
    try:
        return Counting.of(*counted)
    except ValueError as error:
        raise TargetError(f"{path} reports impossible token counts: {error}") from None


OBJECTIVE_HEADER = "x-gateway-inference-objective"  # of the Gateway API Inference Extension
URGENT = "urgent"
_ROOM_TOKENS = 64  # left free in the context: token counts of prompts are estimates


@dataclass(frozen=True, slots=True)
class Planned:
    number: int  # in the trace, from 1
    traced: TracedRequest
    endpoint: Endpoint
    streamed: bool
    max_tokens: int | None
    ignore_eos: bool  # generate exactly `max_tokens`
    objective: str = ""  # name; empty: none

    @property
    def at_s(self) -> float:
        return self.traced.at

    @property
    def conversation(self) -> tuple[int, ...]:
        """Key that is equal for requests whose prompts begin alike."""
        return self.traced.hash_ids[:1] or (-self.number,)

    def request(
        self, target: LoadTarget, salt: str, run: str, headers: Mapping[str, str]
    ) -> TimedRequest:
        """Request as the client sends it.

        The header ``tracestate`` tells simulated replicas the length of the answer and the name of
        the request. Other routers forward this header.
        """
        name, tokens = f"{run}-{self.number:05}", self.traced.output_tokens
        state = f"{OUTPUT_TOKENS_STATE}={tokens},{REQUEST_STATE}={name}"
        sent = {**headers, "tracestate": state}
        if self.objective:
            sent[OBJECTIVE_HEADER] = self.objective
        path, body = PATHS[self.endpoint], json.dumps(self.body(target, salt)).encode()
        return TimedRequest(self.at_s, name, path, body, self.streamed, sent)

    def body(self, target: LoadTarget, salt: str) -> dict[str, Any]:
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
    target: LoadTarget,
    stream_share: float,
    known_lengths: bool,
    random: Random,
) -> list[Planned]:
    """Plans the requests that fit into the target's context; ``stream_share`` (0…1) of them are
    streamed.

    With ``known_lengths`` an answer has exactly the trace's length. Otherwise the trace gives only
    a bound, and the target decides on the length.
    """
    planned = []
    endpoints = list(target.counting)
    room = target.context - _ROOM_TOKENS if target.context else inf
    for number, traced in enumerate(requests, 1):
        streamed, drawn = random.random() < stream_share, random.choice(endpoints)
        if traced.prompt_tokens + traced.output_tokens > room:
            continue
        bound = traced.output_tokens if known_lengths else _bound(traced, target.context)
        planned.append(Planned(number, traced, drawn, streamed, bound, known_lengths))
    return _together(planned, endpoints)


def with_urgent(planned: Iterable[Planned], share: float, random: Random) -> list[Planned]:
    """Gives a random share of the planned requests the objective ``urgent``."""
    return [
        replace(request, objective=URGENT if random.random() < share else "") for request in planned
    ]


def _bound(traced: TracedRequest, context: int | None) -> int | None:
    """Output bound of the trace, reduced to fit into the context: some servers refuse larger
    bounds."""
    if traced.max_tokens is None or context is None:
        return traced.max_tokens
    return min(traced.max_tokens, context - _ROOM_TOKENS - traced.prompt_tokens)


def _together(planned: Sequence[Planned], endpoints: Collection[Endpoint]) -> list[Planned]:
    """Sends each turn of a conversation to the endpoint of its first turn, so that turns share a
    prefix.

    If a turn has no bound of its output, the whole conversation goes to the chat endpoint, because
    ``/v1/completions`` generates 16 tokens by default.
    """
    chosen: dict[tuple[int, ...], Endpoint] = {}
    for request in planned:
        chosen.setdefault(request.conversation, request.endpoint)
        if request.max_tokens is None and "chat" in endpoints:
            chosen[request.conversation] = "chat"
    return [replace(request, endpoint=chosen[request.conversation]) for request in planned]
