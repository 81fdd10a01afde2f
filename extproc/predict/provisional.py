"""Speed of replicas that no poll has measured yet, by the first tokens that a router sees."""

_DOUBT_S = 0.03  # δ: first tokens within this time tell little
_MOST = 5.0  # no replica is taken for more than 5 times as slow or as fast
_ENOUGH = 4  # first tokens, from which on the router need not read more streams for this


class ProvisionalSpeeds:
    """Slowness of unmeasured replicas: actual ÷ predicted time to first token.

    Polls need a second to measure a replica. A fresh pool gets dozens of requests in that second,
    and slow replicas would get their full share. First tokens arrive sooner. By them::

        slowness = (Σ actual + δ) / (Σ predicted + δ)
    """

    def __init__(self) -> None:
        self._sums: dict[int, tuple[int, float, float]] = {}  # count, usual steps, seconds

    def observe(self, row: int, usual_steps: float, seconds: float) -> None:
        """Adds a first token.

        Args:
            row: of its replica.
            usual_steps: predicted time to the first token, in usual steps of the replica.
            seconds: actual time to the first token.
        """
        count, steps, total = self._sums.get(row, (0, 0.0, 0.0))
        self._sums[row] = count + 1, steps + usual_steps, total + seconds

    def slowness(self, row: int, usual_step: float) -> float:
        """Returns how many times as long the replica takes as by its model, in which a usual step
        takes ``usual_step`` seconds."""
        _, steps, seconds = self._sums.get(row, (0, 0.0, 0.0))
        slowness = (seconds + _DOUBT_S) / (steps * usual_step + _DOUBT_S)
        return min(max(slowness, 1.0 / _MOST), _MOST)

    def wanted(self, row: int) -> bool:
        """True while more first tokens would tell more."""
        return self._sums.get(row, (0,))[0] < _ENOUGH

    def clear(self, row: int) -> None:
        self._sums.pop(row, None)
