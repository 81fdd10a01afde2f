"""Speed of replicas that no poll has measured yet, learned from their first tokens."""

_PRIOR_S = 0.03  # δ: times to first token well below this change little
_MOST = 5.0  # bound of the slowness and of its inverse
_ENOUGH = 4  # first tokens after which the router reads no further streams for this purpose


class ProvisionalSpeeds:
    """Slowness of unmeasured replicas: actual ÷ predicted time to first token.

    Polls need a second to measure a replica. A fresh pool gets dozens of requests in that second,
    and slow replicas would get as many as fast ones. First tokens arrive sooner::

        slowness = (Σ actual + δ) / (Σ predicted + δ)
    """

    def __init__(self) -> None:
        self._sums: dict[int, tuple[int, float, float]] = {}  # by row: count, usual steps, seconds

    def observe(self, row: int, usual_steps: float, seconds: float) -> None:
        """Learns the replica's slowness from one time to first token.

        Args:
            row: row of the replica.
            usual_steps: predicted time to first token ÷ ``usual_step`` of the replica.
            seconds: actual time to first token.
        """
        count, steps, total = self._sums.get(row, (0, 0.0, 0.0))
        self._sums[row] = count + 1, steps + usual_steps, total + seconds

    def slowness(self, row: int, usual_step: float) -> float:
        """Returns the slowness of the replica in table row ``row``, relative to a step-time model
        whose usual step takes ``usual_step`` seconds."""
        _, steps, seconds = self._sums.get(row, (0, 0.0, 0.0))
        slowness = (seconds + _PRIOR_S) / (steps * usual_step + _PRIOR_S)
        return min(max(slowness, 1.0 / _MOST), _MOST)

    def wanted(self, row: int) -> bool:
        """True until enough first tokens of the replica in table row ``row`` are known."""
        return self._sums.get(row, (0,))[0] < _ENOUGH

    def clear(self, row: int) -> None:
        self._sums.pop(row, None)
