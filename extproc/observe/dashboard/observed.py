"""Observed requests on the dashboard: the router's choices beside Envoy's."""

from math import inf
from statistics import fmean

from extproc.config import ServeSettings
from extproc.ground.text import figure
from extproc.observe.decision_log import DecisionLog

_COMPARED = 1000  # last decisions, among which observed requests are sought


Words = list[tuple[str, str]]  # names and texts of figures or facts


def observed_requests(log: DecisionLog) -> tuple[Words, Words]:
    """Compare the router's choices with Envoy's, for observed requests of the last 1,000 decisions.

    Returns figures and facts for the page. The figures are empty until an observed request was
    answered. The facts are empty until the router saw the end of an observed request.
    """
    served = [
        (record.decision, record.outcome.served_by, record.outcome.completion_s)
        for record in log.last(_COMPARED)
        if record.observed and record.outcome.served_by is not None
    ]
    if not served:
        return [], []
    elsewhere = sum(replica != decision.replica for decision, replica, _ in served)
    figures = [("observed requests that Envoy sent elsewhere", f"{elsewhere:,} of {len(served):,}")]
    times = [
        (decision.predicted_completion, on_envoys.predicted_completion, completion_s)
        for decision, replica, completion_s in served
        if completion_s is not None and (on_envoys := decision.on(replica)) is not None
    ]
    finite = [row for row in times if max(row) < inf]
    if not finite:
        return figures, []
    by_router, by_envoy, actual = map(fmean, zip(*finite, strict=True))
    text = (
        f"mean completion of {len(finite):,} requests: predicted {figure(by_router)} s for the "
        f"router's choices and {figure(by_envoy)} s for Envoy's, actual {figure(actual)} s"
    )
    return figures, [("Observed requests", text)]


def steering(serve: ServeSettings) -> str:
    """Remark on the policy: which requests the router steers. Empty: all requests."""
    if serve.mode == "observe":
        return " (observes: Envoy chooses)"
    return f" (for {100.0 * serve.share:.3g}% of the requests)" if serve.share < 1.0 else ""
