"""Memory for request bodies that wait in the router."""

import asyncio

from extproc.request.errors import Refusal

MOST_HELD = 256 * 2**20  # bytes: 32 of the largest bodies, or some 70,000 usual prompts
MOST_EACH = MOST_HELD // 4  # bytes of one body


class NoMemory(Refusal):
    """A body is not whole, and others need the memory that it takes."""

    status = 503
    kind = "service_unavailable_error"
    retry_after = 1

    def __init__(self) -> None:
        super().__init__(
            "the request body came too slowly while many others came", code="no_memory"
        )


class TooLarge(Refusal):
    """A body names no model in as much of it as one request may have in the router."""

    status = 413
    kind = "invalid_request_error"

    def __init__(self) -> None:
        message = f"the model is not named in the first {MOST_EACH} bytes of the body: put it first"
        super().__init__(message, "model", "body_too_large")


class BodyMemory:
    """Bytes of request bodies that all streams of a process hold.

    Where a body finds none left, those that wait for their next chunk are dropped, the one that
    waits longest first: clients that stall take memory from nobody. If that is not enough, no
    request waits for a replica, nor for more of its body.
    """

    def __init__(self, size: int = MOST_HELD) -> None:
        self.free = size  # bytes
        self._unfinished: dict[BufferedBody, None] = {}

    def resize(self, body: "BufferedBody", by: int, more_comes: bool) -> None:
        """Counts that a body grew, and drops others if it must."""
        self.free -= by
        self._unfinished.pop(body, None)
        for stalled in [*self._unfinished] if self.free < 0 else ():
            stalled.drop()
            if self.free >= 0:
                break
        if more_comes:
            self._unfinished[body] = None


class BufferedBody:
    """A request's body: the router holds one copy of it, which counts until it is released."""

    def __init__(self, memory: BodyMemory) -> None:
        self.changed = False  # the replica gets another than the client sent
        self.dropped: asyncio.Future[Refusal] | None = None  # done when it gives way to others
        self._memory = memory
        self._chunks: list[bytes] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, chunk: bytes, more_comes: bool = False) -> None:
        """Holds what came; ``more_comes``: it waits for its next chunk."""
        self._chunks.append(chunk)
        if more_comes and self.dropped is None:
            self.dropped = asyncio.get_running_loop().create_future()
        self._resize(self._size + len(chunk), more_comes)

    @property
    def data(self) -> bytes:
        if len(self._chunks) != 1:
            self._chunks = [b"".join(self._chunks)]
        return self._chunks[0]

    def change(self, data: bytes) -> None:
        self.changed = data is not self.data
        self._chunks = [data]
        self._resize(len(data))

    def take(self) -> bytes:
        """Hands the bytes over to whoever writes them; they still count."""
        data, self._chunks = self.data, []
        return data

    def drop(self) -> None:
        self._chunks = []
        self._resize(0)
        if self.dropped is not None:
            self.dropped.set_result(NoMemory())

    def release(self) -> None:
        self.dropped = None
        self._chunks = []
        self._resize(0)

    def _resize(self, size: int, more_comes: bool = False) -> None:
        by, self._size = size - self._size, size
        self._memory.resize(self, by, more_comes)
