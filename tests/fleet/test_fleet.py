from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from extproc.fleet.fleet import Fleet
from extproc.poll.metrics_text import read_metrics
from extproc.predict.completion import predict
from extproc.predict.inputs import usual_step
from extproc.predict.step import PROFILES
from extproc.replica_state import STALE_AFTER_S, ReplicaState
from tests.fakes import MODEL, ManualClock, chat, embedding, excluded, fleet_of, replica, state

A10 = "llama-8b-a10"


def test_a_dispatch_counts_at_once_and_its_release_takes_it_back() -> None:
    fleet = fleet_of(ManualClock(), A10, A10)
    ticket = fleet.dispatch(replica(1), chat(1000, 100))
    view = fleet.view(MODEL)
    assert view.requests.tolist() == [1, 0]
    assert view.backlog.tolist() == [1000, 0]

    fleet.release(ticket)
    view = fleet.view(MODEL)
    assert view.requests.tolist() == [0, 0]
    assert view.backlog.tolist() == [0, 0]
    assert fleet.in_flight == 0


def test_a_prompt_is_prefilled_at_the_speed_of_the_step_model() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10)
    fleet.dispatch(replica(1), chat(1000, 100))
    clock.advance(0.029 + 1000 * 260e-6 - 0.01)
    assert 0 < fleet.view(MODEL).backlog[0] < 1000
    clock.advance(0.02)
    view = fleet.view(MODEL)
    assert view.backlog[0] == 0
    assert view.batch[0] == 1
    assert view.kv_used[0] >= 1000


def test_decoding_brings_a_request_nearer_to_its_end() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10)
    fleet.lengths.observe(chat(100, 4096), 100)
    fleet.dispatch(replica(1), chat(100, 50))
    clock.advance(0.1)
    early = deepcopy(fleet.sequences(fleet.view(MODEL)))
    clock.advance(1.0)
    late = fleet.sequences(fleet.view(MODEL))
    steps = 1.0 / (0.029 + 50e-6 + 0.26e-6 * 120)
    grown = late.context[0] - early.context[0]
    assert grown == pytest.approx(steps, rel=0.05)
    assert late.remaining[0] < early.remaining[0]


def test_the_end_of_a_response_tells_that_earlier_prompts_are_prefilled() -> None:
    fleet = fleet_of(ManualClock(), A10)
    fleet.dispatch(replica(1), chat(5000, 100))
    second = fleet.dispatch(replica(1), chat(10, 1))
    fleet.dispatch(replica(1), chat(700, 100))
    fleet.release(second)
    assert fleet.view(MODEL).backlog[0] == 700


def test_a_client_that_hangs_up_takes_its_prompt_out_of_the_queue() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10)
    fleet.dispatch(replica(1), chat(1000, 100))
    queued = fleet.dispatch(replica(1), chat(4000, 100))
    fleet.dispatch(replica(1), chat(500, 100))
    fleet.release(queued, prefilled=False)
    assert fleet.view(MODEL).backlog[0] == 1500
    clock.advance(2.0)
    view = fleet.view(MODEL)
    assert view.backlog[0] == 0
    assert view.batch[0] == 2


def test_a_retry_moves_the_request_to_the_replica_that_served_it() -> None:
    fleet = fleet_of(ManualClock(), A10, A10)
    ticket = fleet.dispatch(replica(1), chat(1000, 100))
    fleet.move(ticket, replica(2))
    fleet.move(ticket, "192.0.2.9:1")
    view = fleet.view(MODEL)
    assert view.requests.tolist() == [0, 1]
    assert view.backlog.tolist() == [0, 1000]
    fleet.release(ticket)
    assert fleet.view(MODEL).backlog.tolist() == [0, 0]


@pytest.mark.parametrize("running", [0, 1, 2])
def test_what_a_poll_does_not_show_yet_takes_its_kv_space_all_the_same(running: int) -> None:
    """They were on the way when it was taken, and the clock had them begun."""
    clock = ManualClock()
    fleet = fleet_of(clock, A10)
    for _ in range(3):
        fleet.dispatch(replica(1), chat(1000, 100))
    clock.advance(1.5)
    assert fleet.view(MODEL).batch[0] == 3
    usage = running * 1000 / 42_000
    fleet.put(state(1, A10, clock, running=running, kv_usage=usage, steps=10.0))
    for seconds in (0.05, 0.5):
        clock.advance(seconds)
        assert fleet.view(MODEL).taken[0] == pytest.approx(3000, rel=0.05)


