"""Requests to send, and when."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from benchmarks.load.target import PATHS, Endpoint, Target, body, prompt
from benchmarks.trace import TracedRequest
from extproc.lab.harness.traffic import Request
from extproc.lab.simulator.server import OUTPUT_TOKENS_STATE, REQUEST_STATE

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

    def request(self, target: Target, salt: str, run: str, headers: Mapping[str, str]) -> Request:
        """Request for the client.

        ``tracestate``, which other routers let pass, tells a simulated replica how much to generate
        and the name of the request.
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
