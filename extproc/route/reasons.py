"""Reason for a choice as one clause of text; the decision record has every figure in a table."""

from extproc.predict.inputs import Floats
from extproc.route.decision import Choice, Situation
from extproc.route.policies import as_good, soonest, with_few_requests

_NO_SCORE = {"round_robin": "its turn", "random": "at random"}


def seconds(value: float) -> str:
    """Format a time with its unit: ``1.25 s``, ``34.2 ms``, ``289 µs``."""
    if value >= 0.1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} µs"


def why(policy: str, situation: Situation, choice: Choice) -> str:
    """Compare the chosen candidate with the next best, and name the term that differs most."""
    name, second = situation.view.names[choice.first], choice.second
    if policy == "completion":
        text = f"{name} finishes it in {seconds(situation.prediction.completion[choice.first])}"
        if second is not None:
            return f"{text}, {_beside(situation, choice, second)}"
        fits = "serve it" if len(situation.view) == 1 else "hold a prompt that long"
        return f"{text}; no other replica could {fits}"
    if policy in _NO_SCORE:
        return _NO_SCORE[policy]
    text = f"{policy} scores {name} {_score(choice, choice.first)}"
    if second is None:
        return text
    return f"{text} and {situation.view.names[second]} {_score(choice, second)}"


def _score(choice: Choice, candidate: int) -> str:
    return f"{round(choice.scores.item(candidate), 3):,.6g}"


def _beside(situation: Situation, choice: Choice, second: int) -> str:
    prediction, first = situation.prediction, choice.first
    name, later = situation.view.names[second], prediction.completion[second]

    def more(term: Floats) -> float:
        return float(term[second] - term[first])

    equal = as_good(prediction, choice.scores)
    if second in equal:
        text = f"{name} in {seconds(later)}: as good as equal"
        sooner = soonest(situation, equal)
        if second not in sooner:
            return f"{text}, and here the first token comes {seconds(more(prediction.ttft))} sooner"
        if second not in with_few_requests(situation, sooner):
            fewer = more(situation.view.requests)
            return f"{text}, and here {fewer:.0f} fewer are in flight"
        if cached := -more(prediction.cached):
            return f"{text}, and here {cached:.0f} more tokens of the prompt are cached"
        return f"{text}, so one was drawn at random"
    weights = {"the first token takes": prediction.first_token_weight}  # of other terms: 1
    terms = {
        "requests in flight lose": prediction.cost_weight * prediction.cost_to_others,
        "prefill of what others have cached wastes": prediction.avoidable,
    }
    there = f"{name} already in {seconds(later)}, but there"
    if more(prediction.completion) >= 0.0:
        there = f"{name} in {seconds(later)}: there"
        terms = {
            "the wait at the router takes": prediction.queue,
            "admission takes": prediction.admission,
            "its adapter takes": prediction.adapter,
            "prefill takes": prediction.prefill,
            "decode takes": prediction.decode,
        } | terms
    elif prediction.first_token_matters:
        terms["the first token takes"] = prediction.ttft
    term = max(terms, key=lambda term: weights.get(term, 1.0) * more(terms[term]))
    return f"{there} {term} {seconds(more(terms[term]))} more"
