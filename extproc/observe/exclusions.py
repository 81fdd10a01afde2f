"""Since when replicas have been excluded, and log lines about changes."""

import logging

from extproc.fleet.exclusion_reasons import DRAINING, FAILING, FULL
from extproc.fleet.fleet import Fleet
from extproc.ground.clock import time_of_day

logger = logging.getLogger(__name__)

_NOT_LOGGED = FAILING.name, FULL.name
"""An ejection is logged when it begins, with its time. A full replica may change every second."""


class Exclusions:
    """Excluded replicas of a pool; the resolution is the time between two looks, a second."""

    def __init__(self) -> None:
        self._excluded: dict[str, tuple[str, float]] = {}  # reason, and since when

    def look(self, fleet: Fleet, now: float) -> dict[str, str]:
        """Compares the fleet with the last look; ``now``: seconds since the epoch.

        Returns the reason of each excluded replica.
        """
        reasons = dict(fleet.eligibility.exclusions())
        for replica in self._excluded.keys() - reasons.keys():
            reason, since = self._excluded.pop(replica)
            if replica in fleet.members and reason not in _NOT_LOGGED:
                text = f"replica {replica} is used again after {now - since:.0f} s"
                logger.info(text, extra={"reason": reason})
        for replica, reason in reasons.items():
            if self._excluded.get(replica, ("",))[0] == reason:
                continue
            self._excluded[replica] = reason, now
            state = fleet.members.get(replica)
            extra = {"problem": state.problem} if state and state.problem else {}
            if reason == DRAINING.name:
                logger.info(f"replica {replica} excluded: draining")
            elif reason not in _NOT_LOGGED:
                logger.warning(f"replica {replica} excluded: {reason}", extra=extra)
        return reasons

    def since(self, replica: str) -> str:
        """Time of day since when a replica has been excluded; empty: unknown, or not excluded."""
        if replica not in self._excluded:
            return ""
        return time_of_day(self._excluded[replica][1])
