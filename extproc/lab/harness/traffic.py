"""Open-loop load client for OpenAI's API: sends requests when due, parses complete answers."""

import asyncio
import json
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Self

import aiohttp

from extproc.ground.clock import Clock, monotonic
from extproc.lab.harness.samples import Sample
from extproc.lab.simulator import OUTPUT_TOKENS_HEADER, SERVED_BY_HEADER

POLICY_HEADER = "x-extproc-policy"
_CONNECT_S = 10.0
_ANSWER_S = 300.0
_KEEP_ALIVE_S = 4.0  # below the 5 s of uvicorn, which serves vLLM
_ERROR_BYTES = 200
_USAGE_LINES = 16  # last lines of a stream, searched for the usage


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """HTTP request, due ``at_s`` seconds after the start of its run."""

    at_s: float
    request_id: str
    path: str
    body: bytes
    stream: bool  # the body asks for a stream
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Answer:
    """Outcome of a request as its client sees it; times in seconds."""

    request_id: str
    ttft_s: float | None = None  # from sending to the first token of a stream
    completion_s: float = 0.0  # from sending to the end or failure; 0 until then
    problem: str = ""  # kind of failure, such as `error event`; empty if the answer is complete
    error: str = ""  # beginning of an error response, or the exception
    sent_at: float = 0.0  # by the client's clock
    late_s: float = 0.0  # from the due time to sending
    status: int | None = None
    replica: str | None = None  # from the response header `x-served-by`
    usage: dict[str, Any] = field(default_factory=dict)
    gaps_s: "array[float]" = field(default_factory=lambda: array("d"))  # between chunks with tokens
    chunks: int = 0

    @property
    def ok(self) -> bool:
        return not self.problem

    @property
    def account(self) -> str:
        """Kind of failure and text of the error; empty if the answer is complete."""
        return f"{self.problem}: {self.error}" if self.error else self.problem

    def tokens(self, of: str) -> int | None:
        """Return the server's token count for ``prompt`` or ``completion``; None: unknown."""
        count = self.usage.get(f"{of}_tokens")
        return count if isinstance(count, int) else None


class Client:
    """HTTP client, used within an ``async with`` block; answers may take ``timeout_s`` seconds."""

    def __init__(self, url: str, timeout_s: float = _ANSWER_S, clock: Clock = monotonic) -> None:
        self.answers: dict[str, Answer] = {}  # by request id, in the order of sending
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

    async def run(self, requests: Iterable[TimedRequest]) -> list[Answer]:
        """Send each request when it is due; return the answers once the last has ended."""
        started = self._clock()
        async with asyncio.TaskGroup() as tasks:
            sent = []
            for request in requests:
                due = started + request.at_s
                await asyncio.sleep(max(due - self._clock(), 0.0))
                sent.append(tasks.create_task(self._send(request, due)))
        return [task.result() for task in sent]

    async def _send(self, request: TimedRequest, due: float) -> Answer:
        began = self._clock()
        answer = Answer(request.request_id, sent_at=began, late_s=began - due)
        self.answers[request.request_id] = answer
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        chunks: list[bytes] = []
        times: list[float] = []
        broken: Exception | None = None
        url = self._url + request.path
        headers = {
            **request.headers,
            "content-type": "application/json",
            "x-request-id": request.request_id,
        }
        try:
            async with self._session.post(url, data=request.body, headers=headers) as response:
                answer.status = response.status
                answer.replica = response.headers.get(SERVED_BY_HEADER)
                async for chunk in response.content.iter_any():
                    chunks.append(chunk)
                    times.append(self._clock())
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            broken = error
        answer.completion_s = self._clock() - began
        answer.chunks = len(chunks)
        _judge(answer, request.stream, chunks, times)
        if broken is not None:
            answer.problem = _kind(broken, answer.status, request.stream)
            answer.error = str(broken) or type(broken).__name__
        self.in_flight -= 1
        self.failed += not answer.ok
        return answer


async def send_all(
    url: str, samples: Iterable[Sample], run: str, policy: str | None = None
) -> list[Answer]:
    """Send samples at their times, with the ids ``run-001``, ``run-002``, …, under a policy."""
    headers = {} if policy is None else {POLICY_HEADER: policy}
    async with Client(url) as client:
        return await client.run(
            to_send(sample, f"{run}-{number:03}", run, headers)
            for number, sample in enumerate(samples, 1)
        )


def to_send(
    sample: Sample, request_id: str, run: str, headers: Mapping[str, str] | None = None
) -> TimedRequest:
    """Return the HTTP request of a sample; the prompt begins with ``run``."""
    every = {**(headers or {}), OUTPUT_TOKENS_HEADER: str(sample.output_tokens)}
    body = json.dumps(sample.body(run)).encode()
    return TimedRequest(sample.at_s, request_id, sample.path, body, sample.stream, every)


def _judge(answer: Answer, stream: bool, chunks: Sequence[bytes], times: Sequence[float]) -> None:
    if answer.status != 200:
        answer.problem = f"status {answer.status}"
        answer.error = b"".join(chunks)[:_ERROR_BYTES].decode(errors="replace")
    elif stream:
        read_stream(answer, chunks, times)
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
        case _ if status is None:
            return "disconnected"
    return "broken stream" if stream else "broken answer"


def read_stream(answer: Answer, chunks: Sequence[bytes], times: Sequence[float]) -> None:
    """Record first token, gaps, usage and problem of a stream whose chunks arrived at ``times``.

    All chunks between the first and the last token are assumed to contain tokens.
    """
    lines = b"".join(chunks).splitlines(keepends=True)
    try:
        usage, problem = _usage(lines), _problem(lines)
        first, last = (_token_in(lines, at) for at in (range(len(lines)), range(len(lines))[::-1]))
    except (AttributeError, TypeError):  # the events are not in OpenAI's form
        answer.problem = "not a completion"
        return
    answer.usage, answer.problem = usage, problem
    if first is None or last is None:
        answer.problem = problem or ("" if usage else "not a completion")
        return
    starts, arrived = [0, *accumulate(map(len, lines))], list(accumulate(map(len, chunks)))
    begin, end = (
        bisect_left(arrived, starts[line] + len(lines[line].rstrip())) for line in (first, last)
    )
    answer.ttft_s = times[begin] - answer.sent_at
    answer.gaps_s.extend(later - earlier for earlier, later in pairwise(times[begin : end + 1]))


def _token_in(lines: Sequence[bytes], order: Iterable[int]) -> int | None:
    return next((number for number in order if _has_token(_event(lines[number]))), None)


def _usage(lines: Sequence[bytes]) -> dict[str, Any]:
    reported = (_event(line).get("usage") for line in reversed(lines[-_USAGE_LINES:]))
    return next((usage for usage in reported if isinstance(usage, dict)), {})


def _problem(lines: Sequence[bytes]) -> str:
    events = [_event(line) for line in lines if b'"error"' in line]
    if any(event.get("error") or event.get("object") == "error" for event in events):
        return "error event"
    return "" if b"".join(lines[-2:]).rstrip().endswith(b"data: [DONE]") else "broken stream"


def _event(line: bytes) -> dict[str, Any]:
    """JSON object of a line; empty if the line is no event, or an incomplete event."""
    try:
        event = json.loads(line.removeprefix(b"data:")) if line.startswith(b"data:") else {}
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}


def _has_token(event: dict[str, Any]) -> bool:
    return any(
        choice.get("text") or any(({**(choice.get("delta") or {}), "role": None}).values())
        for choice in event.get("choices") or []
    )
