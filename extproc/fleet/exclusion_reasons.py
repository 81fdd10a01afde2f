"""Reasons that exclude a replica: the rule of each, and what ends it."""

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import NamedTuple

from extproc.fleet.condition import AT_FIRST, FULL_S, HUNG_S, STUCK_S, TRIAL_S, Condition
from extproc.fleet.ejection import FIRST_EJECTION_S, LONGEST_EJECTION_S, TOLERATED
from extproc.replica_state import STALE_AFTER_S


class Search(NamedTuple):
    """Search for the replicas that may serve a request."""

    now: float
    model: str = ""
    other_models: Set[str] = frozenset()  # replicas that do not serve the model
    response_visible: bool = True  # Envoy forwards the response, so the request may be a trial
    trials: bool = True  # the request may be the trial of a stalled replica
    requests: Callable[[str], float] = lambda _: 0.0  # on a replica; 0: slow start does not matter


@dataclass(frozen=True, slots=True)
class Reason:
    """Reason that excludes a replica."""

    name: str
    why: Callable[[Condition, Search], str]  # text for people; empty: the reason does not apply
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
    lambda replica, search: replica.unhealthy(search.now),
    "a failed scrape, or two scrapes in a row without an answer | a scrape that succeeds; an "
    f"answer to a request of this router, for {STALE_AFTER_S:g} s | no limit | one every "
    f"{TRIAL_S:g} s, if no other replica is usable and this replica accepts connections | all",
    covers_all=True,
)
ASLEEP = Reason(
    "asleep",
    lambda replica, _: "its engine sleeps" if replica.state.asleep else "",
    "a poll: the engine sleeps | a poll: the engine is awake | no limit | none | all",
    covers_all=True,
)
OTHER_MODEL = Reason(
    "other model",
    lambda replica, search: (
        f"does not serve {search.model!r}" if replica.state.id in search.other_models else ""
    ),
    "a list of models without the requested model | a list with that model | no limit | none | "
    "all if any replica lists the model, otherwise none",
    covers_all=True,
)
STALLED = Reason(
    "stalled",
    lambda replica, search: replica.hung_or_stalled(search.now, search.trials),
    f"no answer to any scrape for {HUNG_S:g} s; no update for {STALE_AFTER_S:g} s while other "
    f"replicas have updates; no progress for {STUCK_S:g} s although the engine has work | an "
    "answer to a scrape; an update; progress, or no work | no limit | none while no scrape is "
    f"answered, otherwise one every {TRIAL_S:g} s | all but one",
)
FAILING = Reason(
    "failing",
    lambda replica, search: (
        f"ejected: {TOLERATED} or more consecutive requests failed"
        if replica.ejection.excludes(search.now, search.response_visible)
        else ""
    ),
    f"{TOLERATED} requests in a row that failed or could not be sent; a request to which a second "
    "replica answers an error, too, does not count | "
    "an answer below 400, or the reason *unhealthy* | "
    f"{FIRST_EJECTION_S:g} s, twice as long after each failed trial, at most "
    f"{LONGEST_EJECTION_S:g} s | none; after this time, one request as a trial | half of the "
    "replicas, at least one",
)
FULL = Reason(
    "full",
    lambda replica, search: (
        "its engine answered that it is full" if search.now < replica.full_until else ""
    ),
    "503 or a retry, while the engine steps | nothing but time | "
    f"{FULL_S:g} s | none | all but one",
)
NOT_READY = Reason(
    "not ready",
    lambda replica, _: "" if replica.state.ready else replica.state.problem,
    "Kubernetes calls the pod *not ready* | Kubernetes calls the pod *ready* | no limit | none | "
    "half of the replicas: if more are not ready, the load may have made their probes fail",
    most=0.5,
)
DRAINING = Reason(
    "draining",
    lambda replica, _: "draining" if replica.state.draining else "",
    "`extproc replicas drain`; Kubernetes or DNS no longer lists the replica | `extproc replicas "
    "undrain`; Kubernetes or DNS lists the replica again | no limit | none | all but one",
)
NEW = Reason(
    "new",
    lambda replica, search: replica.slow_start(search.requests(replica.state.id)),
    "joining or restarting in a pool in which another healthy replica is measured | polls that "
    f"measured its first second or two of work | no limit | {AT_FIRST} at once; each request that "
    "ends raises this limit by one | all but one",
)
# If no other replica is left, a draining replica serves rather than an ejected one.
REASONS = UNHEALTHY, ASLEEP, OTHER_MODEL, STALLED, FAILING, FULL, NOT_READY, DRAINING, NEW