def test_a_prompt_takes_as_much_kv_space_in_whatever_part_it_is_prefilled() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10)
    ticket = fleet.dispatch(replica(1), chat(10_000, 100))
    fleet.dispatch(replica(1), chat(2_000, 100))
    for _ in range(4):
        view = fleet.view(MODEL)
        assert view.backlog[0] > 0.0
        assert view.taken[0] == pytest.approx(12_000)
        clock.advance(0.5)
        done = 12_000 - fleet.view(MODEL).backlog[0]
        fleet.put(state(1, A10, clock, running=1, waiting=1, kv_usage=done / 42_000))
    fleet.release(ticket, prefilled=False)
    assert fleet.view(MODEL).taken[0] == pytest.approx(2_000, rel=0.1)


def test_requests_that_two_polls_see_beyond_the_own_ones_are_others() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10)
    fleet.dispatch(replica(1), chat(100, 100))
    for _ in range(2):
        clock.advance(0.2)
        fleet.put(state(1, A10, clock, running=3, waiting=1, kv_usage=0.25))
    view = fleet.view(MODEL)
    assert view.requests[0] == 4
    assert view.kv_used[0] == pytest.approx(0.25 * 42_000, rel=0.05)
    clock.advance(0.2)
    fleet.put(state(1, A10, clock, running=1))
    assert fleet.view(MODEL).requests[0] == 1


def test_polled_steps_correct_the_progress_of_a_request() -> None:
    """The replica runs three times slower than its profile says."""
    clock = ManualClock()
    fleet = fleet_of(clock, A10)
    fleet.dispatch(replica(1), chat(100, 400))
    clock.advance(0.2)
    for tick in range(1, 20):
        fleet.put(state(1, A10, clock, running=1, steps=2.0 * tick, kv_usage=0.01))
        clock.advance(0.2)
    held = fleet.sequences(fleet.view(MODEL)).context[0] - 100
    assert held == pytest.approx(2.0 * 19, abs=12)


def test_a_request_has_a_token_for_each_step_since_its_first() -> None:
    """The replica runs three times slower than its profile says."""
    clock = ManualClock()
    fleet = fleet_of(clock, A10)
    bounds = 100, 400, 15
    new, long, short = (fleet.dispatch(replica(1), chat(100, bound)) for bound in bounds)
    assert fleet.release(new, prefilled=False).tokens == 0.0
    for tick in range(1, 21):
        clock.advance(0.2)
        fleet.put(state(1, A10, clock, running=2, steps=2.0 * tick, kv_usage=0.01))
    assert fleet.release(long).tokens == pytest.approx(2.0 * 20, abs=2)
    assert fleet.release(short).tokens == 15.0


def test_a_restarted_replica_counts_its_steps_anew() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10)
    fleet.put(state(1, A10, clock, steps=1e6))
    fleet.dispatch(replica(1), chat(100, 400))
    clock.advance(0.2)
    fleet.put(state(1, A10, clock, steps=5, running=1))
    assert 100 <= fleet.sequences(fleet.view(MODEL)).context[0] < 120


@pytest.mark.parametrize(("started_at", "known"), [(2e9, False), (1e9, True)])
def test_start_of_process_tells_restart_behind_higher_counters(
    started_at: float, known: bool
) -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10)
    fleet.put(state(1, A10, clock, steps=10, started_at=1e9))
    fleet.dispatch(replica(1), chat(100, 400))
    clock.advance(0.2)
    fleet.put(state(1, A10, clock, steps=200, running=1, started_at=started_at))
    assert (fleet.sequences(fleet.view(MODEL)).context[0] >= 250) == known


