"""Requests in flight follow the step model between polls, and polls correct them."""

from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from msgspec import structs

from extproc.fleet.members import MODELS_REMEMBERED
from extproc.poll.metrics_text import read_metrics
from extproc.predict.completion import predict
from extproc.predict.inputs import usual_step
from extproc.predict.step import PROFILES
from extproc.route.router import Router
from tests.fakes import A10, MODEL, CountedName, chat, decided, embedding, replica, state
from tests.fleet.conftest import PolledFleet


def context(fleet: PolledFleet) -> float:
    """KV tokens of the first sequence in flight."""
    return float(fleet.sequences(fleet.view(MODEL)).context[0])


def stretch(fleet: PolledFleet) -> float:
    return float(fleet.view(MODEL).stretch[0])


# -- requests between polls -----------------------------------------------------------------


def test_prompt_is_prefilled_at_the_speed_of_the_step_model(fleet: PolledFleet) -> None:
    fleet.dispatch(replica(1), chat(1000, 100))
    fleet.clock.advance(0.029 + 1000 * 260e-6 - 0.01)
    assert 0 < fleet.view(MODEL).backlog[0] < 1000
    fleet.clock.advance(0.02)
    view = fleet.view(MODEL)
    assert view.backlog[0] == 0
    assert view.batch[0] == 1
    assert view.kv_used[0] >= 1000


def test_decoding_adds_context_and_lowers_the_expected_rest(fleet: PolledFleet) -> None:
    fleet.lengths.observe(chat(100, 4096), 100)
    fleet.dispatch(replica(1), chat(100, 50))
    fleet.clock.advance(0.1)
    early = deepcopy(fleet.sequences(fleet.view(MODEL)))
    fleet.clock.advance(1.0)
    late = fleet.sequences(fleet.view(MODEL))
    steps = 1.0 / (0.029 + 50e-6 + 0.26e-6 * 120)
    assert late.context[0] - early.context[0] == pytest.approx(steps, rel=0.05)
    assert late.remaining[0] < early.remaining[0]


def test_sequence_in_flight_is_no_longer_than_its_bound(fleet: PolledFleet) -> None:
    fleet.dispatch(replica(1), chat(100, 20))
    fleet.clock.advance(3.0)
    assert context(fleet) == 120


def test_prefill_and_decode_within_one_clock_move(fleet: PolledFleet) -> None:
    fleet.dispatch(replica(1), chat(100, 500))
    fleet.clock.advance(1.0)
    assert context(fleet) == pytest.approx(132, abs=3)


def test_embedding_is_prefilled_and_never_decodes(fleet: PolledFleet) -> None:
    fleet.dispatch(replica(1), embedding(500))
    fleet.clock.advance(1.0)
    view = fleet.view(MODEL)
    assert (view.batch[0], view.backlog[0]) == (0, 0)


def test_end_of_a_response_shows_that_earlier_prompts_are_prefilled(fleet: PolledFleet) -> None:
    fleet.dispatch(replica(1), chat(5000, 100))
    second = fleet.dispatch(replica(1), chat(10, 1))
    fleet.dispatch(replica(1), chat(700, 100))
    fleet.release(second)
    assert fleet.view(MODEL).backlog[0] == 700


def test_client_that_hangs_up_takes_its_prompt_out_of_the_queue(fleet: PolledFleet) -> None:
    first = fleet.dispatch(replica(1), chat(1000, 100))
    queued = fleet.dispatch(replica(1), chat(4000, 100))
    fleet.dispatch(replica(1), chat(500, 100))
    fleet.release(queued, prefilled=False)
    assert fleet.view(MODEL).backlog[0] == 1500
    fleet.first_token(first)
    assert fleet.view(MODEL).backlog[0] == 500, "only prompts behind it moved up"
    fleet.clock.advance(2.0)
    view = fleet.view(MODEL)
    assert (view.backlog[0], view.batch[0]) == (0, 2)


