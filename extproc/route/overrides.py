"""Choice by a policy, and overrides: owner of a continued response, target, session."""

from functools import partial
from math import inf

import numpy as np

from extproc.predict.correction import ErrorQuantiles
from extproc.predict.inputs import Floats, least
from extproc.route.decision import Choice, Situation
from extproc.route.policies import POLICIES, as_good, lowest, soonest, with_few_requests
from extproc.route.reasons import seconds, why

_OWN = 0.5
"""Weight of the request's own completion against its cost to others, if a target bounds its end."""


def by_policy(policy: str, situation: Situation) -> Choice:
    """Choose the candidate that the policy scores lowest, at random among equals.

    ``completion`` treats scores within an error band as equal, so that no prediction error decides.
    Among equal scores the soonest first token wins, then few requests, then the most cached tokens.
    """
    scores = POLICIES[policy](situation)
    if policy == "completion":
        equal = soonest(situation, as_good(situation.prediction, scores))
        equal = with_few_requests(situation, equal)
        first = equal.item(lowest(-situation.prediction.cached[equal], situation.random))
    else:
        first = lowest(scores, situation.random)
    return Choice(policy, first, scores, partial(why, policy, situation))


def by_owner(owner: str, situation: Situation) -> Choice:
    """Choose the owner of the response that the request continues: any other replica would answer
    404."""
    first = situation.view.ids.index(owner)
    scores = np.full(len(situation.view), np.inf)
    scores[first] = situation.prediction.completion[first]
    reason = f"it owns {situation.profile.previous_response}, which the request continues"
    return Choice("owner", first, scores, lambda _: reason, bound=True)


def by_session(home: str, most_s: float, situation: Situation, otherwise: Choice) -> Choice:
    """Choose the session's replica ``home`` if the request ends there at most ``most_s`` seconds
    later than on the replica that ends it first; if not, choose as ``otherwise``. The scores of
    ``otherwise`` also rank the replicas for a retry."""
    view, completion = situation.view, situation.prediction.completion
    there = view.ids.index(home) if home in view.ids else None
    ends = inf if there is None else completion.item(there)
    later = inf if ends == inf else ends - least(completion)
    stays = there is not None and later <= most_s

    def reason(choice: Choice) -> str:
        delay = f"finishes {seconds(later)} later than on the best replica"
        if stays:
            delay = delay if later else "finishes no later than elsewhere"
            return f"the session is there, and the request {delay}"
        other = otherwise.reason(choice)
        if there is None or later == inf:
            return f"the session was on {home}, which cannot serve the request now; {other}"
        return f"the session was on {view.names[there]}, where the request {delay}; {other}"

    first = there if there is not None and stays else otherwise.first
    return Choice("session", first, otherwise.scores, reason, bound=stays)


def lateness(situation: Situation, error_quantiles: ErrorQuantiles) -> Floats:
    """Return the seconds by which each candidate would miss a target; negative: time to spare.

    The prediction is multiplied by the ratio of actual to predicted time that nine of ten requests
    do not exceed. Of several targets, the one missed by the most seconds counts.
    """
    objective, prediction = situation.profile.objective, situation.prediction
    waited = situation.waited
    later = max(prediction.output_tokens - 1.0, 0.0)
    times = (
        (prediction.ttft, error_quantiles.ttft, objective.ttft_s - waited),
        (prediction.decode, error_quantiles.tpot, objective.tpot_s * later if later else np.inf),
        (prediction.completion, error_quantiles.completion, objective.completion_s - waited),
    )
    late = [time * quantile.ratio - target for time, quantile, target in times if target < np.inf]
    never = np.where(prediction.completion < np.inf, -np.inf, np.inf)  # too small for the prompt
    worst: Floats = np.max([never, *late], axis=0)
    return worst


def by_target(late: Floats, situation: Situation, otherwise: Choice) -> Choice:
    """Choose among the replicas that meet all targets. ``otherwise`` is the choice without targets;
    its scores also rank the replicas for a retry.

    If a target bounds the decode time, the lowest ``completion/2 + cost to others + avoidable
    prefill`` wins, which leaves fast replicas to requests without such a target. If only the first
    token has a target, ``otherwise`` stands unless its replica is late. ``otherwise`` also stands
    if no replica meets the targets. Choosing the least late replica instead would fill that
    replica with requests that are late anyway: all requests would take 4% longer, and no more of
    them would meet their target (azure-2023-conv at 8 times its speed on ``mixed``).

    ``late``: result of :func:`lateness`.
    """
    prediction, meets, scores = situation.prediction, late <= 0.0, otherwise.scores

    def reason(choice: Choice) -> str:
        at = choice.first
        if late[at] > 0.0:
            return f"no replica meets its target; {otherwise.reason(choice)}"
        ends, cost = prediction.completion.item(at), prediction.cost_to_others.item(at)
        name, in_time = situation.view.names[at], (late <= 0.0).sum()
        return (
            f"{in_time} of {len(late)} meet its target; {name} finishes it "
            f"in {seconds(ends)}, with {seconds(-late.item(at))} to spare, and it costs the "
            f"requests in flight there {seconds(cost)} in all"
        )

    first, bounded = otherwise.first, situation.profile.objective.bounds_end
    if meets.any() and (bounded or not meets[first]):
        if bounded:
            scores = _OWN * prediction.completion + prediction.cost_to_others + prediction.avoidable
        elif not (meets & (scores < np.inf)).any():  # power_of_two drew only late replicas
            scores = prediction.completion
        first = lowest(np.where(meets, scores, np.inf), situation.random)
    return Choice("target", first, otherwise.scores, reason)