def test_a_replica_that_fails_fast_is_left_out_for_a_while() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10, A10)
    for _ in range(3):
        fleet.eligibility.failed(replica(1))
    assert fleet.view(MODEL).ids == [replica(2)]
    clock.advance(1.1)
    assert len(fleet.view(MODEL)) == 2
    fleet.eligibility.failed(replica(1))
    clock.advance(1.1)
    assert fleet.view(MODEL).ids == [replica(2)]
    clock.advance(1.1)
    fleet.eligibility.succeeded(replica(1))
    fleet.eligibility.failed(replica(1))
    assert len(fleet.view(MODEL)) == 2


def test_only_replicas_that_serve_the_model_are_candidates() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10, A10)
    fleet.put(state(2, A10, clock, models=("other",)))
    assert fleet.view("other").ids == [replica(2)]
    assert fleet.view(MODEL).ids == [replica(1)]
    assert len(fleet.view("an adapter just loaded")) == 2


def test_a_replica_that_left_gets_nothing_while_its_requests_end() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10, A10)
    ticket = fleet.dispatch(replica(1), chat(100, 100))
    fleet.remove(replica(1))
    assert fleet.view(MODEL).ids == [replica(2)]
    fleet.put(state(3, A10, clock))
    assert fleet.in_flight == 1
    assert fleet.in_flight_on(replica(3)) == 0
    fleet.release(ticket)
    fleet.put(state(4, A10, clock))
    view = fleet.view(MODEL)
    assert sorted(view.ids) == [replica(2), replica(3), replica(4)]
    assert not view.requests.any()


def test_replicas_go_when_they_fall_silent_but_not_when_everything_does() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10, A10)
    clock.advance(60)
    fleet.drop_stale(10)
    assert len(fleet.members) == 2
    for _ in range(10):
        fleet.put(state(2, A10, clock))
        fleet.drop_stale(10)
        assert len(fleet.members) == 2, "the others may not have been heard of yet"
        clock.advance(1)
    fleet.put(state(2, A10, clock))
    fleet.drop_stale(10)
    assert [state.id for state in fleet.members] == [replica(2)]


def test_a_replica_that_comes_back_still_has_its_requests() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10, A10)
    for _ in range(10):
        fleet.dispatch(replica(1), chat(100, 100))
    fleet.remove(replica(1))
    fleet.put(state(1, A10, clock))
    view = fleet.view(MODEL)
    assert view.requests[view.ids.index(replica(1))] == 10


def test_others_load_is_forgotten_when_polls_stop() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10)
    for _ in range(2):
        fleet.put(state(1, A10, clock, running=50, waiting=3, kv_usage=0.9))
    assert fleet.view(MODEL).batch[0] == 53
    clock.advance(60)
    view = fleet.view(MODEL)
    assert (view.requests[0], view.batch[0], view.kv_usage[0], view.waiting[0]) == (0, 0, 0, 0)


def test_the_replicas_own_queue_counts_as_waiting() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10)
    for _ in range(10):
        fleet.dispatch(replica(1), chat(100, 100))
    clock.advance(2.0)
    fleet.put(state(1, A10, clock, running=5, waiting=5, kv_usage=0.99))
    assert fleet.view(MODEL).waiting[0] == 5


def test_a_replica_that_runs_more_than_its_profile_allows_is_allowed_more() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10)
    fleet.put(state(1, A10, clock, running=400))
    assert fleet.view(MODEL).max_num_seqs[0] == 400


def test_the_limits_of_a_data_parallel_server_are_those_of_all_its_engines() -> None:
    clock = ManualClock()
    page = Path(__file__).parents[1] / "data" / "vllm" / "metrics-two-engines.txt"
    figures = asdict(read_metrics(page.read_bytes()))
    fleet = fleet_of(clock)
    one = state(1, "llama-8b-a10", clock)
    fleet.put(one)
    known = {name: figures[name] for name in ReplicaState.__struct_fields__ if name in figures}
    fleet.put(structs.replace(one, **(known | {"id": replica(2), "models": one.models})))
    fleet.put(structs.replace(one, id=replica(3), engines=2))
    view = fleet.view(MODEL)
    assert view.token_budget.tolist() == [2048, 4096, 4096]
    assert view.max_num_seqs.tolist() == [256, 512, 512]
    assert view.kv_capacity.tolist() == [42_000, 16_384, 84_000]


