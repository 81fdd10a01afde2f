"""What speaks against a replica, as the fleet's candidates show it."""

import pytest
from msgspec import structs

from extproc.fleet.eligibility import Eligibility
from extproc.fleet.fleet import Fleet
from extproc.fleet.members import ModelNames
from extproc.predict.lengths import OutputLengths
from tests.fakes import MODEL, ManualClock, chat, excluded, fleet_of, replica, state

A10 = "llama-8b-a10"


def test_doubt_ends_when_the_replica_is_well_or_nothing_fails_any_more() -> None:
    clock = ManualClock()
    eligibility = Eligibility(clock, ModelNames(), {replica(1): 0, replica(2): 1})
    for number in (1, 2):
        eligibility.polled(state(number, A10, clock))
    assert not eligibility.has_suspects
    eligibility.failed(replica(1))
    assert eligibility.has_suspects
    eligibility.succeeded(replica(1))
    assert not eligibility.has_suspects
    eligibility.failed(replica(2))
    clock.advance(59)
    assert eligibility.has_suspects
    clock.advance(2)
    assert not eligibility.has_suspects, "nobody has sent it anything"
    eligibility.failed(replica(2))
    assert eligibility.has_suspects
    eligibility.forget(replica(2))
    assert not eligibility.has_suspects


def test_one_that_gets_nothing_is_in_no_doubt() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10, A10)
    for _ in range(3):
        fleet.eligibility.failed(replica(1))
    assert not fleet.eligibility.has_suspects, "it is left out"
    clock.advance(1.1)
    assert fleet.eligibility.has_suspects, "the next request may try it"
    fleet.eligibility.sent(replica(1))
    assert not fleet.eligibility.has_suspects, "one is enough"


def test_only_a_request_whose_outcome_is_told_tries_one_that_failed() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10, A10)
    for _ in range(3):
        fleet.eligibility.failed(replica(1))
    clock.advance(1.1)
    for _ in range(20):
        assert fleet.view(MODEL, response_visible=False).ids == [replica(2)]
        fleet.dispatch(replica(2), chat(10), response_visible=False)
    assert fleet.view(MODEL).ids == [replica(1), replica(2)]
    fleet.dispatch(replica(1), chat(10))
    assert fleet.view(MODEL).ids == [replica(2)], "one is enough"
    fleet.eligibility.succeeded(replica(1))
    for told in (False, True):
        assert fleet.view(MODEL, response_visible=told).ids == [replica(1), replica(2)]


def test_where_all_failed_what_is_not_told_goes_there_and_is_no_try() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10)
    for _ in range(3):
        fleet.eligibility.failed(replica(1))
    clock.advance(1.1)
    assert fleet.view(MODEL, response_visible=False).ids == [replica(1)]
    fleet.dispatch(replica(1), chat(10), response_visible=False)
    assert fleet.eligibility.is_up(replica(1)), "not ejected again"


@pytest.mark.parametrize(
    "figure",
    ["steps", "prompt_tokens", "generated_tokens", "first_tokens", "kv_usage", "running"],
)
def test_an_engine_with_work_in_which_anything_moves_is_no_dead_one(figure: str) -> None:
    """vLLM counts no step that only prefills part of a prompt."""
    clock = ManualClock()
    fleet = fleet_of(clock, A10, A10)
    for number in (1, 2):
        fleet.dispatch(replica(number), chat(100, 100))
    for second in range(1, 60):
        clock.advance(0.25)
        moved = {"running": 1} | {figure: second if figure != "kv_usage" else second / 100}
        fleet.put(state(1, A10, clock, running=40, waiting=20, steps=500, kv_usage=0.9))
        fleet.put(state(2, A10, clock, **moved))
    assert fleet.view(MODEL).ids == [replica(2)]
    assert excluded(fleet) == {
        replica(1): "nothing moved in its engine for 10 s, though it has requests"
    }


def test_requests_go_to_no_replica_of_another_model_while_there_are_some_of_their_own() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10, A10)
    fleet.put(state(2, A10, clock, models=("other",)))
    for figures in ({"healthy": False}, {"draining": True}, {}):
        fleet.put(state(1, A10, clock, **figures))
        assert replica(2) not in fleet.view(MODEL).ids
    fleet.put(state(1, A10, clock, healthy=False))
    assert not fleet.view(MODEL).ids
    assert excluded(fleet) == {replica(1): "not healthy", replica(2): "does not serve 'llama'"}
    assert fleet.view("an adapter just loaded").ids == [replica(2)]


