"""Choices by a policy, and overrides: the owner of the response that a request continues, its
target, its session."""

from functools import partial
from math import inf

import numpy as np

from extproc.predict.completion import Prediction
from extproc.predict.correction import Margins
from extproc.predict.inputs import Floats, least
from extproc.request.objective import Objective
from extproc.route.decision import Choice, Situation
from extproc.route.policies import choose, lowest
from extproc.route.reasons import seconds, why

_OWN = 0.5
"""Weight of a request's own completion against the seconds that others lose, where a target bounds
its end."""


def by_policy(policy: str, situation: Situation) -> Choice:
    """The candidate that the policy scores lowest."""
    first, scores = choose(policy, situation)
    return Choice(policy, first, scores, partial(why, policy, situation))


def by_owner(owner: str, situation: Situation) -> Choice:
    """The replica that holds the response, a candidate; any other would answer 404."""
    first = situation.view.ids.index(owner)
    scores = np.full(len(situation.view), np.inf)
    scores[first] = situation.prediction.completion[first]
    response = situation.profile.previous_response
    reason = f"it holds {response}, which the request goes on from"
    return Choice("holder", first, scores, lambda _: reason)


def by_session(home: str, most_s: float, situation: Situation, otherwise: Choice) -> Choice:
    """The session's replica, if the request ends there at most ``most_s`` seconds later than on the
    best one; then the other choice comes second at any rate."""
    view, completion = situation.view, situation.prediction.completion
    there = view.ids.index(home) if home in view.ids else None
    ends = inf if there is None else completion.item(there)
    later = inf if ends == inf else ends - least(completion)
    stays = there is not None and later <= most_s

    def reason(choice: Choice) -> str:
        much = f"finished {seconds(later)} later than on the best"
        if stays:
            much = much if later else "finished no later than elsewhere"
            return f"its session is there, and it is {much}"
        other = otherwise.reason(choice)
        if there is None or later == inf:
            return f"its session was on {home}, which cannot serve it now; {other}"
        return f"its session was on {view.names[there]}, where it would be {much}; {other}"

    first = there if there is not None and stays else otherwise.first
    return Choice("session", first, otherwise.scores, reason)


def lateness(
    objective: Objective, prediction: Prediction, margins: Margins, waited: float
) -> Floats:
    """Seconds by which each candidate misses the target that it misses by most, if it takes as long
    as one request of ten does; below zero: to spare.

    ``waited``: seconds since the request came.
    """
    later = max(prediction.output_tokens - 1.0, 0.0)
    times = (
        (prediction.ttft, margins.ttft, objective.ttft_s - waited),
        (prediction.decode, margins.tpot, objective.tpot_s * later if later else np.inf),
        (prediction.completion, margins.completion, objective.completion_s - waited),
    )
    late = [time * margin.ratio - target for time, margin, target in times if target < np.inf]
    worst: Floats = np.max([np.full(len(prediction.ttft), -np.inf), *late], axis=0)
    return worst


def by_target(late: Floats, situation: Situation, otherwise: Choice) -> Choice:
    """Of the replicas that meet the target, one that costs others little; the other choice comes
    second at any rate.

    Where a target says how long the request may decode, ``own/2 + cost to others + avoidable
    prefill`` decides, own being its completion: it leaves the fast replicas to requests that have
    no such target. Where its first token alone has one, the other choice is taken unless that is
    late. To go by lateness where none is in time would fill the replica with the soonest first
    token with what is late anyway: all requests would take 4% longer, and no more of them be in
    time (azure-2023-conv at 8 times its speed on ``mixed``).

    ``late``: from :func:`lateness`.
    """
    prediction, meets, scores = situation.prediction, late <= 0.0, otherwise.scores

    def reason(choice: Choice) -> str:
        at = choice.first
        if late[at] > 0.0:
            return f"no replica meets its target; {otherwise.reason(choice)}"
        ends, cost = prediction.completion.item(at), prediction.cost_to_others.item(at)
        return (
            f"{meets.sum()} of {len(late)} meet its target; {situation.view.names[at]} finishes it "
            f"in {seconds(ends)}, with {seconds(-late.item(at))} to spare, and it costs the "
            f"requests in flight there {seconds(cost)} in all"
        )

    first, bounded = otherwise.first, situation.profile.objective.bounds_end
    if meets.any() and (bounded or not meets[first]):
        if bounded:
            scores = _OWN * prediction.completion + prediction.cost_to_others + prediction.avoidable
        elif not (meets & (scores < np.inf)).any():  # power_of_two drew others
            scores = prediction.completion
        first = lowest(np.where(meets, scores, np.inf), situation.random)
    return Choice("target", first, otherwise.scores, reason)
