"""A request that waits, and whether a replica could carry it."""

from collections.abc import Callable
from math import log

import numpy as np

from extproc.predict.completion import FULL
from extproc.predict.inputs import Floats
from extproc.route.reasons import seconds
from extproc.route.router import Decision

_AMONG_OTHERS = 0.02  # KV pressure kept free where other routers send, too
_LOOKED_AT = 0.3, 0.6, 0.95  # shares of the request's tokens at which pressure is computed
_LEAST_SPREAD = 1.1  # p90 ÷ mean of lengths that are all about the same
_RESERVE = 0.035  # KV pressure that requests of a higher priority may add to FULL


class Waiting:
    """A request that waits."""

    def __init__(
        self,
        decision: Decision,
        since: float,
        decide: Callable[[], Decision | None],
        go: Callable[[Decision | Exception | None], None],
    ) -> None:
        """One that waits from now on.

        Args:
            decision: the one that was made when it came.
            since: when that was.
            decide: decides as of now; None where no replica can be used.
            go: sends it; an exception: it is refused, or failed. Raises nothing.
        """
        self.profile = profile = decision.profile
        self.tenant, self.model = profile.tenant, profile.model
        self.priority = profile.objective.priority
        self.cost = cost(decision)  # as it was when it came
        self.since = since
        self.decide = decide
        self.go = go
        decode = decision.prediction.decode.item(decision.choice.first)
        self.deadline = since + profile.objective.due_s(decode)  # when its first token is due
        self.why = _why(decision)  # in words
        self.decided(decision, since)

    def decided(self, decision: Decision, now: float) -> None:
        view, prediction = decision.situation.view, decision.prediction
        full, pressure = full_at(decision), peak_pressure(decision)
        room = (pressure < full) & (prediction.admission <= 0.0)
        with_room = frozenset(view.ids[place] for place in room.nonzero()[0].tolist())
        first = decision.choice.first
        later = pressure.item(first) - prediction.kv_pressure.item(first)
        reserve = (1.0 - full + later) * view.kv_capacity.item(first)
        self.candidates = view.candidates.all
        self.passed_over = with_room - {decision.replica}
        """Candidates that had room, and were worse than one that had none."""
        self.replica = decision.replica
        cached = prediction.cached.item(first)
        self.tokens = _tokens(decision) - cached + reserve
        if prediction.yielded is not None:
            prompt = decision.profile.prompt_tokens - cached
            self.tokens = max(self.tokens - prediction.yielded.item(first), prompt)
        """KV tokens that have to be free there."""
        self.decided_at = now

    def passes(self, replica: str, since: float) -> bool:
        """Whether it was decided since then that it rather waits for another than that one."""
        return replica in self.passed_over and self.decided_at > since


def full_at(decision: Decision) -> float:
    """The KV pressure from which on a replica can carry no other request."""
    less = 0.0 if decision.news_age is None else _AMONG_OTHERS
    return FULL - less + (_RESERVE if decision.profile.objective.priority > 0 else 0.0)


def peak_pressure(decision: Decision) -> Floats:
    """The KV pressure on each candidate when it is highest, should the request be there.

    A sequence with k KV tokens, which is to generate r more, is still there after t more with
    probability e^-(t/r)^κ (Weibull), and then has k + t. Where answers are of all lengths κ is 1:
    how long one has been there tells nothing of when it ends. Where nine of ten are hardly longer
    than their mean κ is large, so that what came together grows together until it ends. So short
    prompts with long answers, and many that come at once, need room that is free as yet.
    """
    situation, mean = decision.situation, decision.prediction.output_tokens
    sequences, count = situation.sequences, len(situation.view)
    if not mean:
        return decision.prediction.kv_pressure
    spread = max(decision.p90_output_tokens / mean, _LEAST_SPREAD)
    shape = max(log(log(10.0)) / log(spread), 1.0)
    more = np.zeros(count)
    yields = sequences.priority < situation.profile.priority
    yields &= situation.view.by_priority[sequences.replica] > 0.0
    weight = np.where(yields, 0.0, sequences.weight)
    for share in _LOOKED_AT:
        t = share * mean
        there = np.exp(-((t / np.maximum(sequences.remaining, 1.0)) ** shape))
        change = weight * ((sequences.context + t) * there - sequences.context)
        np.maximum(more, np.bincount(sequences.replica, change, count), out=more)
    return decision.prediction.kv_pressure + more / situation.view.kv_capacity


def fits(decision: Decision) -> bool:
    """Whether the replica chosen can carry the request to its end beside what is there.

    It goes, too, where nothing is that could end, where what others sent is not known, and where
    the replica can never hold it at a time.
    """
    first, prediction, view = decision.choice.first, decision.prediction, decision.situation.view
    full, admission = full_at(decision), prediction.admission.item(first)
    now, growth = prediction.kv_pressure.item(first), prediction.growth.item(first)
    if not admission and now < full:
        if now + growth / view.kv_capacity.item(first) < full:
            return True
        if peak_pressure(decision).item(first) < full:
            return True
    return not view.requests.item(first) or decision.stale or _is_too_large(decision)


def _is_too_large(decision: Decision) -> bool:
    """A prompt that is too long is refused there at once; of a request with many parts the engine
    begins some."""
    first, profile, view = decision.choice.first, decision.profile, decision.situation.view
    if profile.longest_prompt > view.longest_prompt.item(first):
        return True
    if profile.parts == 1:
        return False
    too_many = profile.parts > view.max_num_seqs.item(first)
    return too_many or profile.prompt_tokens > view.kv_capacity.item(first)


def _why(decision: Decision) -> str:
    first, prediction = decision.choice.first, decision.prediction
    name = decision.situation.view.names[first]
    if admission := prediction.admission.item(first):
        return f"{name} would not have admitted it for {seconds(admission)}"
    pressure = max(peak_pressure(decision).item(first), prediction.kv_pressure.item(first))
    if pressure < full_at(decision):
        return f"others waited for {name} before it"
    return f"{name} would have needed {pressure:.0%} of its KV cache"


def cost(decision: Decision) -> float:
    """Seconds of a whole replica: its share of the KV cache, for as long as it is there."""
    first, prediction = decision.choice.first, decision.prediction
    seconds = prediction.prefill.item(first) + prediction.decode.item(first)
    return _tokens(decision) / decision.situation.view.kv_capacity.item(first) * seconds


def _tokens(decision: Decision) -> float:
    profile = decision.profile
    return profile.prompt_tokens + profile.sequences * decision.prediction.output_tokens
