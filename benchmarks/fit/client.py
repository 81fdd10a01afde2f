"""Sends requests to a real vLLM server, and polls its counters meanwhile."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from random import Random

import aiohttp

from benchmarks.fit.recording import Request, Run
from benchmarks.trace import TracedRequest
from extproc.poll.scrape import open_session, scrape
from extproc.predict.windows import EngineCounts

POLL_INTERVAL_S = 0.25
_GIVE_UP_S = 600.0
_PAUSE_S = 0.2
"""Between two bursts: the server has become idle."""
_SPECIAL_TOKENS = 16
"""Ids below are left out of prompts: beginnings, ends, padding."""


@dataclass(frozen=True, slots=True)
class Client:
    """Sends requests to one server.

    Prompts are random token ids, so that no two share a prefix and none has to be tokenized;
    ``ignore_eos`` and ``max_tokens`` make each answer as long as it is said to be.
    """

    server: str
    """``ip:port``."""
    model: str
    """What the server calls it."""
    vocabulary: int
    """Token ids of the prompts are below this."""
    random: Random
    """Draws the prompts."""

    async def play(self, name: str, trace: Sequence[TracedRequest]) -> Run:
        """Send the requests of a trace at their times, whether or not others were answered.

        The server must be idle, and is polled meanwhile.

        Raises:
            ScrapeError: the server has no counters.
            RuntimeError: a request failed, or was not served as it was asked.
        """
        bodies = [self._body(traced) for traced in trace]

        async def send(session: aiohttp.ClientSession, started: float) -> list[Request]:
            async with asyncio.TaskGroup() as tasks:
                sent = []
                for traced, body in zip(trace, bodies, strict=True):
                    await asyncio.sleep(started + traced.at - trace[0].at - time.monotonic())
                    sent.append(tasks.create_task(_send(session, body, traced, started)))
            return [task.result() for task in sent]

        return await self._record(name, send)

    async def play_bursts(self, name: str, bursts: Sequence[Sequence[TracedRequest]]) -> Run:
        """The same for requests that are sent together, each burst when the last has ended."""

        async def send(session: aiohttp.ClientSession, started: float) -> list[Request]:
            served: list[Request] = []
            for burst in bursts:
                bodies = [self._body(traced) for traced in burst]
                async with asyncio.TaskGroup() as tasks:
                    sent = [
                        tasks.create_task(_send(session, body, traced, started))
                        for traced, body in zip(burst, bodies, strict=True)
                    ]
                served += [task.result() for task in sent]
                await asyncio.sleep(_PAUSE_S)
            return served

        return await self._record(name, send)

    async def _record(
        self, name: str, send: Callable[[aiohttp.ClientSession, float], Awaitable[list[Request]]]
    ) -> Run:
        async with (
            aiohttp.ClientSession(
                f"http://{self.server}",
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=_GIVE_UP_S),
            ) as session,
            _polls(self.server) as polls,
        ):
            started = time.monotonic()
            try:
                requests = await send(session, started)
            except ExceptionGroup as group:
                raise group.exceptions[0] from None  # one reason is enough
        return Run(name, requests, [replace(poll, at=poll.at - started) for poll in polls])

    def _body(self, traced: TracedRequest) -> bytes:
        ids = range(_SPECIAL_TOKENS, self.vocabulary)
        body = {
            "model": self.model,
            "prompt": self.random.choices(ids, k=traced.prompt_tokens),
            "max_tokens": traced.output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(body).encode()


async def _send(
    session: aiohttp.ClientSession, body: bytes, traced: TracedRequest, started: float
) -> Request:
    headers = {"content-type": "application/json"}
    first: float | None = None
    end = b""
    began = time.monotonic()
    try:
        async with session.post("/v1/completions", data=body, headers=headers) as response:
            async for chunk in response.content.iter_any():
                first = first or time.monotonic()
                end = (end + chunk)[-1024:]
            ended = time.monotonic()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise RuntimeError(f"a request failed: {error!r}") from None
    if response.status != 200 or first is None or not end.rstrip().endswith(b"data: [DONE]"):
        raise RuntimeError(f"the server answered {response.status}: {end.decode(errors='replace')}")
    usage = json.loads(end.split(b"data: ")[-2])["usage"]
    lengths = usage["prompt_tokens"], usage["completion_tokens"]
    if lengths != (traced.prompt_tokens, traced.output_tokens):
        raise RuntimeError(f"the server counts {lengths} tokens, the trace has {traced}")
    return Request(began - started, *lengths, first - began, ended - began)


@asynccontextmanager
async def _polls(server: str) -> AsyncIterator[list[EngineCounts]]:
    """Polls the server; the list grows until the end."""
    polls: list[EngineCounts] = []

    async def poll() -> None:
        due = time.monotonic()
        async with open_session(_GIVE_UP_S) as session:
            while True:
                polls.append(await _poll(session, server))
                due = max(due + POLL_INTERVAL_S, time.monotonic())
                await asyncio.sleep(due - time.monotonic())

    polling = asyncio.create_task(poll())
    try:
        yield polls
    finally:
        polling.cancel()
        with suppress(asyncio.CancelledError):
            await polling


async def _poll(session: aiohttp.ClientSession, server: str) -> EngineCounts:
    figures = await scrape(session, server, health=False)
    return figures.counts(time.monotonic())
