"""Each reason excludes a replica from the candidates, and ends as its table row says."""

import pytest

from extproc.replica_state import STALE_AFTER_S
from tests.fakes import MODEL, chat, excluded, replica
from tests.fleet.conftest import PolledFleet

BOTH = [replica(1), replica(2)]


@pytest.fixture
def fleet(pair: PolledFleet) -> PolledFleet:
    return pair


def ids(fleet: PolledFleet, model: str = MODEL, response_visible: bool = True) -> list[str]:
    return list(fleet.view(model, response_visible=response_visible).ids)


def fail(fleet: PolledFleet, number: int = 1, times: int = 3) -> None:
    for _ in range(times):
        fleet.eligibility.failed(replica(number))


# -- ejection -------------------------------------------------------------------------------


def test_ejection_doubles_after_a_failed_trial_and_ends_with_a_success(fleet: PolledFleet) -> None:
    fail(fleet)
    assert ids(fleet) == [replica(2)]
    fleet.clock.advance(1.1)
    assert ids(fleet) == BOTH
    fail(fleet, times=1)
    fleet.clock.advance(1.1)
    assert ids(fleet) == [replica(2)]
    fleet.clock.advance(1.1)
    fleet.eligibility.succeeded(replica(1))
    fail(fleet, times=1)
    assert ids(fleet) == BOTH


def test_trial_in_flight_is_the_only_one_until_its_outcome(fleet: PolledFleet) -> None:
    fail(fleet)
    fleet.clock.advance(1.1)
    assert ids(fleet) == BOTH
    fleet.dispatch(replica(1), chat(100, 500))
    assert ids(fleet) == [replica(2)]
    fleet.clock.advance(1.1)
    assert ids(fleet) == BOTH, "an outcome that never came"
    fleet.eligibility.succeeded(replica(1))
    assert ids(fleet) == BOTH

    fail(fleet)
    fleet.clock.advance(1.1)
    fleet.dispatch(replica(1), chat(100, 500))
    fleet.clock.advance(0.5)
    fail(fleet, times=1)
    fleet.clock.advance(1.9)
    assert ids(fleet) == [replica(2)]
    fleet.clock.advance(0.2)
    assert ids(fleet) == BOTH


def test_failures_during_an_ejection_do_not_extend_it(fleet: PolledFleet) -> None:
    fail(fleet, times=20)
    fleet.clock.advance(1.1)
    assert ids(fleet) == BOTH