def test_one_that_comes_back_is_as_if_nothing_had_been() -> None:
    clock = ManualClock()
    fleet = Fleet(OutputLengths(), clock)
    for number in (1, 2):
        fleet.put(state(number, A10, clock, running=1))
    for _ in range(3):
        fleet.eligibility.failed(replica(1))
    clock.advance(60)
    fleet.remove(replica(1))
    for _ in range(2):
        clock.advance(1)
        for number in (1, 2):
            fleet.put(state(number, A10, clock, running=1, steps=clock()))
    assert fleet.view(MODEL).ids == [replica(1), replica(2)]


def test_one_is_silent_beside_others_that_answer_late() -> None:
    """A scrape may take three seconds, with the defaults, and counts as answered."""
    clock = ManualClock()
    fleet = fleet_of(clock, A10, A10)
    for _ in range(3):
        clock.advance(3.2)
        fleet.put(state(1, A10, clock))
    assert "no poll arrived" in excluded(fleet)[replica(2)]


def test_a_model_is_unknown_from_when_all_have_told_their_list_until_one_has_it() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10, A10)

    def unknown(model: str) -> bool:
        return fleet.eligibility.candidates(model).unknown

    fleet.put(state(2, A10, clock, listed=False))
    assert not unknown("other")
    fleet.put(state(2, A10, clock, listed=True))
    assert unknown("other")
    assert not unknown(MODEL)
    fleet.put(state(2, A10, clock, models=("other",)))
    assert not unknown("other")
    assert fleet.eligibility.candidates("other").only_some


def test_what_speaks_against_replicas_in_one_word() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, *[A10] * 5)
    fleet.put(state(1, A10, clock, healthy=False, problem="connection refused"))
    fleet.put(state(2, A10, clock, draining=True))
    fleet.put(state(3, A10, clock, running=1))
    for _ in range(3):
        fleet.eligibility.failed(replica(4))
    fleet.dispatch(replica(3), chat(100, 100))
    words = {replica(1): "unhealthy", replica(2): "draining", replica(4): "failing"}
    assert dict(fleet.eligibility.exclusions()) == words
    for _ in range(12):
        clock.advance(1.0)
        for number in (1, 2, 3, 5):
            figures = {"healthy": number != 1, "draining": number == 2, "running": number == 3}
            fleet.put(state(number, A10, clock, **figures))
    assert dict(fleet.eligibility.exclusions()) == {
        replica(1): "unhealthy",
        replica(2): "draining",
        replica(3): "stalled",
        replica(4): "stalled",
    }
    fleet.remove(replica(4))
    assert replica(4) not in dict(fleet.eligibility.exclusions())


def test_one_that_answers_nothing_is_left_out_until_it_does() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10, A10)
    fleet.put(state(1, A10, clock, unanswered_s=0.9))
    assert fleet.view(MODEL).ids == [replica(1), replica(2)]
    fleet.put(state(1, A10, clock, unanswered_s=1.4))
    assert excluded(fleet) == {replica(1): "accepts connections, but has answered nothing for 1 s"}
    fleet.put(state(2, A10, clock, unanswered_s=1.4))
    assert fleet.view(MODEL).ids == [replica(1), replica(2)], "not where that leaves none"
    fleet.put(state(1, A10, clock))
    assert fleet.view(MODEL).ids == [replica(1)]


def test_figures_told_once_more_are_no_new_ones() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10)
    polled = state(1, A10, clock, running=1, kv_usage=0.5)
    for silent_s in (0.0, 0.4, 0.0):
        fleet.put(structs.replace(polled, unanswered_s=silent_s))
    assert fleet.overview().external.item() == 0.0, "seen by one poll only"
    fleet.put(state(1, A10, clock, running=1, kv_usage=0.5))
    assert fleet.overview().external.item() == 1.0


def test_one_hangs_that_answers_nobody_while_another_does() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10, A10)
    hung = fleet.eligibility.hung
    fleet.put(state(1, A10, clock, unanswered_s=19.0, healthy=False))
    assert not hung(20.0), "not for long enough"
    clock.advance(2)
    fleet.put(state(1, A10, clock, unanswered_s=21.0, healthy=False))
    assert hung(20.0) == {replica(1)}
    fleet.put(state(2, A10, clock, unanswered_s=0.2))
    assert not hung(20.0), "nobody answers: the poller may be cut off"
    fleet.put(state(2, A10, clock))
    fleet.eligibility.response_seen(replica(1))
    assert not hung(20.0), "a request was answered meanwhile"
    clock.advance(22)
    fleet.put(state(1, A10, clock, unanswered_s=21.5, healthy=False))
    assert hung(20.0) == {replica(1)}, "and nothing since"
