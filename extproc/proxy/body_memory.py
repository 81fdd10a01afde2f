"""Memory for the request bodies that a router holds."""

import asyncio

from extproc.request.errors import Refusal

BODY_MEMORY_BYTES = 256 * 2**20  # some 70,000 usual prompts
BODY_LIMIT_BYTES = BODY_MEMORY_BYTES // 4


class NoMemory(Refusal):
    """Refused: the body arrived too slowly, and other bodies needed its memory."""

    status = 503

    def __init__(self) -> None:
        super().__init__(
            "the request body arrived too slowly: other bodies needed its memory", code="no_memory"
        )


class TooLarge(Refusal):
    """Refused: the first ``BODY_LIMIT_BYTES`` bytes of the body do not name the model."""

    status = 413


class BodyMemory:
    """Limits the bytes of request bodies that all streams of a process hold together.

    If no memory is left for a body, bodies that wait for their next chunk are evicted, the longest
    waiting first, so that stalled clients take no memory from others. If memory is still short, the
    router queues no request and waits for no further chunk.
    """

    def __init__(self, size: int = BODY_MEMORY_BYTES) -> None:
        self.free = size  # bytes; negative while memory is short
        self._incomplete: dict[BufferedBody, None] = {}  # the longest waiting first

    def resize(self, body: "BufferedBody", size: int, more_comes: bool = False) -> None:
        """Counts a body with ``size`` bytes, and evicts others if it grew and memory is short.
        ``more_comes``: the body waits for its next chunk, and may be evicted meanwhile."""
        by, body.size = size - body.size, size
        self.free -= by
        self._incomplete.pop(body, None)
        while by > 0 and self.free < 0 and self._incomplete:
            next(iter(self._incomplete)).evict()
        if more_comes:
            self._incomplete[body] = None


class BufferedBody:
    """Router's only copy of a request's body; counts in ``BodyMemory`` until :meth:`release`."""

    def __init__(self, memory: BodyMemory) -> None:
        self.whole = False  # the end of the body was received
        self.changed = False  # the replica gets another body than the client sent
        self.evicted: asyncio.Future[Refusal] | None = None  # None: no further chunk is awaited
        self.size = 0  # bytes, as counted in ``memory``
        self._memory = memory
        self._chunks: list[bytes] = []

    def add(self, chunk: bytes, whole: bool = True) -> None:
        """Appends a chunk. A body that is not ``whole`` then waits for its next chunk."""
        self._chunks.append(chunk)
        self.whole = whole
        if not whole and self.evicted is None:
            self.evicted = asyncio.get_running_loop().create_future()
        self._memory.resize(self, self.size + len(chunk), more_comes=not whole)

    @property
    def data(self) -> bytes:
        if len(self._chunks) != 1:
            self._chunks = [b"".join(self._chunks)]
        return self._chunks[0]

    def replace(self, data: bytes) -> None:
        if data is not self.data:
            self.changed = True
            self._chunks = [data]
            self._memory.resize(self, len(data))

    def take(self) -> bytes:
        """Returns the bytes and drops them; ``BodyMemory`` counts them until :meth:`release`."""
        data, self._chunks = self.data, []
        return data

    def evict(self) -> None:
        self._chunks = []
        self._memory.resize(self, 0)
        if self.evicted is not None:
            self.evicted.set_result(NoMemory())

    def release(self) -> None:
        self.whole = False
        self.evicted = None
        self._chunks = []
        self._memory.resize(self, 0)
