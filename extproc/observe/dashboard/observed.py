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
    answered, elsewhere = 0, 0
    times = []  # predicted for the router's choice, predicted for Envoy's choice, and actual
    for record in log.last(_COMPARED):
        outcome, decision = record.outcome, record.decision
        if not record.observed or outcome.served_by is None:
            continue
        answered += 1
        elsewhere += outcome.served_by != decision.replica
        by_envoy = decision.on(outcome.served_by)
        if by_envoy is not None and outcome.completion_s is not None:
            predicted = decision.predicted_completion, by_envoy.predicted_completion
            if max(predicted) < inf:
                times.append((*predicted, outcome.completion_s))
    figures, facts = Words(), Words()
    if answered:
        text = f"{elsewhere:,} of {answered:,}"
        figures.append(("observed requests that Envoy sent elsewhere", text))
    if times:
        by_router, by_envoy_s, actual = map(fmean, zip(*times, strict=True))
        text = (
            f"mean completion of {len(times):,} requests: predicted {figure(by_router)} s for the "
            f"router's choices and {figure(by_envoy_s)} s for Envoy's, actual {figure(actual)} s"
        )
        facts.append(("Observed requests", text))
    return figures, facts


def steering(serve: ServeSettings) -> str:
    """Remark on the policy: which requests the router steers. Empty: all requests."""
    if serve.mode == "observe":
        return " (observes: Envoy chooses)"
    return f" (for {100.0 * serve.share:.3g}% of the requests)" if serve.share < 1.0 else ""
