"""Why one candidate is better than another for a request, in words and figures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from extproc.predict.inputs import Floats
from extproc.route.policy import Choice, Situation, near_lowest

_NOTABLE = 0.1
"""Difference of actual ÷ predicted decode times that is worth a word."""


def compare(situation: Situation, choice: Choice, band: float, same_ttft: float) -> str:
    """The candidate chosen beside the next best, and beside the one with the fewest requests.

    Of the terms of the score, the one that makes most of a difference is named.

    Args:
        situation: what the choice was made from.
        choice: the lowest ``completion + w·cost to others + avoidable prefill``, or as good as
            equal to it.
        band: scores within this fraction of the lowest counted as equal.
        same_ttft: times to first token counted as the same within this fraction.
    """
    view, completion = situation.view, situation.prediction.completion
    first, second = choice.first, choice.second
    text = f"{view.names[first]} finishes it in {seconds(completion[first])}"
    equals = [int(index) for index in near_lowest(choice.scores, band) if index != first]
    clauses = [_equal(situation, first, equals, same_ttft)] if equals else []
    for other in dict.fromkeys((second, _emptiest(view.requests, choice.scores))):
        if other is not None and other not in (first, *equals):
            clauses.append(_Rival(situation, first, other).clause())
    return (
        f"{text}, {'; '.join(clauses)}" if clauses else f"{text}; no other replica could serve it"
    )


def seconds(value: float) -> str:
    """A time with its unit: ``1.25 s``, ``34.2 ms``, ``289 µs``."""
    if value >= 0.1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} µs"


def _equal(situation: Situation, first: int, equals: Sequence[int], same_ttft: float) -> str:
    prediction, second = situation.prediction, min(equals, key=situation.prediction.ttft.item)
    text = f"{situation.view.names[second]} in {seconds(prediction.completion[second])}"
    if len(equals) > 1:
        text += f", {_count(len(equals) - 1, 'other')} alike"
    ours, theirs = prediction.ttft[first], prediction.ttft[second]
    if theirs <= ours * (1.0 + same_ttft):
        return f"{text}: as good as equal, so one was drawn at random"
    sooner = f"comes {seconds(theirs - ours)} sooner, after {seconds(ours)}"
    return f"{text}: as good as equal, and here the first token {sooner}"


def _emptiest(requests: Floats, scores: Floats) -> int:
    """Of the candidates with the fewest requests, the best."""
    fewest = np.flatnonzero(requests == requests.min())
    return int(fewest[scores[fewest].argmin()])


@dataclass(frozen=True, slots=True)
class _Rival:
    """A candidate that was not chosen, beside the one that was."""

    situation: Situation
    first: int
    other: int

    def clause(self) -> str:
        """When it would finish the request, and what makes most of the difference."""
        prediction = self.situation.prediction
        theirs, ours = self._both(prediction.completion)
        if theirs == inf:
            longest = self.situation.view.longest_prompt[self.other]
            return f"{self._name} holds prompts of {longest:,.0f} tokens at most"
        when = f"in {seconds(theirs)}{self._though()}"
        cost = prediction.cost_weight * prediction.cost_to_others
        if theirs < ours:
            wasted = self._longer(prediction.avoidable) > self._longer(cost)
            return f"{self._name} already {when}, but {self._waste() if wasted else self._cost()}"
        reasons: list[tuple[Floats, Callable[[], str]]] = [
            (prediction.step_rest, self._step_rest),
            (prediction.admission, self._admission),
            (prediction.adapter, self._adapter),
            (prediction.prefill + prediction.avoidable, self._prefill),
            (prediction.decode, self._decode),
            (cost, self._cost),
        ]
        _, words = max(reasons, key=lambda reason: self._longer(reason[0]))
        return f"{self._name} {when}: {words()}"

    @property
    def _name(self) -> str:
        return self.situation.view.names[self.other]

    def _both(self, values: Floats) -> tuple[float, float]:
        """The rival's and the chosen one's."""
        return float(values[self.other]), float(values[self.first])

    def _longer(self, term: Floats) -> float:
        theirs, ours = self._both(term)
        return theirs - ours

    def _though(self) -> str:
        theirs, ours = self._both(self.situation.view.requests)
        if theirs >= ours:
            return ""
        name = self.situation.view.names[self.first]
        if not theirs:
            return f" though it is idle and {name} has {_count(ours, 'request')}"
        return f" though it has {_count(theirs, 'request')} and {name} has {ours:.0f}"

    def _step_rest(self) -> str:
        longer = seconds(self._longer(self.situation.prediction.step_rest))
        return f"the step in progress there ends {longer} later"

    def _admission(self) -> str:
        view, wait = self.situation.view, self.situation.prediction.admission
        longer = seconds(self._longer(wait)) + (" longer" if wait[self.first] else "")
        taken, capacity = view.taken, view.kv_capacity[self.other]
        if taken[self.other] + self._new[self.other] > capacity:
            place = f"KV space, {taken[self.other]:,.0f} of {capacity:,.0f} tokens being taken"
        else:
            batch, places = (view.batch + view.waiting)[self.other], view.max_num_seqs[self.other]
            place = f"a place in the batch, {batch:.0f} running or queued for {places:.0f} places"
        return f"there it would wait {longer} for {place}"

    def _adapter(self) -> str:
        times = self.situation.adapter
        longer = seconds(self._longer(self.situation.prediction.adapter))
        if times is not None and self._longer(times.wait) > 0.0:
            return f"there it would wait {longer} longer until other adapters leave the batch"
        return f"to load its adapter there would take {longer} longer"

    def _prefill(self) -> str:
        view, prediction = self.situation.view, self.situation.prediction
        prefill = prediction.prefill
        if self._longer(prediction.avoidable) > self._longer(prefill) / 2:
            return self._waste()
        theirs, ours = self._both(view.backlog)
        if theirs > ours:
            cause = f"behind {theirs:,.0f} queued prompt tokens against {ours:,.0f}"
        else:
            tokens = np.maximum(view.backlog + self._new, 1.0)
            theirs, ours = self._both((prefill - prediction.beside) / tokens)
            cause = f"at {seconds(theirs)} a token against {seconds(ours)}"
        return f"the prefill would take {seconds(self._longer(prefill))} longer there, {cause}"

    @property
    def _new(self) -> Floats:
        """Prompt tokens to prefill."""
        return self.situation.profile.prompt_tokens - self.situation.prediction.cached

    def _waste(self) -> str:
        theirs, ours = self._both(self.situation.prediction.cached)
        wasted = self._longer(self.situation.prediction.avoidable)
        adapter = self.situation.adapter
        if adapter is not None and self._longer(adapter.wasted) > wasted / 2:
            return f"to load its adapter there would cost others {seconds(wasted)}"
        return (
            f"of the prompt {theirs:,.0f} tokens are cached there against {ours:,.0f}, and to "
            f"prefill the rest is a waste that counts {seconds(wasted)}"
        )

    def _decode(self) -> str:
        view, prediction = self.situation.view, self.situation.prediction
        theirs, ours = self._both(prediction.decode / max(prediction.output_tokens - 1.0, 1.0))
        kv_there, kv_here = self._both(view.kv_used)
        beside = kv_there > kv_here
        there = f" with {kv_there:,.0f} KV tokens in use" if beside else ""
        here = f" with {kv_here:,.0f}" if beside else ""
        longer = seconds(self._longer(prediction.decode))
        return (
            f"decoding would take {longer} longer there, {seconds(theirs)} a token{there} "
            f"against {seconds(ours)}{here}{self._stretched()}"
        )

    def _stretched(self) -> str:
        theirs, ours = self._both(self.situation.view.stretch)
        if theirs < ours + _NOTABLE:
            return ""
        return f", and of late it took {theirs:.2f} times as long as predicted against {ours:.2f}"

    def _cost(self) -> str:
        theirs, ours = self._both(self.situation.prediction.cost_to_others)
        weight_there, weight_here = self._both(self.situation.prediction.cost_weight)
        counted = "in full"
        if min(weight_there, weight_here) < 1.0:
            counted = f"at {weight_there:.0%} against {weight_here:.0%}: the fuller the KV cache, "
            counted += "and the sooner the answer ends after its first token, the more"
        return (
            f"there it would cost the requests in flight {seconds(theirs)} in all against "
            f"{seconds(ours)}, counted {counted}"
        )


def _count(number: float, thing: str) -> str:
    return f"{number:.0f} {thing}{'' if number == 1 else 's'}"
