from typing import Any

import pytest

from benchmarks.report import figures
from benchmarks.report.words import terminal_result

Json = dict[str, Any]
DOUBT: Json = {"validity": {"doubts": ["CPU 95% busy"]}}
WRONG: Json = {"complaints": ["1 of 3 requests failed"]}


def turn(name: str, repeat: int, completion: float | None, **more: Any) -> Json:
    """Turn with three requests of that time, or with none."""
    requests = [] if completion is None else [{"at_s": 0.0, "completion_s": completion}] * 3
    return {"run": {"name": name, "repeat": repeat}, "requests": requests, **more}


def compared(*runs: Json, ours: tuple[str, ...] = ("us",)) -> Json:
    return {"compare": {"ours": [*ours]}, "runs": [*runs]}


def turns(**values: tuple[float, ...]) -> Json:
    return compared(
        *(turn(name, n, value) for name, of in values.items() for n, value in enumerate(of))
    )


def test_a_ratio_is_to_the_best_other_of_the_same_turn() -> None:
    results = turns(us=(1.0, 2.0, 8.0), one=(2.0, 2.5, 12.0), other=(4.0, 3.0, 10.0))
    found = figures.to_json(results)
    spread = {"median": 2.0, "least": 1.0, "most": 8.0, "turns": 3}
    assert found["contenders"]["us"]["Completion, mean"] == spread
    assert found["contenders"]["us"]["TTFT, mean"] is None
    beside = found["beside_best"]["Completion, mean"]
    assert beside["ratio"] == {"median": 0.8, "least": 0.5, "most": 0.8, "turns": 3}
    assert beside["names"] == ("one", "other")
    assert (beside["less"], beside["more"]) == (3, 0)


ALONE = "Nothing is compared: in no turn are both us and another without doubt."


@pytest.mark.parametrize(
    ("results", "said"),
    [
        (
            turns(us=(1.0, 2.0), them=(2.0, 5.0)),
            "Completion, mean: us is 0.45× the best other (them), better in all 2 turns "
            "(0.40 – 0.50×). 1.50 s against 3.50 s.",
        ),
        (turns(us=(2.0, 5.0), them=(1.0, 2.0)), "worse in all 2 turns (2.00 – 2.50×)"),
        (
            turns(us=(1.0, 1.0, 2.0), them=(2.0, 2.0, 1.0)),
            "better in 2 of 3 turns (0.50 – 2.00×): no clear difference",
        ),
        (turns(us=(1.0,) * 2, a=(1.0,) * 2), "better in 0 of 2 turns: no clear difference"),
        (
            turns(us=(0.5,), them=(3.0,)),
            "Completion, mean: us is 0.17× the best other (them), in one turn, which shows no "
            "spread. 500 ms against 3.00 s.",
        ),
        (turns(us=(1.0, 1.0), them=(2.0, 2.0)), "better in all 2 turns. 1.00 s"),
        (turns(us=(1.0, 1.0, 1.5), them=(2.0,) * 3), "1.00 (1.00…1.50)"),
        (
            compared(turn("us", 0, 1.0), turn("us", 1, 0.1, **DOUBT), turn("them", 0, 2.0)),
            "us is 0.50× the best other (them), in one turn",
        ),
        (compared(turn("us", 0, 1.0), turn("them", 0, 2.0, **WRONG)), ALONE),
        (compared(turn("us", 0, 1.0, **DOUBT), turn("them", 0, 2.0)), ALONE),
        (
            compared(turn("us", 0, 1.0, **DOUBT), turn("us", 1, 1.0), turn("them", 0, 2.0)),
            "Completion, mean: 1.00 s.",
        ),
        (compared(turn("them", 0, 1.0)), "us has no run: nothing is compared."),
        (compared(turn("a", 0, 1.0), turn("b", 0, 2.0), ours=()), "a is 0.50× the best other (b)"),
        (
            compared(turn("us", 0, None, **WRONG), turn("them", 0, 1.0)),
            "us: no request was answered.",
        ),
    ],
)
def test_terminal_compares_turns_without_doubt(results: Json, said: str) -> None:
    printed = terminal_result(results)
    assert said in printed
    if said is ALONE:
        assert "×" not in printed
    if all(run["run"]["repeat"] == 0 for run in results["runs"]):
        assert "…" not in printed


@pytest.mark.parametrize("wrong", [DOUBT, WRONG])
def test_turn_in_doubt_is_never_the_best_other(wrong: Json) -> None:
    doubtful = [turn("fast", 0, 0.1, **wrong), turn("fast", 1, 4.0)]
    others = [turn("us", 0, 1.0), turn("us", 1, 1.0), turn("slow", 0, 2.0), turn("slow", 1, 5.0)]
    results = compared(*doubtful, *others)
    beside = figures.to_json(results)["beside_best"]["Completion, mean"]
    assert beside["ratio"] == {"median": 0.375, "least": 0.25, "most": 0.5, "turns": 2}
    printed = terminal_result(results)
    assert "fast ! " in printed
    assert "In doubt: fast in 1 of 2 turns. Comparisons leave these turns out." in printed


def test_comparison_without_ours_has_no_figures_of_it() -> None:
    assert figures.to_json(compared(turn("them", 0, 1.0)))["beside_best"]["TTFT, mean"] is None
