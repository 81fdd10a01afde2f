"""When replicas were last heard of, and which of them fell silent."""

SILENT_AFTER_S = 5.0
"""Seconds without news: polls of a replica that answers are closer, late ones too, for
``poll.timeout_s`` is bounded by it."""


class News:
    """Notes when news of each replica came.

    When nothing at all is heard, pollers or Redis are gone: the replicas are still there. So one
    is silent only beside others that are heard of.
    """

    def __init__(self, now: float) -> None:
        self.latest = self.since = now
        """When the last news of any came, and from when on there has been news without a break; at
        first, the start."""
        self._heard: dict[str, float] = {}

    def heard(self, replica: str, now: float) -> None:
        """News of a replica came."""
        if now - self.latest > SILENT_AFTER_S:
            self.since = now
        self.latest = self._heard[replica] = now

    def forget(self, replica: str) -> None:
        """It is no member any more."""
        self._heard.pop(replica, None)

    def of(self, replica: str) -> float:
        """When it was last heard of.

        Raises:
            KeyError: it never was.
        """
        return self._heard[replica]

    def silent(self, after: float) -> list[str]:
        """Replicas not heard of for more than ``after`` seconds, in which others were without a
        break."""
        if self.latest - self.since < after:
            return []
        now = max(self._heard.values(), default=0.0)
        return [name for name, at in self._heard.items() if now - at > after]
