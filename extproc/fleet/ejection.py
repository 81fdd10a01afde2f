"""Ejection of a replica on which requests fail, and the trials that end it.

Envoy calls this mechanism outlier detection.
"""

from dataclasses import dataclass
from math import ceil, inf, log2

TOLERATED = 3  # consecutive failures that eject a replica
FIRST_EJECTION_S = 1.0  # doubles with every failure that follows
LONGEST_EJECTION_S = 30.0
_MOST_DOUBLINGS = ceil(log2(LONGEST_EJECTION_S / FIRST_EJECTION_S))  # until the longest is reached


@dataclass(slots=True)
class Ejection:
    """Consecutive failures of one replica, and the ejection that they cause.

    The replica gets no request until the ejection ends. Then the next request is a trial, and the
    replica is ejected again until the outcome of the trial is known, at most for as long as before.
    A success ends the ejection; a failed trial doubles its time.
    """

    failures: int = 0  # since the last success
    failed_at: float = -inf  # last failure, in seconds on the clock
    until: float = -inf  # −∞: not ejected since the last success
    on_trial: bool = False  # True: a trial is in flight

    @property
    def pending(self) -> bool:
        """True if the replica is ejected, or has not succeeded since an ejection."""
        return self.until > -inf

    def active(self, now: float) -> bool:
        return now < self.until

    def excludes(self, now: float, response_visible: bool) -> bool:
        """Returns True if the replica gets no request now: without a visible response, a request
        cannot be a trial."""
        return self.active(now) if response_visible else self.pending

    def counts(self, now: float) -> bool:
        """Returns True if a failure counts: during an ejection, only that of a trial does."""
        return self.on_trial or not self.active(now)

    def failed(self, now: float, may_eject: bool) -> float:
        """Counts a failure; returns the seconds for which it ejects the replica, or 0.

        ``may_eject``: the pool may have one more ejected replica.
        """
        self.failures += 1
        self.failed_at, self.on_trial = now, False
        if self.failures < TOLERATED or not (self.pending or may_eject):
            return 0.0
        self.until = now + self._seconds()
        return self._seconds()

    def begin_trial(self, now: float) -> None:
        """Ejects the replica until a trial's outcome is known, at most for as long as before."""
        self.on_trial, self.until = True, now + self._seconds()

    def _seconds(self) -> float:
        doublings = min(self.failures - TOLERATED, _MOST_DOUBLINGS)
        return min(FIRST_EJECTION_S * 2.0**doublings, LONGEST_EJECTION_S)
