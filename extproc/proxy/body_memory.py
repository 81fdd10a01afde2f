"""Memory for request bodies that wait in the router."""

MOST_HELD = 256 * 2**20  # bytes: 32 of the largest bodies, or some 70,000 usual prompts


class BodyMemory:
    """Bytes of request bodies that all streams of a process hold.

    While they are more than they may be, no request waits for a replica, nor for more of its body.
    """

    def __init__(self, size: int = MOST_HELD) -> None:
        self.free = size  # bytes


class Body:
    """A request's body: the router holds one copy of it, which counts until it is released."""

    def __init__(self, memory: BodyMemory) -> None:
        self.changed = False  # the replica gets another than the client sent
        self._memory = memory
        self._chunks: list[bytes] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._count(self._size + len(chunk))

    @property
    def data(self) -> bytes:
        if len(self._chunks) != 1:
            self._chunks = [b"".join(self._chunks)]
        return self._chunks[0]

    def change(self, data: bytes) -> None:
        """Holds what the replica gets in place of what the client sent."""
        self.changed = data is not self.data
        self._chunks = [data]
        self._count(len(data))

    def take(self) -> bytes:
        """Hands the bytes over to whoever writes them; they still count."""
        data, self._chunks = self.data, []
        return data

    def release(self) -> None:
        self._chunks = []
        self._count(0)

    def _count(self, size: int) -> None:
        self._memory.free += self._size - size
        self._size = size