def test_a_prompt_has_to_fit_into_one_engine() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock)
    fleet.put(state(1, "llama-8b-a10", clock, engines=2, kv_tokens=16_384, max_model_len=20_000))
    assert fleet.view(MODEL).longest_prompt[0] == 8192


def test_a_failed_scrape_is_no_restart() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10)
    fleet.put(state(1, A10, clock, steps=1e6))
    fleet.dispatch(replica(1), chat(100, 10_000))
    clock.advance(1.0)
    fleet.put(state(1, A10, clock, healthy=False))
    fleet.put(state(1, A10, clock, steps=1e6 + 30, running=1))
    assert fleet.sequences(fleet.view(MODEL)).context[0] == pytest.approx(130, abs=10)


def test_decoding_goes_on_after_a_prefill_in_the_same_moment() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10)
    fleet.dispatch(replica(1), chat(100, 500))
    clock.advance(1.0)
    assert fleet.sequences(fleet.view(MODEL)).context[0] == pytest.approx(132, abs=3)


def test_a_pause_that_ends_between_two_looks_does_no_harm() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10, A10)
    fleet.dispatch(replica(1), chat(100, 500))
    for _ in range(3):
        fleet.eligibility.failed(replica(1))
    view = fleet.view(MODEL)
    clock.advance(5.0)
    assert len(fleet.sequences(view).replica) == 0
    assert len(fleet.view(MODEL)) == 2


def test_a_replica_that_fails_for_hours_stays_out() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10, A10)
    for _ in range(2000):
        fleet.eligibility.failed(replica(1))
        clock.advance(31.0)
    fleet.eligibility.failed(replica(1))
    assert fleet.view(MODEL).ids == [replica(2)]


def test_failures_at_once_count_for_one_pause() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10, A10)
    for _ in range(20):
        fleet.eligibility.failed(replica(1))
    clock.advance(1.1)
    assert len(fleet.view(MODEL)) == 2


def test_after_a_pause_one_request_tries_and_its_outcome_decides() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10, A10)
    for _ in range(3):
        fleet.eligibility.failed(replica(1))
    clock.advance(1.1)
    assert len(fleet.view(MODEL)) == 2
    fleet.dispatch(replica(1), chat(100, 500))
    assert fleet.view(MODEL).ids == [replica(2)]
    fleet.eligibility.succeeded(replica(1))
    assert len(fleet.view(MODEL)) == 2

    for _ in range(3):
        fleet.eligibility.failed(replica(1))
    clock.advance(1.1)
    fleet.dispatch(replica(1), chat(100, 500))
    clock.advance(0.5)
    fleet.eligibility.failed(replica(1))
    clock.advance(1.9)
    assert fleet.view(MODEL).ids == [replica(2)]
    clock.advance(0.2)
    assert len(fleet.view(MODEL)) == 2


def test_a_try_whose_outcome_is_never_heard_of_is_followed_by_another() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10, A10)
    for _ in range(3):
        fleet.eligibility.failed(replica(1))
    clock.advance(1.1)
    fleet.dispatch(replica(1), chat(100, 500))
    clock.advance(1.1)
    assert len(fleet.view(MODEL)) == 2


def test_a_replica_whose_steps_seem_to_cost_nothing_is_still_predicted() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10)
    learned = {"c0": 0.0, "c_prefill": 0.0, "c_batch": 1e-3, "c_kv": 0.0}
    fleet.put(state(1, A10, clock, learned=learned))
    clock.advance(1.0)
    ticket = fleet.dispatch(replica(1), chat(100, 50))
    clock.advance(1.0)
    view = fleet.view(MODEL)
    assert np.isfinite(view.decode_step).all()
    assert np.isfinite(fleet.sequences(view).remaining).all()
    fleet.release(ticket)


def test_an_embedding_is_prefilled_and_never_decodes() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10)
    fleet.dispatch(replica(1), embedding(500))
    clock.advance(1.0)
    view = fleet.view(MODEL)
    assert view.batch[0] == 0
    assert view.backlog[0] == 0