def test_replica_that_fails_for_hours_stays_ejected(fleet: PolledFleet) -> None:
    for _ in range(2000):
        fail(fleet, times=1)
        fleet.clock.advance(31.0)
    fail(fleet, times=1)
    assert ids(fleet) == [replica(2)]


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_at_most_half_of_the_replicas_are_ejected(count: int) -> None:
    fleet = PolledFleet(count)
    for number in range(1, count + 1):
        fail(fleet, number, times=5)
    assert len(fleet.view(MODEL)) == max(count - count // 2, 1)


def test_unhealthy_replicas_do_not_count_as_ejected() -> None:
    fleet = PolledFleet(4)
    for number in (1, 2):
        fail(fleet, number)
        fleet.poll(number, healthy=False)
        fail(fleet, number)
    fail(fleet, 3)
    assert ids(fleet) == [replica(4)]


def test_only_a_request_with_a_visible_response_is_a_trial(fleet: PolledFleet) -> None:
    fail(fleet)
    fleet.clock.advance(1.1)
    for _ in range(20):
        assert ids(fleet, response_visible=False) == [replica(2)]
        fleet.dispatch(replica(2), chat(10), response_visible=False)
    assert ids(fleet) == BOTH
    fleet.dispatch(replica(1), chat(10))
    assert ids(fleet) == [replica(2)]
    fleet.eligibility.succeeded(replica(1))
    for visible in (False, True):
        assert ids(fleet, response_visible=visible) == BOTH


def test_request_without_a_visible_response_ejects_no_last_replica() -> None:
    fleet = PolledFleet(1)
    fail(fleet)
    fleet.clock.advance(1.1)
    assert ids(fleet, response_visible=False) == [replica(1)]
    fleet.dispatch(replica(1), chat(10), response_visible=False)
    assert fleet.eligibility.is_up(replica(1))


def test_failures_of_a_removed_replica_are_forgotten(fleet: PolledFleet) -> None:
    fail(fleet)
    fleet.remove(replica(1))
    fail(fleet)
    fleet.poll(1)
    assert sorted(ids(fleet)) == BOTH


def test_view_made_during_an_ejection_stays_valid_after_it(fleet: PolledFleet) -> None:
    fleet.dispatch(replica(1), chat(100, 500))
    fail(fleet)
    view = fleet.view(MODEL)
    fleet.clock.advance(5.0)
    assert len(fleet.sequences(view).replica) == 0
    assert ids(fleet) == BOTH


def test_suspects_are_replicas_that_failed_within_a_minute(fleet: PolledFleet) -> None:
    eligibility = fleet.eligibility
    assert not eligibility.has_suspects
    fail(fleet, times=1)
    assert eligibility.has_suspects
    eligibility.succeeded(replica(1))
    assert not eligibility.has_suspects
    fail(fleet, 2, times=1)
    fleet.clock.advance(59)
    assert eligibility.has_suspects
    fleet.clock.advance(2)
    assert not eligibility.has_suspects
    fail(fleet, 2, times=1)
    assert eligibility.has_suspects
    fleet.remove(replica(2))
    assert not eligibility.has_suspects


def test_ejected_replica_is_a_suspect_only_for_its_trial(fleet: PolledFleet) -> None:
    fail(fleet)
    assert not fleet.eligibility.has_suspects
    fleet.clock.advance(1.1)
    assert fleet.eligibility.has_suspects
    fleet.eligibility.sent(replica(1))
    assert not fleet.eligibility.has_suspects


# -- full engines ---------------------------------------------------------------------------


def test_engine_that_steps_and_answers_503_is_full_and_not_ejected(fleet: PolledFleet) -> None:
    for steps in (1.0, 2.0):
        fleet.poll(1, running=12, steps=steps)
    for _ in range(10):
        fleet.eligibility.failed(replica(1), unavailable=True)
    assert excluded(fleet) == {replica(1): "its engine answered that it is full"}
    fleet.clock.advance(0.9)
    fleet.eligibility.failed(replica(1), unavailable=True)
    fleet.clock.advance(0.9)
    assert excluded(fleet)
    fleet.clock.advance(0.2)
    assert not excluded(fleet)


def test_responses_that_change_no_candidate_choose_none_anew(fleet: PolledFleet) -> None:
    """To choose the candidates of a thousand replicas takes as long as 27 decisions."""
    fleet.poll(1, running=12, steps=1.0)
    fleet.poll(2, healthy=False)
    fleet.eligibility.failed(replica(1), unavailable=True)
    candidates = fleet.view(MODEL).candidates
    fleet.eligibility.failed(replica(1), unavailable=True)
    fleet.eligibility.response_seen(replica(2))
    assert fleet.view(MODEL).candidates is candidates


def test_503s_of_an_engine_that_steps_no_more_count_once_a_second(fleet: PolledFleet) -> None:
    for _ in range(10):
        fleet.eligibility.failed(replica(1), unavailable=True)
    assert not excluded(fleet)
    for _ in range(2):
        fleet.clock.advance(1.1)
        fleet.poll(2)
        fleet.eligibility.failed(replica(1), unavailable=True)
    assert excluded(fleet) == {replica(1): "ejected: 3 or more consecutive requests failed"}


# -- reasons from polls ---------------------------------------------------------------------


def test_each_exclusion_has_a_text() -> None:
    fleet = PolledFleet(5)
    fleet.poll(1, healthy=False, problem="/health answered 503")
    fleet.poll(2, models=("another",))
    fleet.poll(3, asleep=True)
    fail(fleet, 4)
    assert ids(fleet) == [replica(5)]
    assert excluded(fleet) == {
        replica(1): "/health answered 503",
        replica(2): f"does not serve {MODEL!r}",
        replica(3): "its engine sleeps",
        replica(4): "ejected: 3 or more consecutive requests failed",
    }
    fleet.poll(3)
    assert ids(fleet) == [replica(3), replica(5)]


def reasons_of(fleet: PolledFleet) -> dict[str, str]:
    return {replica: name for replica, (name, _) in fleet.eligibility.exclusions().items()}


def test_exclusions_for_any_model_have_a_reason() -> None:
    fleet = PolledFleet(5)
    fleet.poll(1, healthy=False, problem="connection refused")
    fleet.poll(2, draining=True)
    fleet.poll(3, running=1)
    fail(fleet, 4)
    fleet.dispatch(replica(3), chat(100, 100))
    reasons = {replica(1): "unhealthy", replica(2): "draining", replica(4): "failing"}
    assert reasons_of(fleet) == reasons
    for _ in range(12):
        fleet.clock.advance(1.0)
        for number in (1, 2, 3, 5):
            figures = {"healthy": number != 1, "draining": number == 2, "running": number == 3}
            fleet.poll(number, **figures)
    stalled = {replica(3): "stalled", replica(4): "stalled"}
    assert reasons_of(fleet) == reasons | stalled
    fleet.remove(replica(4))
    assert replica(4) not in reasons_of(fleet)


def test_requests_go_only_to_replicas_that_list_the_model(fleet: PolledFleet) -> None:
    fleet.poll(2, models=("other",))
    assert ids(fleet, "other") == [replica(2)]
    for figures in ({"healthy": False}, {"draining": True}, {}):
        fleet.poll(1, **figures)
        assert replica(2) not in ids(fleet)
    assert ids(fleet, "an adapter just loaded") == BOTH
    fleet.poll(1, healthy=False)
    assert excluded(fleet) == {replica(1): "not healthy", replica(2): "does not serve 'llama'"}
    assert ids(fleet, "an adapter just loaded") == [replica(2)]


def test_model_is_unknown_while_all_replicas_list_models_without_it(fleet: PolledFleet) -> None:
    unknown = fleet.members.unknown
    fleet.poll(2, listed=False)
    assert not unknown("other")
    fleet.poll(2, listed=True)
    assert unknown("other")
    assert not unknown(MODEL)
    fleet.poll(2, models=("other",))
    assert not unknown("other")
    assert fleet.eligibility.candidates("other").only_some


def test_draining_replica_gets_requests_only_if_no_other_is_usable(fleet: PolledFleet) -> None:
    fleet.dispatch(replica(1), chat(100, 100))
    fleet.poll(1, draining=True)
    assert ids(fleet) == [replica(2)]
    assert excluded(fleet) == {replica(1): "draining"}
    assert fleet.in_flight_on(replica(1)) == 1
    fleet.poll(2, healthy=False, problem="gone")
    assert ids(fleet) == [replica(1)]
    fleet.poll(2)
    assert ids(fleet) == [replica(2)]
    fail(fleet, 2)
    assert ids(fleet) == [replica(1)]
    fleet.poll(1)
    assert ids(fleet) == [replica(1)]


@pytest.mark.parametrize(
    "figure", ["steps", "prompt_tokens", "generated_tokens", "first_tokens", "kv_usage", "running"]
)
def test_engine_with_work_is_stalled_if_no_figure_moves(fleet: PolledFleet, figure: str) -> None:
    for number in (1, 2):
        fleet.dispatch(replica(number), chat(100, 100))
    for second in range(1, 60):
        fleet.clock.advance(0.25)
        moved = {"running": 1} | {figure: second if figure != "kv_usage" else second / 100}
        fleet.poll(1, running=40, waiting=20, steps=500, kv_usage=0.9)
        fleet.poll(2, **moved)
    assert ids(fleet) == [replica(2)]
    assert excluded(fleet) == {
        replica(1): "nothing moved in its engine for 10 s, though it has requests"
    }


def test_replica_that_is_up_again_is_used_at_once(fleet: PolledFleet) -> None:
    figures = {"running": 3, "steps": 9.0, "scraped_at": fleet.clock()}
    fleet.poll(1, **figures)
    for _ in range(15):
        fleet.clock.advance(1.0)
        fleet.poll(1, **figures, healthy=False)
        fleet.poll(2)
    fleet.poll(1)
    assert ids(fleet) == BOTH


def test_all_replicas_are_used_if_all_are_stalled(fleet: PolledFleet) -> None:
    for _ in range(14):
        fleet.clock.advance(1.0)
        for number in (1, 2):
            fleet.poll(number, running=1, steps=100)
    assert ids(fleet) == BOTH


@pytest.mark.parametrize("scrape_s", [1.0, 3.2])
def test_replica_without_updates_is_excluded_while_others_have_some(
    fleet: PolledFleet, scrape_s: float
) -> None:
    for _ in range(round(9 / scrape_s)):
        fleet.clock.advance(scrape_s)
        fleet.poll(2)
    assert ids(fleet) == [replica(2)]
    assert "no update for" in excluded(fleet)[replica(1)]
    for _ in range(2):
        fleet.clock.advance(1.0)
        for number in (1, 2):
            fleet.poll(number)
    assert ids(fleet) == BOTH


def test_replica_that_answers_nothing_is_excluded_until_it_does(fleet: PolledFleet) -> None:
    fleet.poll(1, unanswered_s=0.9)
    assert ids(fleet) == BOTH
    fleet.poll(1, unanswered_s=1.4)
    assert excluded(fleet) == {replica(1): "accepts connections, but has answered nothing for 1 s"}
    fleet.poll(2, unanswered_s=1.4)
    assert ids(fleet) == BOTH, "the reason leaves no replica"
    fleet.poll(1)
    assert ids(fleet) == [replica(1)]


def test_hung_replica_answers_nobody_while_another_answers(fleet: PolledFleet) -> None:
    hung = fleet.eligibility.hung
    fleet.poll(1, unanswered_s=19.0, healthy=False)
    assert not hung(20.0), "too short"
    fleet.clock.advance(2)
    fleet.poll(1, unanswered_s=21.0, healthy=False)
    assert hung(20.0) == {replica(1)}
    fleet.poll(2, unanswered_s=0.2)
    assert not hung(20.0), "no replica answers: the poller may be cut off"
    fleet.poll(2)
    fleet.eligibility.response_seen(replica(1))
    assert not hung(20.0), "a request was answered meanwhile"
    fleet.clock.advance(22)
    fleet.poll(1, unanswered_s=21.5, healthy=False)
    assert hung(20.0) == {replica(1)}


# -- trials of unhealthy replicas -----------------------------------------------------------


def test_unhealthy_replica_is_used_while_it_answers_this_router(fleet: PolledFleet) -> None:
    for number in (1, 2):
        fleet.poll(number, healthy=False, problem="timed out")
    assert not ids(fleet)
    fleet.clock.advance(2.0)
    fleet.eligibility.response_seen(replica(2))
    assert ids(fleet) == [replica(2)]
    fleet.clock.advance(STALE_AFTER_S - 1.0)
    candidates = fleet.eligibility.candidates(MODEL)
    fleet.eligibility.response_seen(replica(2))
    assert fleet.eligibility.candidates(MODEL) is candidates, "computed once, not for each response"
    fleet.clock.advance(1.1)
    assert ids(fleet) == [replica(2)]
    fleet.clock.advance(STALE_AFTER_S - 1.0)
    assert ids(fleet) == [replica(1)], "a trial"


def test_pods_that_are_not_ready_serve_if_they_are_more_than_half() -> None:
    fleet, problem = PolledFleet(4), "not ready, says Kubernetes"
    for number in (1, 2):
        fleet.poll(number, ready=False, problem=problem)
        fleet.eligibility.response_seen(replica(number))
    assert excluded(fleet) == {replica(1): problem, replica(2): problem}
    assert reasons_of(fleet) == {replica(1): "not ready", replica(2): "not ready"}
    fleet.poll(3, ready=False, problem=problem)
    assert ids(fleet) == [replica(number) for number in (1, 2, 3, 4)]
    assert not reasons_of(fleet)
    fleet.poll(1, healthy=False, problem="cannot connect")
    assert ids(fleet) == [replica(number) for number in (2, 3, 4)]


def test_pod_that_is_not_ready_and_answers_only_requests_is_not_used(fleet: PolledFleet) -> None:
    fleet.poll(1, healthy=False, ready=False, problem="/metrics answered 500")
    fleet.poll(2)
    fleet.clock.advance(2.0)
    fleet.eligibility.response_seen(replica(1))
    assert excluded(fleet) == {replica(1): "/metrics answered 500"}


@pytest.mark.parametrize("model", [MODEL, ""])
def test_each_unhealthy_replica_is_tried_every_five_seconds_if_none_is_usable(
    fleet: PolledFleet, model: str
) -> None:
    for number in (1, 2):
        fleet.poll(number, healthy=False, problem="timed out")
    tried, began = [], fleet.clock()
    for _ in range(44):
        fleet.clock.advance(0.5)
        for found in ids(fleet, model):
            fleet.dispatch(found, chat(10))
            tried.append(fleet.clock() - began)
    assert tried == [5.0, 5.5, 10.0, 10.5, 15.0, 15.5, 20.0, 20.5]


def test_replica_that_refuses_connections_is_not_tried() -> None:
    fleet = PolledFleet(1)
    fleet.poll(1, healthy=False, refuses=True)
    fleet.clock.advance(10.0)
    assert not ids(fleet)


def test_replica_that_rejoins_has_no_exclusions() -> None:
    fleet = PolledFleet(0)
    for number in (1, 2):
        fleet.poll(number, running=1)
    fleet.clock.advance(60)
    fleet.remove(replica(1))
    for _ in range(2):
        fleet.clock.advance(1)
        for number in (1, 2):
            fleet.poll(number, running=1, steps=fleet.clock())
    assert ids(fleet) == BOTH
