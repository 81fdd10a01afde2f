"""Whether a poller polls, and whether anybody hears of it."""

from collections.abc import Callable, Iterable

from extproc.ground.clock import Clock
from extproc.ground.outage_log import OutageLog
from extproc.share.leases import Leases

_STUCK_S = 10.0
"""Seconds without a round of all replicas: five times as long as one takes whose every question to
Redis is answered at the last moment."""


class Health:
    """What is known of a poller's pools."""

    def __init__(self, pools: Iterable[str], clock: Clock) -> None:
        self._clock = clock
        self._starting = set(pools)
        self._pools: dict[str, tuple[Leases, OutageLog, Callable[[], Iterable[str]]]] = {}

    def watch(
        self, pool: str, leases: Leases, outage: OutageLog, unlisted: Callable[[], Iterable[str]]
    ) -> None:
        """A pool is about to be polled; the last of these names the Services that Kubernetes has
        not told of yet."""
        self._starting.discard(pool)
        self._pools[pool] = leases, outage, unlisted

    def live(self) -> str:
        """Why it has to be started again: it hangs. Empty where it polls, with Redis or without."""
        now = self._clock()
        return "; ".join(
            f"pool {pool}: no round of its replicas for {now - leases.tended_at:.0f} s"
            for pool, (leases, *_) in self._pools.items()
            if leases.tended_at is not None and now - leases.tended_at > _STUCK_S
        )

    def ready(self) -> str:
        """Why nobody hears of what it sees; empty where routers do."""
        pools = self._pools.items()
        starting = self._starting | {pool for pool, (one, *_) in pools if one.tended_at is None}
        reasons = [f"pool {pool}: no round of its replicas yet" for pool in starting]
        for pool, (_, outage, unlisted) in pools:
            reasons += [f"pool {pool}: redis is lost"] if outage.problem else []
            reasons += [f"pool {pool}: {one} was never listed: see the log" for one in unlisted()]
        return "; ".join(reasons) or self.live()