def test_retry_moves_the_request_to_the_replica_that_served_it(pair: PolledFleet) -> None:
    ticket = pair.dispatch(replica(1), chat(1000, 100))
    pair.move(ticket, replica(2))
    pair.move(ticket, "192.0.2.9:1")  # no member
    view = pair.view(MODEL)
    assert view.requests.tolist() == [0, 1]
    assert view.backlog.tolist() == [0, 1000]
    pair.release(ticket)
    assert pair.view(MODEL).backlog.tolist() == [0, 0]
    assert pair.in_flight == 0


def test_poll_from_before_a_retry_leaves_its_prompt_queued(pair: PolledFleet) -> None:
    ticket = pair.dispatch(replica(1), chat(20_000, 100))
    pair.clock.advance(5.0)
    pair.move(ticket, replica(2))
    pair.put(state(2, A10, pair.clock), age=0.1)
    assert pair.view(MODEL).backlog.tolist() == [0, 20_000]


def test_request_with_a_least_output_is_expected_to_reach_it(fleet: PolledFleet) -> None:
    fleet.dispatch(replica(1), replace(chat(100, 2_000), least_output=2_000))
    fleet.clock.advance(1.0)
    (remaining,) = fleet.sequences(fleet.view(MODEL)).remaining
    assert 1_900 < remaining < 2_000


def test_speculative_step_gives_several_tokens(pair: PolledFleet) -> None:
    pair.poll(1, tokens_per_step=3.0)
    view = pair.view(MODEL)
    assert view.tokens_per_step == pytest.approx([3.0, 1.0])
    profile = chat(100, 1000)
    prediction = predict(profile, 1000.0, view, pair.sequences(view), np.zeros(1))
    assert prediction.decode[0] == pytest.approx(prediction.decode[1] / 3)

    for number in (1, 2):
        pair.dispatch(replica(number), profile)
    pair.clock.advance(3.0)
    speculative, plain = pair.sequences(pair.view(MODEL)).context - 100
    assert speculative == pytest.approx(3 * plain, rel=0.02)


def test_request_in_flight_keeps_the_length_distribution_of_its_dispatch(
    fleet: PolledFleet,
) -> None:
    for _ in range(200):
        fleet.lengths.observe(chat(100), 900)

    def learn_others() -> None:
        for number in range(2000):
            fleet.lengths.observe(replace(chat(100), model=f"model-{number}"), 4000)

    ticket = fleet.dispatch(replica(1), chat(100))
    fleet.clock.advance(1.0)
    [before] = fleet.sequences(fleet.view(MODEL)).remaining
    learn_others()
    fleet.clock.advance(0.1)
    [after] = fleet.sequences(fleet.view(MODEL)).remaining
    assert after == pytest.approx(before, rel=0.05)
    fleet.release(ticket)
    learn_others()
    assert fleet.lengths.row(chat(100)) == 0


@pytest.mark.parametrize("measured", [True, False])
def test_step_that_costs_nothing_gives_finite_predictions(measured: bool) -> None:
    fleet, cost = PolledFleet(0), {"c0": 0.0, "c_prefill": 0.0, "c_batch": 1e-3, "c_kv": 0.0}
    fleet.poll(1, learned=cost, measured=measured)
    prediction = decided(Router(fleet, "completion", Random(1)), chat(100)).prediction
    assert np.isfinite(prediction.completion).all()
    fleet.clock.advance(1.0)
    fleet.dispatch(replica(1), chat(100, 50))
    fleet.clock.advance(1.0)
    view = fleet.view(MODEL)
    assert np.isfinite(view.decode_step).all()
    assert np.isfinite(fleet.sequences(view).remaining).all()


# -- polls ----------------------------------------------------------------------------------


@pytest.mark.parametrize("running", [0, 1, 2])
def test_request_that_a_poll_lacks_still_takes_kv_tokens(fleet: PolledFleet, running: int) -> None:
    for _ in range(3):
        fleet.dispatch(replica(1), chat(1000, 100))
    fleet.clock.advance(1.5)
    assert fleet.view(MODEL).batch[0] == 3
    usage = running * 1000 / 42_000
    fleet.poll(1, running=running, kv_usage=usage, steps=10.0)
    for seconds in (0.05, 0.5):
        fleet.clock.advance(seconds)
        assert fleet.view(MODEL).taken[0] == pytest.approx(3000, rel=0.05)


