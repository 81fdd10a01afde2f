"""Process in place of all replicas that answers every request with a stream of tokens."""

import asyncio
import json
import re
import signal
import sys
from typing import cast

import uvloop

EVERY_S = 0.01  # seconds between two tokens of an answer
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(**fields: object) -> bytes:
    event = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "model"}
    return b"data: " + json.dumps(event | fields).encode() + b"\n\n"


_TOKEN = _chunk(
    _event(choices=[{"index": 0, "delta": {"content": " hello"}, "finish_reason": None}])
)


class Connection(asyncio.Protocol):
    """Connection of Envoy's, with one request at a time."""

    def __init__(self, answering: set["Connection"], tokens: int) -> None:
        self._answering = answering
        self._tokens = tokens
        usage = {"prompt_tokens": 900, "completion_tokens": tokens, "total_tokens": 900 + tokens}
        self._last = _chunk(_event(choices=[], usage=usage) + b"data: [DONE]\n\n") + _chunk(b"")
        self._left = 0
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        body = self._received.find(b"\r\n\r\n") + 4
        length = _LENGTH.search(self._received, 0, body)
        if body < 4 or len(self._received) < body + int(length[1] if length else 0):
            return
        self._received = b""
        self._left = self._tokens
        self._transport.write(_HEAD)
        self._answering.add(self)

    def connection_lost(self, _: Exception | None) -> None:
        self._answering.discard(self)

    def step(self) -> None:
        """Sends the next token, and the usage with the last one."""
        self._left -= 1
        self._transport.write(_TOKEN if self._left else _TOKEN + self._last)
        if not self._left:
            self._answering.discard(self)


async def serve(port: int, tokens: int) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    answering: set[Connection] = set()
    async with await loop.create_server(lambda: Connection(answering, tokens), "0.0.0.0", port):
        due = loop.time()
        while not ended.is_set():
            for connection in list(answering):
                connection.step()
            due = max(due + EVERY_S, loop.time())
            await asyncio.sleep(due - loop.time())


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2])))