def test_an_empty_fleet_has_no_candidates() -> None:
    fleet = fleet_of(ManualClock())
    assert len(fleet.view(MODEL)) == 0
    with pytest.raises(KeyError):
        fleet.dispatch(replica(1), chat(1))


def test_what_is_left_out_says_why() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10, A10, A10, A10)
    fleet.put(state(1, A10, clock, healthy=False, problem="/health answered 503"))
    fleet.put(state(2, A10, clock, models=("another",)))
    for _ in range(3):
        fleet.eligibility.failed(replica(3))
    assert fleet.view(MODEL).ids == [replica(4)]
    assert excluded(fleet) == {
        replica(1): "/health answered 503",
        replica(2): f"does not serve {MODEL!r}",
        replica(3): "ejected: 3 or more consecutive requests failed",
    }


def poll_for(fleet: Fleet, clock: ManualClock, seconds: int, *numbers: int, steps: int = 0) -> None:
    """A poll a second; the engines step only where ``steps`` says so."""
    for second in range(seconds):
        clock.advance(1.0)
        for number in numbers:
            done = 100 + second * steps
            fleet.put(state(number, A10, clock, running=1, steps=done))


def test_a_replica_without_news_is_left_out_while_others_have_some() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10, A10)
    poll_for(fleet, clock, 8, 2, steps=20)
    assert fleet.view(MODEL).ids == [replica(2)]
    assert "no poll arrived" in excluded(fleet)[replica(1)]
    poll_for(fleet, clock, 2, 1, 2, steps=20)
    assert fleet.view(MODEL).ids == [replica(1), replica(2)]


def test_an_engine_that_steps_no_more_is_left_out() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10, A10)
    fleet.dispatch(replica(1), chat(100, 100))
    for _ in range(14):
        poll_for(fleet, clock, 1, 1)
        fleet.put(state(2, A10, clock, running=1, steps=clock()))
    assert fleet.view(MODEL).ids == [replica(2)]
    assert "nothing moved" in excluded(fleet)[replica(1)]


def test_where_all_stall_all_are_used() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10, A10)
    poll_for(fleet, clock, 14, 1, 2)
    assert fleet.view(MODEL).ids == [replica(1), replica(2)]


def test_a_replicas_own_histogram_teaches_output_lengths() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10)
    for ended in (0.0, 50.0, 100.0):
        lengths = ((10.0, 0.0), (20.0, ended), (50.0, 0.0))
        fleet.put(state(1, A10, clock, steps=ended, output_lengths=lengths))
    row = fleet.lengths.row(chat(10))
    assert fleet.lengths.expected(row, 4096) < 40


def test_a_request_that_must_reach_its_bound_is_expected_to() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10)
    profile = replace(chat(100, 2_000), least_output=2_000)
    fleet.dispatch(replica(1), profile)
    clock.advance(1.0)
    (remaining,) = fleet.sequences(fleet.view(MODEL)).remaining
    assert 1_900 < remaining < 2_000


def test_a_replica_that_took_long_is_tried_again() -> None:
    """Nothing is sent to it, and so nothing that ends there could prove it fast again."""
    clock = ManualClock()
    fleet = fleet_of(clock, A10, A10)
    for _ in range(10):
        fleet.decoded(replica(1), 5.0, 300.0)
    fleet.put(state(1, A10, clock))
    assert fleet.view(MODEL).stretch[0] > 2
    clock.advance(180.0)
    fleet.put(state(1, A10, clock))
    assert fleet.view(MODEL).stretch[0] < 1.1


def test_step_times_that_are_put_right_are_not_corrected_twice() -> None:
    """Requests took a fifth of what the profile said, and then the counters say so, too."""
    clock = ManualClock()
    fleet = fleet_of(clock, A10)
    before = usual_step(fleet.view(MODEL), 0)
    for _ in range(20):
        fleet.decoded(replica(1), 10.0, 2.0)
    assert fleet.view(MODEL).stretch[0] == 0.5
    fast = PROFILES[A10].step.slowed(0.2)
    fleet.put(structs.replace(state(1, A10, clock), learned=fast))
    assert fleet.view(MODEL).stretch[0] == pytest.approx(1.0, abs=0.02)
    # Nor by those that were predicted before, and end later.
    for _ in range(20):
        fleet.decoded(replica(1), 10.0, 2.0, before)
    assert fleet.view(MODEL).stretch[0] == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("slower", [3.0, 0.33])
