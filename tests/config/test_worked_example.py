"""The worked example of docs/how-it-works.md has the figures that the router's code computes."""

from pathlib import Path
from random import Random

import numpy as np

from extproc.predict.completion import Prediction, predict
from extproc.predict.inputs import Floats, Sequences
from extproc.request.prefix import NO_PREFIX
from extproc.route.decision import Situation
from extproc.route.policies import completion
from tests.fakes import MODEL, ManualClock, chat, fleet_of

PAGE = Path(__file__).parents[2] / "docs" / "how-it-works.md"


def scored(cached_on_c: float) -> tuple[Prediction, Floats]:
    fleet = fleet_of(ManualClock(), "llama-8b-h100", "llama-8b-h100", "llama-8b-a10")
    view, profile = fleet.view(MODEL), chat(1000, 201)
    view.batch[0], view.decode_step[0], view.taken[0] = 8, 7.036e-3, 8_000
    view.backlog[1] = view.taken[1] = 60_000
    sequences = Sequences(
        replica=np.array([0, 1]),
        weight=np.array([8.0, 2.0]),
        context=np.array([1_000.0, 30_000.0]),
        remaining=np.array([100.0, 100.0]),
        priority=np.zeros(2),
    )
    prediction = predict(profile, 201, view, sequences, np.array([0.0, 0.0, cached_on_c]))
    hits = fleet.prefix_hits(NO_PREFIX, view)
    situation = Situation(profile, view, hits, prediction, 201.0, sequences, Random(0), {})
    return prediction, completion(situation)


def test_worked_example_of_the_prediction_is_what_the_code_computes() -> None:
    section = PAGE.read_text().partition("### An example")[2].partition("\n##")[0]
    prediction, scores = scored(cached_on_c=0.0)
    rows = {
        "TTFT": prediction.ttft,
        "decode": prediction.decode,
        "completion": prediction.completion,
        "cost": prediction.cost_to_others,
        "score": scores,
    }
    for term, seconds in rows.items():
        row = " | ".join(f"{figure:.3f}" for figure in seconds)
        assert f"| {term} | {row} |" in section.replace("**", "")
    prediction, scores = scored(cached_on_c=900.0)
    text = " ".join(section.split())
    assert f"complete in {prediction.completion[2]:.3f} s" in text
    assert f"avoidable is 900·38 µs·9 = {prediction.avoidable[0]:.3f} s" in text
    assert f"score {scores[0]:.3f}" in text
