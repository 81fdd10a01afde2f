"""What will be sent, and when."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from benchmarks.load.prompts import prompt
from benchmarks.load.target import PATHS, Endpoint, Target, body
from benchmarks.trace import TracedRequest
from extproc.lab.harness.traffic import Request
from extproc.lab.simulator.server import OUTPUT_TOKENS_STATE, REQUEST_STATE

OBJECTIVE_HEADER = "x-gateway-inference-objective"
"""As in the Gateway API Inference Extension; the router's ``hold.objective_header`` may name it."""
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
        """Equal for requests whose prompts begin alike, unlike any other's without hash ids."""
        return self.traced.hash_ids[:1] or (-self.number,)

    def request(self, target: Target, salt: str, run: str, headers: Mapping[str, str]) -> Request:
        """As the client sends it.

        What a simulated replica shall generate, and what the request is called, is told where
        peers of the router let it pass; nothing else reads it.
        """
        name, tokens = f"{run}-{self.number:05}", self.traced.output_tokens
        state = f"{OUTPUT_TOKENS_STATE}={tokens},{REQUEST_STATE}={name}"
        told = {**headers, "tracestate": state}
        if self.objective:
            told[OBJECTIVE_HEADER] = self.objective
        path, body = PATHS[self.endpoint], json.dumps(self.body(target, salt)).encode()
        return Request(self.at_s, name, path, body, self.streamed, told)

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
    """The requests that the target's context has room for.

    Args:
        requests: of a trace, in order.
        target: where to.
        stream_share: share of the requests that are streamed, 0…1.
        known_lengths: bound each answer to exactly what the trace says it generates; otherwise
            bounds are the trace's, and the target decides.
        random: draws which are streamed, and which conversations are completions.
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
    """The same; so many of them, drawn, have the objective ``urgent``."""
    return [replace(one, objective=URGENT if random.random() < share else "") for one in planned]


def _bound(one: TracedRequest, context: int | None) -> int | None:
    """As the trace says, and no more than the context leaves: more is refused by some servers."""
    if one.max_tokens is None or context is None:
        return one.max_tokens
    return min(one.max_tokens, context - _ROOM_TOKENS - one.prompt_tokens)


def _together(planned: Sequence[Planned], endpoints: Collection[Endpoint]) -> list[Planned]:
    """With every conversation on one endpoint, the one drawn for its first turn: a chat and a
    completion share nothing in a prefix cache.

    Where a turn has no bound, all are chats: completions would end after 16 tokens.
    """
    taken: dict[tuple[int, ...], Endpoint] = {}
    for one in planned:
        taken.setdefault(one.conversation, one.endpoint)
        if one.max_tokens is None and "chat" in endpoints:
            taken[one.conversation] = "chat"
    return [replace(one, endpoint=taken[one.conversation]) for one in planned]