def test_a_replica_that_changes_its_speed_is_not_taken_to_be_as_before(slower: float) -> None:
    """What it did before was predicted well, and says nothing of what counters tell now."""
    clock = ManualClock()
    fleet = fleet_of(clock, A10)
    for _ in range(60):
        fleet.decoded(replica(1), 5.0, 5.0)
    other = PROFILES[A10].step.slowed(slower)
    fleet.put(structs.replace(state(1, A10, clock), learned=other))
    assert fleet.view(MODEL).stretch[0] == pytest.approx(1.0, abs=0.02)


def test_a_replica_that_came_back_is_learned_from() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10)
    fleet.remove(replica(1))
    fleet.put(state(1, A10, clock))
    for _ in range(10):
        fleet.decoded(replica(1), 5.0, 10.0)
    fleet.put(state(1, A10, clock))
    assert fleet.view(MODEL).stretch[0] > 1.5


def test_requests_of_a_replica_that_left_are_not_held_against_anyone() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10)
    fleet.remove(replica(1))
    for _ in range(3):
        fleet.eligibility.failed(replica(1))
    fleet.put(state(1, A10, clock))
    assert fleet.view(MODEL).ids == [replica(1)]


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_at_most_half_of_the_replicas_are_ejected(count: int) -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, *[A10] * count)
    for number in range(1, count + 1):
        for _ in range(5):
            fleet.eligibility.failed(replica(number))
    assert len(fleet.view(MODEL)) == max(count - count // 2, 1)


def test_an_engine_that_steps_and_answers_503_is_full_and_not_ejected() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10, A10)
    for steps in (1.0, 2.0):
        fleet.put(state(1, A10, clock, running=12, steps=steps))
    for _ in range(10):
        fleet.eligibility.failed(replica(1), unavailable=True)
    assert excluded(fleet) == {replica(1): "its engine answered that it is full"}
    clock.advance(1.1)
    assert not excluded(fleet)


def test_engine_that_fills_between_two_polls_is_not_ejected() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10, A10)
    for _ in range(10):
        fleet.eligibility.failed(replica(1), unavailable=True)
    assert not excluded(fleet)
    for _ in range(2):
        clock.advance(1.1)
        fleet.put(state(2, A10, clock))
        fleet.eligibility.failed(replica(1), unavailable=True)
    assert excluded(fleet) == {replica(1): "ejected: 3 or more consecutive requests failed"}


def test_sleeping_engine_gets_nothing_until_it_is_awake() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10)
    fleet.put(state(1, A10, clock, asleep=True))
    assert excluded(fleet) == {replica(1): "its engine sleeps"}
    fleet.put(state(1, A10, clock))
    assert fleet.view(MODEL).ids == [replica(1)]


def test_frozen_gauges_of_an_idle_replica_count_for_nothing() -> None:
    """vLLM's keep their last values when all requests are aborted at once."""
    clock = ManualClock()
    fleet = fleet_of(clock, A10)
    ticket = fleet.dispatch(replica(1), chat(100, 100))
    figures = {"running": 20, "waiting": 5, "kv_usage": 0.9, "kv_tokens": 42_000, "steps": 7.0}
    fleet.put(state(1, A10, clock, **figures))
    fleet.release(ticket)
    for _ in range(60):
        clock.advance(0.25)
        fleet.put(state(1, A10, clock, **figures))
    view = fleet.view(MODEL)
    assert view.ids == [replica(1)]
    assert view.requests[0] == 0.0
    assert view.kv_usage[0] == pytest.approx(0.0, abs=0.01)


