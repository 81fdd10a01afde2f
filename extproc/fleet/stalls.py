"""Which replicas look alive and are not: their polls stopped, or their engine does."""

from extproc.fleet.news import News
from extproc.fleet.state import ReplicaState

_SILENT = 5.0
"""Seconds without news of a replica while there was news of others: longer than any pause between
two polls of one that answers."""
_STUCK = 10.0
"""Seconds in which an engine with work takes no step: longer than any step."""


class Stalls:
    """Notes, poll by poll, when replicas last made progress."""

    def __init__(self, news: News) -> None:
        """``news``: when they were heard of."""
        self._news = news
        self._moved: dict[str, tuple[float, float]] = {}
        """Steps, and since when they are as many."""

    def heard(self, state: ReplicaState, now: float) -> None:
        """News of a replica came."""
        steps, _ = self._moved.get(state.id, (-1.0, now))
        if state.steps != steps or not (state.running or state.waiting):
            self._moved[state.id] = state.steps, now

    def forget(self, replica: str) -> None:
        """It is no member any more."""
        self._moved.pop(replica, None)

    def reasons(self) -> dict[str, str]:
        """Why each replica that stalled is one, as of the last news of any."""
        silent = dict.fromkeys(
            self._news.silent(_SILENT),
            f"no news of it for {_SILENT:.0f} s, while others were heard of",
        )
        stuck = {
            name: f"no engine step for {_STUCK:.0f} s, though it has requests"
            for name, (_, moved_at) in self._moved.items()
            if self._news.of(name) - moved_at > _STUCK
        }
        return stuck | silent
