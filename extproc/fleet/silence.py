"""Which replicas fell silent, beside others that are heard of."""

from extproc.replica_state import SILENT_AFTER_S


class Silence:
    """Notes when news of each replica came.

    When nothing at all is heard, pollers or Redis are gone: the replicas are still there. So one
    is silent only beside others that are heard of.
    """

    def __init__(self, now: float) -> None:
        self.heard_at = self._since = now
        """When the last news of any came; at first, the start."""
        self._heard: dict[str, float] = {}

    def heard(self, replica: str, now: float) -> None:
        """News of a replica came."""
        if now - self.heard_at > SILENT_AFTER_S:
            self._since = now
        self.heard_at = self._heard[replica] = now

    def forget(self, replica: str) -> None:
        """It is no member any more."""
        self._heard.pop(replica, None)

    def silent(self, after: float) -> list[str]:
        """Replicas not heard of for more than ``after`` seconds, in which others were without a
        break."""
        if self.heard_at - self._since < after:
            return []
        now = max(self._heard.values(), default=0.0)
        return [name for name, at in self._heard.items() if now - at > after]
