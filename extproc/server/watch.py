"""Which responses the router asks to see."""

_PER_S = 100.0
"""Responses a second, of one pool in one router: a replica that gets a hundredth of the requests is
looked at once a second."""


class Watch:
    """All responses while there are few of them, and of many so many a second.

    To be told of a response is one of three messages a request, and holds its first token up. For
    a request whose response is not looked at, the ledger knows its end, but neither which replica
    served it after a retry nor whether it failed.

    Envoy has to be told before the replica is chosen: it takes ``mode_override`` in a reply to
    headers only, and for the choice the body has to come.
    """

    def __init__(self) -> None:
        self._left = _PER_S
        self._as_of = 0.0

    def sees(self, now: float, doubtful: bool) -> bool:
        """Whether the response to a request that came just now is to be looked at.

        Args:
            now: seconds.
            doubtful: it may go to a replica that failed of late: all those are looked at, until
                that is known to be well or gets nothing.
        """
        self._left = min(self._left + (now - self._as_of) * _PER_S, _PER_S)
        self._as_of = now
        if self._left < 1.0:
            return doubtful
        self._left -= 1.0
        return True
