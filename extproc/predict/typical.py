"""What replicas in general turned out to be, against their profiles."""

from statistics import median


class Typical:
    """The median, over the replicas measured, of actual ÷ expected time.

    It is expected of a replica that nothing was measured on yet. Where nobody named a profile, the
    default one is wrong for all of them alike; and a replica that looks slow beside others, whose
    profiles were too slow as well and have been put right, would never be tried.

    A replica that was measured is in the median it is told, which does no harm: what was measured
    of it weighs a hundred times as much, and when that fades it leaves the median first.
    """

    def __init__(self) -> None:
        self._ratios: dict[str, float] = {}
        self._reports = 0
        self.value = 1.0
        """The median; 1 before any replica was measured."""

    def report(self, replica: str, ratio: float | None) -> None:
        """What a replica was measured to be; None: not yet."""
        if ratio is None:
            self._ratios.pop(replica, None)
        else:
            self._ratios[replica] = ratio
        self._reports += 1
        if self._reports >= len(self._ratios):  # once a round is soon enough
            self._reports = 0
            self.value = median(self._ratios.values()) if self._ratios else 1.0
