"""Reasons that exclude a replica, and what ends each."""

from dataclasses import dataclass

from extproc.fleet.ejection import FIRST_EJECTION_S, LONGEST_EJECTION_S, TOLERATED
from extproc.replica_state import STALE_AFTER_S

HUNG_S = 1.0  # time without any answer after which requests go elsewhere
STUCK_S = 10.0  # time in which nothing moves in an engine with work: longer than any step
TRIAL_S = 5.0  # time between two trials of a replica that is stalled or not healthy
FULL_S = 1.0  # time for which an engine that steps and answers 503 counts as full
AT_FIRST = 4
"""Requests that a new replica may have in flight: enough to measure its speed within seconds, and
few enough to be harmless if it is ten times slower than its profile says."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Reason that excludes a replica."""

    name: str
    row: str
    """Cells of the reason's row in docs/operations/troubleshoot.md: set by, cleared by, longest
    time, requests meanwhile, most replicas that the reason excludes."""
    covers_all: bool = False  # True: may exclude every replica
    most: float = 1.0  # largest share of the replicas that it excludes; 1: all but one

    def may_exclude(self, some: int, left: int) -> bool:
        """Returns True if the reason may exclude ``some`` of the ``left`` replicas."""
        return self.covers_all or (some < left and some <= self.most * left)


UNHEALTHY = Reason(
    "unhealthy",
    "a failed scrape, or two scrapes in a row without an answer | a scrape that succeeds; an "
    f"answer to a request of this router, for {STALE_AFTER_S:g} s | no limit | one every "
    f"{TRIAL_S:g} s, if no other replica is usable and this replica accepts connections | all",
    covers_all=True,
)
ASLEEP = Reason(
    "asleep",
    "a poll: the engine sleeps | a poll: the engine is awake | no limit | none | all",
    covers_all=True,
)
OTHER_MODEL = Reason(
    "other model",
    "a list of models without the requested model | a list with that model | no limit | none | "
    "all if any replica lists the model, otherwise none",
)
STALLED = Reason(
    "stalled",
    f"no answer to any scrape for {HUNG_S:g} s; no update for {STALE_AFTER_S:g} s while other "
    f"replicas have updates; no progress for {STUCK_S:g} s although the engine has work | an "
    "answer to a scrape; an update; progress, or no work | no limit | none while no scrape is "
    f"answered, otherwise one every {TRIAL_S:g} s | all but one",
)
FAILING = Reason(
    "failing",
    f"{TOLERATED} requests in a row that failed or could not be sent; a request to which a second "
    "replica answers an error, too, does not count | "
    "an answer below 400, or the reason *unhealthy* | "
    f"{FIRST_EJECTION_S:g} s, twice as long after each failed trial, at most "
    f"{LONGEST_EJECTION_S:g} s | none; after this time, one request as a trial | half of the "
    "replicas, at least one",
)
FULL = Reason(
    "full",
    "503 or a retry, while the engine steps | nothing but time | "
    f"{FULL_S:g} s | none | all but one",
)
NOT_READY = Reason(
    "not ready",
    "Kubernetes calls the pod *not ready* | Kubernetes calls the pod *ready* | no limit | none | "
    "half of the replicas: if more are not ready, the load may have made their probes fail",
    most=0.5,
)
DRAINING = Reason(
    "draining",
    "`extproc replicas drain`; Kubernetes or DNS no longer lists the replica | `extproc replicas "
    "undrain`; Kubernetes or DNS lists the replica again | no limit | none | all but one",
)
NEW = Reason(
    "new",
    "joining or restarting in a pool in which another healthy replica is measured | polls that "
    f"measured its first second or two of work | no limit | {AT_FIRST} at once; each request that "
    "ends raises this limit by one | all but one",
)
REASONS = UNHEALTHY, ASLEEP, OTHER_MODEL, STALLED, FAILING, FULL, NOT_READY, DRAINING, NEW
