"""The load client of demo, benchmarks and chaos: an open loop against OpenAI's API.

Requests leave at their times, whatever became of those before. While an answer comes, only its
bytes and their times are kept; it is read when it has ended.
"""

import asyncio
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp

from extproc.ground.clock import Clock, monotonic
from extproc.lab.harness.samples import Sample
from extproc.lab.harness.stream import read

POLICY_HEADER = "x-extproc-policy"
OUTPUT_HEADER = "x-simulate-output-tokens"  # tells a simulated replica what to generate
_SERVED_BY_HEADER = "x-served-by"
_CONNECT_S = 10.0
_ANSWER_S = 300.0
_KEEP_ALIVE_S = 4.0
"""Idle connections are closed before uvicorn, which serves vLLM, closes them: after 5 s."""
_SAID_BYTES = 200


@dataclass(frozen=True, slots=True)
class Request:
    """One request to send."""

    at_s: float  # seconds after the start of its run
    request_id: str
    path: str
    body: bytes
    stream: bool  # whether the body asks for an answer token by token
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Answer:
    """What became of a request, as its client saw it; times in seconds."""

    request_id: str
    ttft_s: float | None = None
    """From sending to the first token; None where the answer was not streamed, or had none."""
    completion_s: float = 0.0  # from sending to the end, good or bad; 0 until then
    problem: str = ""  # what kind of failure; empty where the answer is whole
    said: str = ""  # the beginning of what came in place of an answer
    sent_at: float = 0.0  # by the client's clock
    late_s: float = 0.0  # how much later than due it was sent
    status: int | None = None
    replica: str | None = None  # as the response header `x-served-by` says
    usage: dict[str, Any] = field(default_factory=dict)
    gaps_s: "array[float]" = field(default_factory=lambda: array("d"))  # between chunks with tokens
    chunks: int = 0

    @property
    def ok(self) -> bool:
        return not self.problem

    @property
    def account(self) -> str:
        """The problem, and what was said of it."""
        return f"{self.problem}: {self.said}" if self.said else self.problem

    def tokens(self, of: str) -> int | None:
        """Those of the ``prompt`` or the ``completion``, by the server's word."""
        count = self.usage.get(f"{of}_tokens")
        return count if isinstance(count, int) else None


class Client:
    """Sends requests to one server within an ``async with`` block."""

    def __init__(self, url: str, timeout_s: float = _ANSWER_S, clock: Clock = monotonic) -> None:
        """``timeout_s``: for a whole answer."""
        self.answers: dict[str, Answer] = {}
        """Of all requests sent so far, in their order, by request id."""
        self.in_flight = 0
        self.most_in_flight = 0
        self.failed = 0
        self._url = url
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_S)
        self._clock = clock

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
        self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    @property
    def ended(self) -> int:
        return len(self.answers) - self.in_flight

    async def run(self, requests: Iterable[Request]) -> list[Answer]:
        """Send each at its time, in their order; returns when the last answer has ended."""
        started = self._clock()
        async with asyncio.TaskGroup() as tasks:
            sent = []
            for request in requests:
                due = started + request.at_s
                await asyncio.sleep(max(due - self._clock(), 0.0))
                sent.append(tasks.create_task(self._send(request, due)))
        return [task.result() for task in sent]

    async def _send(self, request: Request, due: float) -> Answer:
        began = self._clock()
        answer = Answer(request.request_id, sent_at=began, late_s=began - due)
        self.answers[request.request_id] = answer
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        chunks: list[bytes] = []
        times: list[float] = []
        broken: Exception | None = None
        try:
            await self._exchange(request, answer, chunks, times)
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            broken = error
        answer.completion_s = self._clock() - began
        answer.chunks = len(chunks)
        _judge(answer, request.stream, chunks, times)
        if broken is not None:
            answer.problem = _kind(broken, answer.status, request.stream)
            answer.said = str(broken) or type(broken).__name__
        self.in_flight -= 1
        self.failed += not answer.ok
        return answer

    async def _exchange(
        self, request: Request, answer: Answer, chunks: list[bytes], times: list[float]
    ) -> None:
        named = {"content-type": "application/json", "x-request-id": request.request_id}
        headers = {**request.headers, **named}
        async with self._session.post(
            self._url + request.path, data=request.body, headers=headers
        ) as response:
            answer.status = response.status
            answer.replica = response.headers.get(_SERVED_BY_HEADER)
            async for chunk in response.content.iter_any():
                chunks.append(chunk)
                times.append(self._clock())


async def send_all(
    url: str, samples: Iterable[Sample], run: str, policy: str | None = None
) -> list[Answer]:
    """Send every sample at its time, and return the answers when the last one is there.

    Request ids are ``run-001`` and so on; a ``policy`` is asked for instead of the router's own.
    """
    asked = {} if policy is None else {POLICY_HEADER: policy}
    async with Client(url) as client:
        return await client.run(
            to_send(sample, f"{run}-{number:03}", run, asked)
            for number, sample in enumerate(samples, 1)
        )


def to_send(
    sample: Sample, request_id: str, run: str, headers: Mapping[str, str] | None = None
) -> Request:
    """The sample as a request; in another ``run`` no prefix cache knows its prompt."""
    told = {**(headers or {}), OUTPUT_HEADER: str(sample.output_tokens)}
    body = json.dumps(sample.body(run)).encode()
    return Request(sample.at_s, request_id, sample.path, body, sample.stream, told)


def _judge(answer: Answer, stream: bool, chunks: Sequence[bytes], times: Sequence[float]) -> None:
    if answer.status != 200:
        answer.problem = f"status {answer.status}"
        answer.said = b"".join(chunks)[:_SAID_BYTES].decode(errors="replace")
    elif stream:
        streamed = read(chunks, times)
        answer.problem, answer.usage = streamed.problem, streamed.usage
        answer.gaps_s.extend(streamed.gaps_s)
        if streamed.first_at is not None:
            answer.ttft_s = streamed.first_at - answer.sent_at
    else:
        try:
            whole = json.loads(b"".join(chunks))
            answer.problem = "" if whole["choices"] else "not a completion"
            answer.usage = dict(whole.get("usage") or {})
        except (ValueError, KeyError, TypeError, AttributeError):
            answer.problem = "not a completion"


def _kind(error: Exception, status: int | None, stream: bool) -> str:
    match error:
        case aiohttp.ClientConnectorError() | aiohttp.ConnectionTimeoutError():
            return "connect"
        case TimeoutError():
            return "timeout"
    if status is None:
        return "disconnected"
    return "broken stream" if stream else "broken answer"
