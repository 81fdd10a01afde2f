"""A requested name stands for one or several models, and each replica gets the name it knows."""

import random
from dataclasses import replace

import pytest

from extproc.fleet.fleet import Fleet
from extproc.fleet.members import ModelNames
from extproc.predict.lengths import OutputLengths
from extproc.route.decision import Decision
from extproc.route.router import Router
from tests.fakes import A10, H100, ManualClock, chat, decided, replica, state

NAMES = ModelNames(
    {"llama": ("a", "b"), "split": {"llama": 3.0, "q": 1.0, "none": 9.0, "off": 0.0}}
)


def router(**models: tuple[str, ...]) -> Router:
    """Return a router of replicas 1, 2, … with these models; the first is twice as fast."""
    clock = ManualClock()
    fleet = Fleet(OutputLengths(), clock, names=NAMES)
    for number, served in enumerate(models.values(), start=1):
        fleet.put(state(number, H100 if number == 1 else A10, clock, models=served))
    return Router(fleet, "completion", random.Random(1))


def decide(router: Router, model: str) -> Decision:
    return decided(router, replace(chat(1_000), model=model))


def test_alias_is_served_by_all_replicas_with_any_of_its_models() -> None:
    decision = decide(router(one=("b",), two=("a",), three=("q",), four=("b",)), "llama")
    assert set(decision.situation.view.ids) == {replica(1), replica(2), replica(4)}
    assert (decision.replica, decision.name) == (replica(1), "b")
    assert decision.second == replica(4), "the second knows the name, though it may be the third"


def test_first_listed_name_on_the_replica_is_sent() -> None:
    assert decide(router(one=("b", "a")), "llama").name == "a"
    assert decide(router(one=()), "llama").name == "a"


def test_second_choice_must_know_the_name() -> None:
    assert decide(router(one=("b",), two=("a",)), "llama").second is None


def test_model_is_drawn_by_weight_among_served_models() -> None:
    chosen = router(one=("a",), two=("q", "off"))
    drawn = [chosen.model("split", "", None) for _ in range(1_000)]
    assert set(drawn) == {"llama", "q"}
    assert drawn.count("q") == pytest.approx(250, abs=50)
    assert chosen.model("other", "", None) == "other"


def test_draw_keeps_the_model_of_a_stored_response() -> None:
    chosen = router(one=("a",), two=("q",))
    chosen.fleet.responses.remember("resp_1", replica(2))
    assert {chosen.model("split", "resp_1", None) for _ in range(20)} == {"q"}
    subset = frozenset({replica(1)})
    assert {chosen.model("split", "", subset) for _ in range(20)} == {"llama"}


def test_draw_without_a_served_model_names_one_of_the_weighted_models() -> None:
    assert router(one=("x",)).model("split", "", None) in {"llama", "q", "none"}
