"""What turns come to beside each other, in the terminal and in the JSON."""

from typing import Any

import pytest

from benchmarks.compare import terminal
from benchmarks.report import figures

Json = dict[str, Any]


def turn(name: str, repeat: int, completion: float | None, **more: Any) -> Json:
    """One in which every request took so long; None: there was none."""
    requests = [] if completion is None else [{"at_s": 0.0, "completion_s": completion}] * 3
    return {"run": {"name": name, "repeat": repeat}, "requests": requests, **more}


def compared(*runs: Json, ours: list[str] | None = None) -> Json:
    return {"compare": {"ours": ["us"] if ours is None else ours}, "runs": list(runs)}


def turns(**values: tuple[float, ...]) -> Json:
    return compared(
        *(turn(name, n, value) for name, of in values.items() for n, value in enumerate(of))
    )


def said(results: Json, metric: str = "Completion, mean") -> str:
    """The terminal's sentence."""
    return next(
        line for line in terminal.result(results).splitlines() if line.startswith(f"{metric}: ")
    )


DOUBT = {"validity": {"doubts": ["CPU 95% busy"]}}
WRONG = {"complaints": ["1 of 3 requests failed"]}


def test_a_ratio_is_to_the_best_other_of_the_same_turn() -> None:
    results = turns(us=(1.0, 2.0, 8.0), one=(2.0, 2.5, 12.0), other=(4.0, 3.0, 10.0))
    found = figures.to_json(results)
    assert found["contenders"]["us"]["Completion, mean"] == {
        "median": 2.0,
        "least": 1.0,
        "most": 8.0,
        "turns": 3,
    }
    assert found["contenders"]["us"]["TTFT, mean"] is None
    beside = found["beside_best"]["Completion, mean"]
    assert beside["ratio"] == {"median": 0.8, "least": 0.5, "most": 0.8, "turns": 3}
    assert beside["names"] == ("one", "other")
    assert (beside["less"], beside["more"]) == (3, 0)


def test_turns_that_agree_and_turns_that_do_not() -> None:
    assert said(turns(us=(1.0, 2.0), them=(2.0, 5.0))) == (
        "Completion, mean: us is 0.45× the best other (them), better in all 2 turns "
        "(0.40 – 0.50×). 1.50 s against 3.50 s."
    )
    assert "worse in all 2 turns (2.00 – 2.50×)" in said(turns(us=(2.0, 5.0), them=(1.0, 2.0)))
    assert "better in 2 of 3 turns (0.50 – 2.00×): no clear difference" in said(
        turns(us=(1.0, 1.0, 2.0), them=(2.0, 2.0, 1.0))
    )
    assert "better in 0 of 2 turns: no clear difference" in said(turns(us=(1.0,) * 2, a=(1.0,) * 2))


def test_one_turn_shows_no_spread() -> None:
    results = turns(us=(0.5,), them=(3.0,))
    assert said(results) == (
        "Completion, mean: us is 0.17× the best other (them), in one turn, which shows no spread. "
        "500 ms against 3.00 s."
    )
    assert "…" not in terminal.result(results)


def test_a_range_that_is_none_is_not_shown() -> None:
    printed = terminal.result(turns(us=(1.0, 1.0), them=(2.0, 2.0)))
    assert "better in all 2 turns. 1.00 s" in printed
    assert "1.00 (" not in printed
    assert "1.00 (1.00…1.50)" in terminal.result(turns(us=(1.0, 1.0, 1.5), them=(2.0,) * 3))


@pytest.mark.parametrize("wrong", [DOUBT, WRONG])
def test_what_is_in_doubt_is_never_the_best_other(wrong: Json) -> None:
    results = compared(
        turn("us", 0, 1.0),
        turn("us", 1, 1.0),
        turn("fast", 0, 0.1, **wrong),
        turn("fast", 1, 4.0),
        turn("slow", 0, 2.0),
        turn("slow", 1, 5.0),
    )
    beside = figures.to_json(results)["beside_best"]["Completion, mean"]
    assert beside["ratio"] == {"median": 0.375, "least": 0.25, "most": 0.5, "turns": 2}
    printed = terminal.result(results)
    assert "\nfast ! " in printed
    assert "In doubt: fast in 1 of 2 turns. Comparisons leave these turns out." in printed


def test_ones_own_doubtful_turn_is_left_out() -> None:
    results = compared(
        turn("us", 0, 1.0), turn("us", 1, 0.1, **DOUBT), turn("them", 0, 2.0), turn("them", 1, 2.0)
    )
    assert "us is 0.50× the best other (them), in one turn" in said(results)


def test_nothing_is_left_to_be_compared() -> None:
    every = (
        compared(turn("us", 0, 1.0), turn("them", 0, 2.0, **WRONG)),
        compared(turn("us", 0, 1.0, **DOUBT), turn("them", 0, 2.0)),
        compared(turn("us", 0, 1.0, **DOUBT), turn("us", 1, 1.0), turn("them", 0, 2.0)),
    )
    for results in every:
        printed = terminal.result(results)
        assert "Nothing is compared: in no turn are both us and another without doubt." in printed
        assert "Completion, mean: 1.00 s." in printed
        assert "×" not in printed


def test_ours_did_not_run_at_all() -> None:
    printed = terminal.result(compared(turn("them", 0, 1.0)))
    assert "us has no run: nothing is compared." in printed
    assert figures.to_json(compared(turn("them", 0, 1.0)))["beside_best"]["TTFT, mean"] is None


def test_without_ours_the_first_is_compared() -> None:
    results = compared(turn("a", 0, 1.0), turn("b", 0, 2.0), ours=[])
    assert "a is 0.50× the best other (b)" in said(results)


def test_a_turn_without_answers() -> None:
    results = compared(turn("us", 0, None, **WRONG), turn("them", 0, 1.0))
    assert "us: no request was answered." in terminal.result(results)