def test_prompt_prefilled_in_part_takes_constant_kv_tokens(fleet: PolledFleet) -> None:
    ticket = fleet.dispatch(replica(1), chat(10_000, 100))
    fleet.dispatch(replica(1), chat(2_000, 100))
    for _ in range(4):
        view = fleet.view(MODEL)
        assert view.backlog[0] > 0.0
        assert view.taken[0] == pytest.approx(12_000)
        fleet.clock.advance(0.5)
        done = 12_000 - fleet.view(MODEL).backlog[0]
        fleet.poll(1, running=1, waiting=1, kv_usage=done / 42_000)
    fleet.release(ticket, prefilled=False)
    assert fleet.view(MODEL).taken[0] == pytest.approx(2_000, rel=0.1)


def test_sequences_that_two_polls_report_are_external_load(fleet: PolledFleet) -> None:
    fleet.dispatch(replica(1), chat(100, 100))
    for _ in range(2):
        fleet.clock.advance(0.2)
        fleet.poll(1, running=3, waiting=1, kv_usage=0.25)
    view = fleet.view(MODEL)
    assert view.requests[0] == 4
    assert view.kv_used[0] == pytest.approx(0.25 * 42_000, rel=0.05)
    fleet.clock.advance(0.2)
    fleet.poll(1, running=1)
    assert fleet.view(MODEL).requests[0] == 1


def test_repeated_poll_is_no_second_report_of_external_load(fleet: PolledFleet) -> None:
    polled = state(1, A10, fleet.clock, running=1, kv_usage=0.5)
    for silent_s in (0.0, 0.4, 0.0):
        fleet.put(structs.replace(polled, unanswered_s=silent_s))
    assert fleet.overview().external.item() == 0.0
    fleet.poll(1, running=1, kv_usage=0.5)
    assert fleet.overview().external.item() == 1.0


def test_external_load_is_dropped_when_polls_stop(fleet: PolledFleet) -> None:
    for _ in range(2):
        fleet.poll(1, running=50, waiting=3, kv_usage=0.9)
    assert fleet.view(MODEL).batch[0] == 53
    fleet.clock.advance(60)
    view = fleet.view(MODEL)
    assert (view.requests[0], view.batch[0], view.kv_usage[0], view.waiting[0]) == (0, 0, 0, 0)


def test_polled_steps_correct_the_tokens_of_requests(fleet: PolledFleet) -> None:
    """The replica runs three times slower than its profile says."""
    bounds = 100, 400, 15
    new, long, short = (fleet.dispatch(replica(1), chat(100, bound)) for bound in bounds)
    assert fleet.release(new, prefilled=False).tokens == 0.0
    for tick in range(1, 21):
        fleet.clock.advance(0.2)
        fleet.poll(1, running=2, steps=2.0 * tick, kv_usage=0.01)
    assert max(fleet.sequences(fleet.view(MODEL)).context) - 100 == pytest.approx(40, abs=2)
    assert fleet.release(long).tokens == pytest.approx(40, abs=2)
    assert fleet.release(short).tokens == 15.0


@pytest.mark.parametrize(
    ("before", "after", "restarted"),
    [
        ((1e6, 0.0), (5, 0.0), True),  # the count of steps fell
        ((10, 1e9), (200, 2e9), True),  # the process started later
        ((10, 1e9), (200, 1e9), False),
    ],
)
def test_restart_of_a_replica_restarts_only_its_step_count(
    pair: PolledFleet, before: tuple[float, float], after: tuple[float, float], restarted: bool
) -> None:
    names = "steps", "started_at"
    pair.poll(1, **dict(zip(names, before, strict=True)))
    for number in (1, 2):
        pair.dispatch(replica(number), chat(100, 400))
    pair.clock.advance(0.2)
    pair.overview()  # both requests decode
    pair.poll(1, running=1, **dict(zip(names, after, strict=True)))
    pair.clock.advance(0.1)
    here, there = pair.sequences(pair.view(MODEL)).context
    assert here >= 100
    assert (here < 120) == restarted
    assert 100 < there < 120


