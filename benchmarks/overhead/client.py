"""Sends requests to Envoy over HTTP/1.1 from a process of its own; prints a line of JSON.

    python -m benchmarks.overhead.client 8080 --rate 300 --requests 3000
    python -m benchmarks.overhead.client 8080 --at-once 64 --seconds 10

``--rate`` is an open loop: requests are sent at random moments, whether or not earlier requests
were answered. ``--at-once`` is a closed loop: each connection sends its next request after an
answer. The client parses only the status and the end of an answer.
"""

import argparse
import asyncio
import gc
import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from random import Random
from time import perf_counter
from typing import cast

import numpy as np
import uvloop

_PROMPT_BYTES = 3500
_ANSWER_WITHIN_S = 60.0
_HOLD = b"x-hold: 1\r\n"
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ClientReport:
    answered: int  # with status 200
    failed: int
    seconds: float  # from the first request to the last answer
    most_at_once: int  # requests in flight at the same time
    p50_ms: float  # from sending a request to the end of its answer, of answered requests
    p95_ms: float
    p99_ms: float


def request(hold: bool = False) -> bytes:
    """Streamed chat of about a thousand tokens; ``hold`` asks the upstream for a late answer."""
    messages = [{"role": "user", "content": ("tell me " * _PROMPT_BYTES)[:_PROMPT_BYTES]}]
    body = {"model": "model", "messages": messages, "max_tokens": 200, "stream": True}
    encoded = json.dumps(body).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: envoy\r\nuser-agent: overhead\r\n"
        b"accept: text/event-stream\r\ncontent-type: application/json\r\n"
    )
    length = b"content-length: %d\r\n\r\n" % len(encoded)
    return head + (_HOLD if hold else b"") + length + encoded


class Connection(asyncio.Protocol):
    """HTTP connection that carries one request at a time."""

    def __init__(self, load: "LoadGenerator") -> None:
        self._load = load
        self._transport: asyncio.Transport | None = None
        self._sent_at: float | None = None
        self._received = b""
        self._end = 0  # of the answer, or of its current chunk; 0: the head is incomplete
        self._chunked = False  # another chunk follows

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def send(self, raw: bytes) -> None:
        assert self._transport is not None
        self._sent_at = perf_counter()
        self._transport.write(raw)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._end:
            body = self._received.find(b"\r\n\r\n") + 4
            if body < 4:
                return
            length = _LENGTH.search(self._received, 0, body)
            self._chunked = length is None
            self._end = body + int(length[1] if length else 0)
        if self._whole():
            self._complete(self._received.startswith(b"HTTP/1.1 200"))

    def _whole(self) -> bool:
        while self._chunked:
            data = self._received.find(b"\r\n", self._end) + 2
            if data < 2:
                return False
            size = int(self._received[self._end : data], 16)
            self._end = data + size + 2
            self._chunked = size > 0
        return len(self._received) >= self._end

    def connection_lost(self, _: Exception | None) -> None:
        self._load.lost(self)
        if self._sent_at is not None:
            self._complete(good=False)

    def _complete(self, good: bool) -> None:
        sent_at, self._sent_at = self._sent_at, None
        assert sent_at is not None
        self._received, self._end = b"", 0
        self._load.ended(self, perf_counter() - sent_at, good)


class LoadGenerator:
    """Sends requests to a port, over as many connections as the load needs."""

    def __init__(self, port: int, raw: bytes) -> None:
        self._port = port
        self._raw = raw
        self._idle: list[Connection] = []
        self._latencies: list[float] = []
        self._failed = 0
        self._in_flight = 0
        self._most_at_once = 0
        self._all_ended = asyncio.Event()
        self._continues: Callable[[], bool] = lambda: False  # whether the closed loop goes on
        self._connecting: set[asyncio.Task[None]] = set()

    async def at_once(self, count: int, seconds: float) -> ClientReport:
        for connection in [await self._connect() for _ in range(count)]:
            self._idle.append(connection)
        started = perf_counter()
        self._continues = lambda: perf_counter() - started < seconds
        for _ in range(count):
            self._send(self._idle.pop())
        await asyncio.sleep(seconds)
        return await self._finish(started)

    async def at_rate(self, rate: float, count: int, random: Random) -> ClientReport:
        started = due = perf_counter()
        for _ in range(count):
            due += random.expovariate(rate)
            if (early := due - perf_counter()) > 0:
                await asyncio.sleep(early)
            self._send_next()
        return await self._finish(started)

    async def _finish(self, started: float) -> ClientReport:
        await asyncio.gather(*self._connecting)
        self._all_ended.clear()
        if self._in_flight:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._all_ended.wait(), _ANSWER_WITHIN_S)
        p50, p95, p99 = 1000 * np.percentile(self._latencies or [0.0], (50, 95, 99))
        return ClientReport(
            answered=len(self._latencies),
            failed=self._failed + self._in_flight,
            seconds=perf_counter() - started,
            most_at_once=self._most_at_once,
            p50_ms=float(p50),
            p95_ms=float(p95),
            p99_ms=float(p99),
        )

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        made = await loop.create_connection(lambda: Connection(self), "127.0.0.1", self._port)
        return made[1]

    def _send_next(self) -> None:
        if self._idle:
            self._send(self._idle.pop())
            return
        task = asyncio.create_task(self._send_on_new_connection())
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _send_on_new_connection(self) -> None:
        try:
            connection = await self._connect()
        except OSError:
            self._failed += 1
        else:
            self._send(connection)

    def _send(self, connection: Connection) -> None:
        self._in_flight += 1
        self._most_at_once = max(self._most_at_once, self._in_flight)
        connection.send(self._raw)

    def lost(self, connection: Connection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)

    def ended(self, connection: Connection, seconds: float, good: bool) -> None:
        self._in_flight -= 1
        if not self._in_flight:
            self._all_ended.set()
        if not good:
            self._failed += 1
            return
        self._latencies.append(seconds)
        if self._continues():
            self._send(connection)
        else:
            self._idle.append(connection)


def main() -> int:
    parser = argparse.ArgumentParser(prog="client")
    parser.add_argument("port", type=int)
    parser.add_argument("--rate", type=float, help="requests a second")
    parser.add_argument("--requests", type=int, default=1000, help="how many, with --rate")
    parser.add_argument("--hold", action="store_true", help="ask the upstream to answer late")
    parser.add_argument("--at-once", type=int, default=1, help="requests in flight, without --rate")
    parser.add_argument("--seconds", type=float, default=1.0, help="duration, with --at-once")
    args = parser.parse_args()
    load = LoadGenerator(args.port, request(args.hold))
    gc.freeze()
    gc.disable()
    if args.rate:
        report = uvloop.run(load.at_rate(args.rate, args.requests, Random(0)))
    else:
        report = uvloop.run(load.at_once(args.at_once, args.seconds))
    print(json.dumps(asdict(report)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
