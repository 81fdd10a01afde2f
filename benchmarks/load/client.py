"""An open-loop client: requests leave at their times, whatever became of those before."""

import asyncio
import json
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import aiohttp

from benchmarks.load import stream
from benchmarks.load.plan import Planned
from benchmarks.load.target import Target
from extproc.clock import Clock
from extproc.simulator.server import SERVED_BY_HEADER

_CONNECT_WITHIN_S = 10.0
_KEEP_ALIVE_S = 4.0
"""Idle connections are closed before uvicorn, which serves vLLM, closes them: after 5 s."""


def connections(timeout_s: float) -> aiohttp.ClientSession:
    """As many as it takes; a whole answer may take ``timeout_s``."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_WITHIN_S),
    )


@dataclass(slots=True)
class Sent:
    """What became of a request, as its client saw it; times in seconds."""

    at_s: float
    """When it was due, from the start."""
    late_s: float
    """How much later it was sent."""
    endpoint: str
    streamed: bool
    prompt_tokens: int
    """By the trace."""
    max_tokens: int | None
    planned_output_tokens: int
    """By the trace."""
    request_id: str
    counted_prompt_tokens: int | None = None
    """By the server."""
    output_tokens: int | None = None
    """Generated, by the server's word."""
    ttft_s: float | None = None
    """From sending; None where the answer was not streamed."""
    completion_s: float | None = None
    """From sending to the end of the answer; None where it failed."""
    failed_after_s: float | None = None
    gaps_s: dict[str, float] | None = None
    """Between chunks with tokens: mean, p99, max."""
    status: int | None = None
    error: str | None = None
    """What kind of failure; None: the answer is whole."""
    replica: str | None = None
    """As its response header ``x-served-by`` says."""
    predicted_ttft_s: float | None = None
    """For who knows the router's decision."""
    predicted_completion_s: float | None = None


@dataclass(slots=True)
class Traffic:
    """A run, while it goes on and after."""

    sent: list[Sent] = field(default_factory=list)
    gaps_s: "array[float]" = field(default_factory=lambda: array("f"))
    """Between chunks with tokens, of all whole streams."""
    chunks: int = 0
    """Received, of streams."""
    in_flight: int = 0
    most_in_flight: int = 0
    ended: int = 0
    failed: int = 0
    ended_at_s: float = 0.0
    """When the last one ended, from the start."""

    def begin(self, sent: Sent) -> None:
        """A request is sent."""
        self.sent.append(sent)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)

    def end(self, sent: Sent, took_s: float) -> None:
        """It has ended."""
        if sent.error is None:
            sent.completion_s = took_s
        else:
            sent.failed_after_s = took_s
            self.failed += 1
        self.in_flight -= 1
        self.ended += 1
        self.ended_at_s = max(self.ended_at_s, sent.at_s + sent.late_s + took_s)


class Client:
    """Sends requests to one server."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        target: Target,
        salt: str,
        run: str,
        headers: dict[str, str],
        clock: Clock,
    ) -> None:
        """Takes the prompts' ``salt``, the ``run`` in request ids, and every request's headers."""
        self.traffic = Traffic()
        self._session = session
        self._url = url
        self._target = target
        self._salt = salt
        self._run = run
        self._headers = headers
        self._clock = clock

    async def run(self, plan: Iterable[Planned]) -> None:
        """Send all of them, in the order of their times, and wait for the last answer."""
        started = self._clock()
        async with asyncio.TaskGroup() as tasks:
            for planned in plan:
                await asyncio.sleep(max(started + planned.at_s - self._clock(), 0.0))
                tasks.create_task(self._send(planned, started))

    async def _send(self, planned: Planned, started: float) -> None:
        body = json.dumps(planned.body(self._target, self._salt)).encode()
        began = self._clock()
        sent = Sent(
            at_s=planned.at_s,
            late_s=began - started - planned.at_s,
            endpoint=planned.endpoint,
            streamed=planned.streamed,
            prompt_tokens=planned.traced.prompt_tokens,
            max_tokens=planned.max_tokens,
            planned_output_tokens=planned.traced.output_tokens,
            request_id=f"load-{self._run}-{planned.number:05}",
        )
        self.traffic.begin(sent)
        try:
            ended = await self._exchange(planned, body, sent, began)
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            sent.error, ended = _kind(error, sent), self._clock()
        self.traffic.end(sent, ended - began)

    async def _exchange(self, planned: Planned, body: bytes, sent: Sent, began: float) -> float:
        """Returns when the last byte came."""
        headers = {
            **self._headers,
            **planned.headers,
            "content-type": "application/json",
            "x-request-id": sent.request_id,
        }
        async with self._session.post(
            self._url + planned.path, data=body, headers=headers
        ) as response:
            sent.status = response.status
            sent.replica = response.headers.get(SERVED_BY_HEADER)
            if response.status == 200 and planned.streamed:
                return await self._read_stream(response.content, sent, began)
            answer = await response.read()
        ended = self._clock()
        if response.status == 200:
            _whole(answer, sent)
        else:
            sent.error = f"status {response.status}"
        return ended

    async def _read_stream(self, content: aiohttp.StreamReader, sent: Sent, began: float) -> float:
        chunks, times = [], []
        try:
            async for chunk in content.iter_any():
                chunks.append(chunk)
                times.append(self._clock())
        finally:
            ended = self._clock()
            self.traffic.chunks += len(chunks)
            self._judge(stream.read(chunks, times), sent, began)
        return ended

    def _judge(self, streamed: stream.Streamed, sent: Sent, began: float) -> None:
        if streamed.first_at is not None:
            sent.ttft_s = streamed.first_at - began
        sent.gaps_s = _summed(streamed.gaps_s)
        sent.error = streamed.problem
        if sent.error is None:
            self.traffic.gaps_s.extend(streamed.gaps_s)
        _counts(streamed.usage, sent)


def _whole(answer: bytes, sent: Sent) -> None:
    """Reads an answer that was not streamed."""
    try:
        read = json.loads(answer)
        _counts(read["usage"], sent)
        sent.error = None if read["choices"] else "not a completion"
    except (ValueError, KeyError, TypeError, AttributeError):
        sent.error = "not a completion"


def _counts(usage: dict[str, Any], sent: Sent) -> None:
    sent.counted_prompt_tokens = _count(usage.get("prompt_tokens"))
    sent.output_tokens = _count(usage.get("completion_tokens"))


def _count(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _kind(error: Exception, sent: Sent) -> str:
    """What kind of failure an exception is."""
    match error:
        case aiohttp.ClientConnectorError() | aiohttp.ConnectionTimeoutError():
            return "connect"
        case TimeoutError():
            return "timeout"
    if sent.status is None:
        return "disconnected"
    return "broken stream" if sent.streamed else "broken answer"


def _summed(gaps: list[float]) -> dict[str, float] | None:
    if not gaps:
        return None
    ordered = sorted(gaps)
    p99 = ordered[ceil(0.99 * len(ordered)) - 1]
    return {"mean": sum(ordered) / len(ordered), "p99": p99, "max": ordered[-1]}
