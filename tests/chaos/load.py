"""Requests at a steady rate, in an open loop: arrivals do not wait for answers."""

import asyncio
import time
from dataclasses import dataclass
from random import Random
from types import TracebackType
from typing import Any, Self

import aiohttp

from extproc.demo.stack import MODEL

_GIVE_UP_S = 60.0
_STREAMED = 0.7
_PROMPT_WORDS = (20, 200)
_OUTPUT_TOKENS = (8, 64)


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a request, as its client saw it."""

    request_id: str
    sent_at: float
    """On the monotonic clock."""
    ttft_s: float | None
    """Seconds to the first byte; None where it was not streamed or none came."""
    completion_s: float
    begun: bool
    """Whether the headers of an answer with status 200 had come."""
    problem: str
    """Empty for a whole answer with status 200."""


class Load:
    """Sends chats, streamed and whole, short enough for two cores, while the block runs.

    At the block's end it sends no more, and waits for those that are not answered yet.
    """

    def __init__(self, url: str, per_second: float, random: Random) -> None:
        self.answers: list[Answer] = []
        self.sent: dict[str, float] = {}
        """When each request left, by its id; those not answered yet too."""
        self._url = url
        self._per_second = per_second
        self._random = random
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=_GIVE_UP_S),
        )
        self._open: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._sender = asyncio.create_task(self._send())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._sender.cancel()
        if kind is not None:
            for task in self._open:
                task.cancel()
        await asyncio.gather(*self._open, return_exceptions=kind is not None)
        await self._session.close()

    async def _send(self) -> None:
        at = time.monotonic()
        while True:
            await asyncio.sleep(at - time.monotonic())
            task = asyncio.create_task(self._one(f"chaos-{len(self.sent):06}"))
            self._open.add(task)
            task.add_done_callback(self._open.discard)
            at += self._random.expovariate(self._per_second)

    async def _one(self, request_id: str) -> None:
        stream = self._random.random() < _STREAMED
        began = self.sent[request_id] = time.monotonic()
        first, begun, end, problem = None, False, b"", ""
        try:
            async with self._session.post(
                f"{self._url}/v1/chat/completions",
                json=self._body(request_id, stream),
                headers={
                    "x-request-id": request_id,
                    "x-simulate-output-tokens": str(self._random.randint(*_OUTPUT_TOKENS)),
                },
            ) as response:
                begun = response.status == 200
                async for chunk in response.content.iter_any():
                    first = first or time.monotonic()
                    end = (end + chunk)[-300:]
            problem = _problem(response.status, end, stream)
        except (aiohttp.ClientError, TimeoutError) as error:
            problem = f"{type(error).__name__}: {error}"
        self.answers.append(
            Answer(
                request_id=request_id,
                sent_at=began,
                ttft_s=first - began if first and stream else None,
                completion_s=time.monotonic() - began,
                begun=begun,
                problem=problem,
            )
        )

    def _body(self, request_id: str, stream: bool) -> dict[str, Any]:
        words = " word" * self._random.randint(*_PROMPT_WORDS)
        return {
            "model": MODEL,
            "stream": stream,
            "messages": [{"role": "user", "content": request_id + words}],
        }


def _problem(status: int, end: bytes, stream: bool) -> str:
    if status != 200:
        return f"status {status}: {end[:200].decode(errors='replace')}"
    whole = end.rstrip().endswith(b"data: [DONE]" if stream else b"}")
    return "" if whole else "the answer ended early"
