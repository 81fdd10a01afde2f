"""Which replicas look alive and are not: their polls stopped, or their engine does."""

from extproc.fleet.state import ReplicaState

_SILENT = 5.0
"""Seconds without news of a replica while there was news of others: longer than any pause between
two polls of one that answers."""
_STUCK = 10.0
"""Seconds in which an engine with work takes no step: longer than any step."""


class Stalls:
    """Notes, poll by poll, when replicas were last heard of and last made progress."""

    def __init__(self) -> None:
        self._heard: dict[str, float] = {}
        self._moved: dict[str, tuple[float, float]] = {}
        """Steps, and since when they are as many."""

    def heard(self, state: ReplicaState, now: float) -> None:
        """News of a replica came."""
        self._heard[state.id] = now
        steps, _ = self._moved.get(state.id, (-1.0, now))
        if state.steps != steps or not (state.running or state.waiting):
            self._moved[state.id] = state.steps, now

    def forget(self, replica: str) -> None:
        """It is no member any more."""
        self._heard.pop(replica, None)
        self._moved.pop(replica, None)

    def reasons(self, since: float) -> dict[str, str]:
        """Why each replica that stalled is one, as of the last news of any.

        Args:
            since: from when on there has been news without a break.
        """
        now = max(self._heard.values(), default=0.0)
        silent = {
            name: f"no news of it for {_SILENT:.0f} s, while others were heard of"
            for name, heard_at in self._heard.items()
            if now - max(heard_at, since) > _SILENT
        }
        stuck = {
            name: f"no engine step for {_STUCK:.0f} s, though it has requests"
            for name, (_, moved_at) in self._moved.items()
            if self._heard[name] - moved_at > _STUCK
        }
        return stuck | silent
