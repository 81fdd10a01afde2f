"""Observed requests on the dashboard: the router's choices beside Envoy's."""

from statistics import fmean

from msgspec import Struct

from extproc.config import ServeSettings
from extproc.ground.text import figure
from extproc.observe.decision_log import DecisionLog

_COMPARED = 1000  # of the last decisions


class ObservedRequests(Struct):
    """Comparison of the last observed requests that a replica has answered."""

    answered: int = 0
    elsewhere: int = 0  # Envoy chose another replica than the router
    times: tuple[tuple[float, float, float], ...] = ()
    """Seconds to completion of each request whose end the router saw: predicted for the router's
    choice, predicted for Envoy's choice, and actual."""

    @property
    def figures(self) -> list[tuple[str, str]]:
        if not self.answered:
            return []
        elsewhere = f"{self.elsewhere:,} of {self.answered:,}"
        return [("observed requests that Envoy sent elsewhere", elsewhere)]

    @property
    def facts(self) -> list[tuple[str, str]]:
        if not self.times:
            return []
        by_router, by_envoy, actual = map(fmean, zip(*self.times, strict=True))
        words = (
            f"mean completion of {len(self.times):,} predicted as {figure(by_router)} s for the "
            f"router's choices and {figure(by_envoy)} s for Envoy's, actual {figure(actual)} s"
        )
        return [("Observed requests", words)]


def observed_requests(log: DecisionLog) -> ObservedRequests:
    """Compare the observed requests among the last 1,000 decisions."""
    times, answered, elsewhere = [], 0, 0
    for record in log.last(_COMPARED):
        outcome, decision = record.outcome, record.decision
        if not record.observed or outcome.served_by is None:
            continue
        answered += 1
        elsewhere += outcome.served_by != decision.replica
        by_envoy = decision.on(outcome.served_by)
        if by_envoy is not None and outcome.completion_s is not None:
            predicted = decision.predicted_completion, by_envoy.predicted_completion
            times.append((*predicted, outcome.completion_s))
    return ObservedRequests(answered, elsewhere, tuple(times))


def steering(serve: ServeSettings) -> str:
    """Which requests the router steers, as a remark on its policy; empty: all."""
    if serve.mode == "observe":
        return " (observes: Envoy chooses)"
    return f" (for {serve.share:.0%} of the requests)" if serve.share < 1.0 else ""