def test_polls_count_after_a_restart_that_is_known_before_the_replica_is_ready(
    fleet: PolledFleet,
) -> None:
    """A container restarts: its engine answers scrapes before Kubernetes says that it is ready."""
    fleet.poll(1, steps=1e6, started_at=1e9)
    fleet.poll(1, started_at=2e9, healthy=False)
    for _ in range(2):
        fleet.clock.advance(0.2)
        fleet.poll(1, started_at=2e9, running=3)
    assert fleet.view(MODEL).requests[0] == 3


def test_failed_scrape_is_no_restart(fleet: PolledFleet) -> None:
    fleet.poll(1, steps=1e6)
    fleet.dispatch(replica(1), chat(100, 10_000))
    fleet.clock.advance(1.0)
    fleet.poll(1, healthy=False, scraped_at=0.0)
    fleet.poll(1, steps=1e6 + 30, running=1)
    assert context(fleet) == pytest.approx(130, abs=10)


def test_replicas_own_queue_counts_as_waiting(fleet: PolledFleet) -> None:
    for _ in range(10):
        fleet.dispatch(replica(1), chat(100, 100))
    fleet.clock.advance(2.0)
    fleet.poll(1, running=5, waiting=5, kv_usage=0.99)
    assert fleet.view(MODEL).waiting[0] == 5


def test_running_requests_raise_the_batch_limit_of_the_profile(fleet: PolledFleet) -> None:
    fleet.poll(1, running=400)
    assert fleet.view(MODEL).max_num_seqs[0] == 400


def test_limits_of_a_data_parallel_server_are_those_of_all_its_engines() -> None:
    page = Path(__file__).parents[1] / "data" / "vllm" / "metrics-two-engines.txt"
    figures = read_metrics(page.read_bytes()).of_state()
    fleet = PolledFleet(0)
    single = state(1, A10, fleet.clock)
    fleet.put(single)
    fleet.put(structs.replace(single, **(figures | {"id": replica(2), "models": single.models})))
    fleet.put(structs.replace(single, id=replica(3), engines=2))
    view = fleet.view(MODEL)
    assert view.token_budget.tolist() == [2048, 4096, 4096]
    assert view.max_num_seqs.tolist() == [256, 512, 512]
    assert view.kv_capacity.tolist() == [42_000, 16_384, 84_000]


def test_longest_prompt_fits_into_one_engine(fleet: PolledFleet) -> None:
    fleet.poll(1, engines=2, kv_tokens=16_384, max_model_len=20_000)
    assert fleet.view(MODEL).longest_prompt[0] == 8192


# -- correction of predictions --------------------------------------------------------------


def test_correction_of_a_slow_replica_fades(pair: PolledFleet) -> None:
    for _ in range(10):
        pair.speeds.learn_decode(replica(1), 5.0, 300.0)
    pair.poll(1)
    assert stretch(pair) > 2
    pair.clock.advance(180.0)
    pair.poll(1)
    assert stretch(pair) < 1.1


def test_learned_step_times_end_the_correction(fleet: PolledFleet) -> None:
    """Requests took a fifth of the profile's time, and then the counters show the same."""
    before = usual_step(fleet.view(MODEL), 0)
    for _ in range(20):
        fleet.speeds.learn_decode(replica(1), 10.0, 2.0)
    assert stretch(fleet) == 0.5
    fast = PROFILES[A10].step.slowed(0.2)
    fleet.poll(1, learned=asdict(fast))
    assert stretch(fleet) == pytest.approx(1.0, abs=0.02)
    for _ in range(20):  # predicted before, and ended later
        fleet.speeds.learn_decode(replica(1), 10.0, 2.0, before)
    assert stretch(fleet) == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("slower", [3.0, 0.33])
