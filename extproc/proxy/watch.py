"""Which responses Envoy is asked to tell of, and which streamed ones the router reads."""

_RESPONSES_PER_S = 100.0
"""Of one pool in one router: a replica that gets a hundredth of the requests is looked at once a
second."""
_CHUNKS_KEPT_S = 60.0
"""Seconds of chunks that were not read and may be later: in a quiet hour whole answers are read."""
_RESERVED = 0.5
"""Of these, the part that is kept for streams that teach."""


class Budget:
    """So much a second; what is not spent is kept, up to a limit."""

    def __init__(self, per_s: float, most: float) -> None:
        self._per_s = per_s
        self._most = self._left = most
        self._as_of = 0.0

    def left(self, now: float) -> float:
        """What may be spent at ``now``, in seconds; below zero after more was spent than that."""
        self._left = min(self._left + (now - self._as_of) * self._per_s, self._most)
        self._as_of = now
        return self._left

    def spend(self, amount: float) -> None:
        """A negative amount is given back."""
        self._left -= amount


class Watch:
    """All responses while there are few of them, and of many so many a second.

    To be told of a response is one of three messages a request, and holds its first token up. For
    a request whose response is not looked at, the ledger knows its end, but neither which replica
    served it after a retry nor whether it failed.

    Envoy has to be told before the replica is chosen: it takes ``mode_override`` in a reply to
    headers only, and for the choice the body has to come.
    """

    def __init__(self) -> None:
        self._responses = Budget(_RESPONSES_PER_S, _RESPONSES_PER_S)

    def sees(self, now: float, doubtful: bool) -> bool:
        """Whether the response to a request that came just now is to be looked at; ``doubtful``: it
        may go to a replica that failed of late. All those are, until that is known to be well or
        gets nothing."""
        if self._responses.left(now) < 1.0:
            return doubtful
        self._responses.spend(1.0)
        return True


class Reader:
    """Reads streamed answers, so many chunks a second, and rather those that teach.

    A chunk is a message to the router and one back, about 0.2 ms of its CPU. Envoy sends all chunks
    of an answer or none: it takes ``mode_override`` in a reply to headers only, and once the router
    has closed its side, Envoy lets the rest pass but the end of the request is not known any more.
    So it is decided when an answer begins, by the length it is expected to have.
    """

    def __init__(self, chunks_per_s: float) -> None:
        self._most = chunks_per_s * _CHUNKS_KEPT_S
        self._chunks = Budget(chunks_per_s, self._most)

    def reads(self, now: float, chunks: float, teaches: bool) -> bool:
        """Whether to read an answer that begins, of so many chunks as expected; if so, these are
        paid for. One ``teaches`` what the router knows little of."""
        if self._chunks.left(now) <= (0.0 if teaches else _RESERVED * self._most):
            return False
        self._chunks.spend(chunks)
        return True

    def came(self, chunks: float, expected: float) -> None:
        """An answer that was read is over: it had so many chunks, and not what was expected."""
        self._chunks.spend(chunks - expected)