def test_replica_is_used_that_answers_this_router_and_not_its_poller() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10, A10)
    for number in (1, 2):
        fleet.put(state(number, A10, clock, healthy=False, problem="timed out"))
    assert not fleet.view(MODEL).ids
    clock.advance(2.0)
    fleet.eligibility.response_seen(replica(2))
    assert fleet.view(MODEL).ids == [replica(2)]
    clock.advance(STALE_AFTER_S + 0.1)
    assert fleet.view(MODEL).ids == [replica(1)], "a trial"


def test_where_no_replica_is_healthy_one_request_tries_every_five_seconds() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10, A10)
    for number in (1, 2):
        fleet.put(state(number, A10, clock, healthy=False, problem="timed out"))
    tried, began = [], clock()
    for _ in range(44):
        clock.advance(0.5)
        for found in fleet.view(MODEL).ids:
            fleet.dispatch(found, chat(10))
            tried.append((clock() - began, found))
    assert [at for at, _ in tried] == [5.0, 5.5, 10.0, 10.5, 15.0, 15.5, 20.0, 20.5]


def test_a_draining_replica_gets_nothing_new_and_keeps_what_it_has() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10, A10)
    fleet.dispatch(replica(1), chat(100, 100))
    fleet.put(state(1, A10, clock, draining=True))
    assert fleet.view(MODEL).ids == [replica(2)]
    assert excluded(fleet) == {replica(1): "draining"}
    assert fleet.in_flight_on(replica(1)) == 1
    fleet.put(state(1, A10, clock))
    assert len(fleet.view(MODEL)) == 2


def test_no_request_tries_a_replica_that_refuses_connections() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10)
    fleet.put(state(1, A10, clock, healthy=False, refuses=True))
    clock.advance(10.0)
    assert not fleet.view(MODEL).ids


def test_draining_replicas_serve_where_no_other_could() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10, A10)
    fleet.put(state(1, A10, clock, draining=True))
    fleet.put(state(2, A10, clock, healthy=False, problem="gone"))
    assert fleet.view(MODEL).ids == [replica(1)]
    fleet.put(state(2, A10, clock))
    assert fleet.view(MODEL).ids == [replica(2)]
    for _ in range(3):
        fleet.eligibility.failed(replica(2))
    assert fleet.view(MODEL).ids == [replica(1)]


def test_the_only_model_is_the_one_that_all_serve_that_say() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, "llama-8b-a10", "llama-8b-a10")
    assert fleet.members.only_model == MODEL
    fleet.put(state(2, "llama-8b-a10", clock, healthy=False, models=()))
    assert fleet.members.only_model == MODEL
    fleet.put(state(2, "llama-8b-a10", clock, models=("other",)))
    assert fleet.members.only_model is None
    assert fleet_of(clock).members.only_model is None


def test_where_tokens_are_drafted_a_step_gives_several() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10, A10)
    fleet.put(state(1, A10, clock, tokens_per_step=3.0))
    view = fleet.view(MODEL)
    assert view.tokens_per_step == pytest.approx([3.0, 1.0])
    profile = chat(100, 1000)
    prediction = predict(profile, 1000.0, view, fleet.sequences(view), np.zeros(1))
    assert prediction.decode[0] == pytest.approx(prediction.decode[1] / 3)

    for number in (1, 2):
        fleet.dispatch(replica(number), profile)
    clock.advance(3.0)
    drafted, plain = fleet.sequences(fleet.view(MODEL)).context - 100
    assert drafted == pytest.approx(3 * plain, rel=0.02)


def test_request_in_flight_is_expected_as_its_kind_was_when_it_came() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10)
    for _ in range(200):
        fleet.lengths.observe(chat(100), 900)

    def learn_others() -> None:
        for number in range(2000):
            fleet.lengths.observe(replace(chat(100), model=f"model-{number}"), 4000)

    ticket = fleet.dispatch(replica(1), chat(100))
    clock.advance(1.0)
    [before] = fleet.sequences(fleet.view(MODEL)).remaining
    learn_others()
    clock.advance(0.1)
    [after] = fleet.sequences(fleet.view(MODEL)).remaining
    assert after == pytest.approx(before, rel=0.05)
    fleet.release(ticket)
    learn_others()
    assert fleet.lengths.row(chat(100)) == 0