def test_changed_step_times_leave_no_correction(fleet: PolledFleet, slower: float) -> None:
    for _ in range(60):
        fleet.speeds.learn_decode(replica(1), 5.0, 5.0)
    other = PROFILES[A10].step.slowed(slower)
    fleet.poll(1, learned=asdict(other))
    assert stretch(fleet) == pytest.approx(1.0, abs=0.02)


def test_replica_that_rejoins_is_corrected(fleet: PolledFleet) -> None:
    fleet.remove(replica(1))
    fleet.poll(1)
    for _ in range(10):
        fleet.speeds.learn_decode(replica(1), 5.0, 10.0)
    fleet.poll(1)
    assert stretch(fleet) > 1.5


# -- members --------------------------------------------------------------------------------


def test_empty_fleet_has_no_candidates() -> None:
    fleet = PolledFleet(0)
    assert len(fleet.view(MODEL)) == 0
    with pytest.raises(KeyError):
        fleet.dispatch(replica(1), chat(1))


def test_row_of_a_removed_replica_is_reused_after_its_requests_end(pair: PolledFleet) -> None:
    ticket = pair.dispatch(replica(1), chat(100, 100))
    pair.remove(replica(1))
    assert pair.view(MODEL).ids == [replica(2)]
    pair.poll(3)
    assert pair.in_flight == 1
    assert pair.in_flight_on(replica(3)) == 0
    pair.release(ticket)
    pair.poll(4)
    view = pair.view(MODEL)
    assert sorted(view.ids) == [replica(2), replica(3), replica(4)]
    assert not view.requests.any()


def test_replica_that_rejoins_still_has_its_requests(pair: PolledFleet) -> None:
    for _ in range(10):
        pair.dispatch(replica(1), chat(100, 100))
    pair.remove(replica(1))
    pair.poll(1)
    view = pair.view(MODEL)
    assert view.requests[view.ids.index(replica(1))] == 10


def test_members_are_known_once_each_listed_replica_has_a_state() -> None:
    fleet = PolledFleet(0)
    fleet.listed([])
    fleet.poll(1)
    fleet.listed([replica(1), replica(2)])
    fleet.poll(1)
    assert not fleet.members_known.is_set()
    fleet.poll(2)
    assert fleet.members_known.is_set()


def test_stale_replicas_are_removed_only_while_others_are_updated(pair: PolledFleet) -> None:
    pair.clock.advance(60)
    pair.drop_stale(10)
    assert len(pair.members) == 2
    for _ in range(10):
        pair.poll(2)
        pair.drop_stale(10)
        assert len(pair.members) == 2, "the next update of the other may be on its way"
        pair.clock.advance(1)
    pair.poll(2)
    pair.drop_stale(10)
    assert [state.id for state in pair.members] == [replica(2)]


def test_only_model_is_that_of_all_replicas_with_a_list(pair: PolledFleet) -> None:
    assert pair.members.only_model == MODEL
    pair.poll(2, healthy=False, models=())
    assert pair.members.only_model == MODEL
    pair.poll(2, models=("other",))
    assert pair.members.only_model is None
    pair.remove(replica(1))
    assert pair.members.only_model == "other"
    pair.poll(1)
    assert pair.members.only_model is None
    assert PolledFleet(0).members.only_model is None


def test_models_that_others_list_displace_no_departed_model(pair: PolledFleet) -> None:
    pair.poll(1, models=("rare",))
    for number in (2, 3):
        adapters = tuple(f"adapter-{adapter}" for adapter in range(MODELS_REMEMBERED))
        pair.poll(number, models=(MODEL, *adapters))
    for number in (1, 2):
        pair.remove(replica(number))
        pair.clock.advance(1.0)
    assert pair.members.served_lately("rare", pair.now)


def test_lists_of_adapters_are_not_searched(pair: PolledFleet) -> None:
    """A search for each of 2,000 adapters would block the router for 40 ms."""
    for number, adapters in ((1, 500), (2, 500), (2, 499)):
        names = (CountedName(f"adapter-{adapter}") for adapter in range(adapters))
        CountedName.compared = 0
        pair.poll(number, models=(MODEL, *names))
    assert not pair.members.served_lately("unknown", pair.now)
    assert CountedName.compared < 20 * 500
