"""Every policy scores replicas by its rule, and the reason of a decision names the figures."""

import random
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from msgspec import structs

from extproc.fleet.fleet import Fleet
from extproc.predict.inputs import Floats
from extproc.predict.step import PROFILES
from extproc.request.prefix import Prefix
from extproc.request.profile import RequestProfile
from extproc.route.backlog import Backlog
from extproc.route.decision import Decision, Situation
from extproc.route.policies import POLICIES
from extproc.route.router import Router
from tests.fakes import (
    A10,
    H100,
    MODEL,
    ManualClock,
    chat,
    decided,
    embedding,
    fleet_of,
    replica,
    state,
)
from tests.fleet.test_digests import deliver


def decide(fleet: Fleet, policy: str, profile: RequestProfile, seed: int = 1) -> Decision:
    return decided(Router(fleet, policy, random.Random(seed)), profile)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("count", [1, 3])
def test_every_policy_chooses_a_replica_and_a_second_if_any(policy: str, count: int) -> None:
    decision = decide(fleet_of(ManualClock(), *[A10] * count), policy, chat(100, 50))
    others = {*map(replica, range(1, count + 1))} - {decision.replica}
    assert len(others) == count - 1
    assert decision.second in others if others else decision.second is None
    assert decision.why


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_idle_replicas_share_the_requests(policy: str) -> None:
    fleet = fleet_of(ManualClock(), A10, A10, A10, A10)
    router = Router(fleet, policy, random.Random(5))
    chosen: Counter[str] = Counter()
    for _ in range(200):
        chosen[decided(router, chat(100, 50)).replica] += 1
    assert len(chosen) == 4
    assert min(chosen.values()) > 25


@pytest.mark.parametrize("cached", [0, 1])
def test_wrong_prefill_time_does_not_keep_requests_from_an_idle_replica(cached: int) -> None:
    clock, request = ManualClock(), replace(beginning(cached), prompt_tokens=400)
    fleet = fleet_of(clock, A10, A10, A10, A10)
    step = PROFILES[A10].step
    slow = replace(step, c_prefill=step.c_prefill * 1.2)
    fleet.put(structs.replace(state(1, A10, clock), learned=slow))
    for number in range(1, 5):
        sent(fleet, number, request)
    router = Router(fleet, "completion", random.Random(5))
    chosen = Counter(decision.replica for _ in range(200) if (decision := router.decide(request)))
    assert min(chosen[replica(number)] for number in range(1, 5)) > 25


POLLED = ("least_kv", "queue_kv")
"""Policies that use the figures of polls alone, as the gateways do that they come from."""


@pytest.mark.parametrize("policy", POLLED)
def test_polled_policies_use_the_figures_of_the_last_poll(policy: str, clock: ManualClock) -> None:
    fleet = fleet_of(clock, A10, A10)
    fleet.put(state(1, A10, clock, running=2, waiting=1, kv_usage=0.2))
    fleet.put(state(2, A10, clock, running=2, kv_usage=0.1))
    for _ in range(20):
        fleet.dispatch(replica(2), chat(1000, 800))
    clock.advance(1.5)
    assert decide(fleet, policy, chat(100, 50)).replica == replica(2)
    fleet.put(state(2, A10, clock, running=2, waiting=20, kv_usage=0.5))
    assert decide(fleet, policy, chat(100, 50)).replica == replica(1)


def test_policy_knows_the_hardware_of_each_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    prices = {A10: 1.0, H100: 4.0}

    def cheapest(situation: Situation) -> Floats:
        return np.array([prices[profile] for profile in situation.view.candidates.profiles])

    monkeypatch.setitem(POLICIES, "cheapest", cheapest)
    clock = ManualClock()
    fleet = fleet_of(clock, H100, A10)
    assert decide(fleet, "cheapest", chat(100, 50)).replica == replica(2)
    fleet.put(state(1, A10, clock))
    fleet.put(state(2, H100, clock))
    assert decide(fleet, "cheapest", chat(100, 50)).replica == replica(1)


def test_round_robin_takes_turns_for_each_model(clock: ManualClock) -> None:
    fleet = fleet_of(clock, A10, A10, A10, A10)
    for number in (3, 4):
        fleet.put(state(number, A10, clock, models=("other",)))
    router = Router(fleet, "round_robin", random.Random(0))
    chosen: dict[str, list[str]] = {MODEL: [], "other": []}
    for turn in range(100):
        model = "other" if turn % 2 else MODEL
        chosen[model].append(decided(router, replace(chat(1), model=model)).replica)
    assert chosen[MODEL] == [replica(1), replica(2)] * 25
    assert chosen["other"] == [replica(3), replica(4)] * 25


def test_round_robin_takes_turns_among_replicas_with_room(clock: ManualClock) -> None:
    fleet = fleet_of(clock)
    for number in (1, 2, 3, 4):
        fleet.put(state(number, A10, clock, kv_tokens=42_000))
    for full in (3, 4) * 10:
        fleet.dispatch(replica(full), chat(4_000, 800))
    router = Router(fleet, "round_robin", random.Random(0), backlog=Backlog(clock()))
    chosen = [decided(router, chat(1000, 100)).replica for _ in range(20)]
    assert chosen == [replica(1), replica(2)] * 10


def test_request_may_name_another_policy() -> None:
    router = Router(fleet_of(ManualClock(), A10), "completion", random.Random(0))
    named, unknown = router.decide(chat(1), "least_kv"), router.decide(chat(1), "no such")
    assert named is not None
    assert unknown is not None
    assert (named.choice.policy, unknown.choice.policy) == ("least_kv", "completion")


CONTINUED = replace(chat(100, 50), previous_response="resp_1")


def test_continued_response_goes_to_its_owner() -> None:
    fleet = fleet_of(ManualClock(), H100, A10)
    for holder, other in ((2, 1), (1, 2)):
        fleet.responses.remember("resp_1", replica(holder))
        decision = decide(fleet, "completion", CONTINUED)
        assert (decision.replica, decision.second) == (replica(holder), None)
        assert decision.choice.policy == "owner"
        assert "resp_1" in decision.why
        assert decide(fleet, "completion", chat(100, 50)).choice.policy == "completion"
        assert fleet.response_owner("resp_1") != replica(other)


def test_unknown_continued_response_is_routed_as_any_request() -> None:
    fleet = fleet_of(ManualClock(), H100, A10)
    assert decide(fleet, "completion", CONTINUED).choice.policy == "completion"


def test_continued_response_goes_to_an_owner_that_is_held_up(clock: ManualClock) -> None:
    fleet = fleet_of(clock, H100, A10)
    fleet.responses.remember("resp_1", replica(2))
    fleet.put(state(2, A10, clock, unanswered_s=0.3))
    assert decide(fleet, "completion", chat(100, 50)).replica == replica(1)
    decision = decide(fleet, "completion", CONTINUED)
    assert (decision.replica, decision.choice.policy) == (replica(2), "owner")
    fleet.put(state(2, A10, clock, unanswered_s=0.3, draining=True))
    assert decide(fleet, "completion", CONTINUED).replica == replica(1)


def test_continued_response_avoids_an_excluded_owner(clock: ManualClock) -> None:
    fleet = fleet_of(clock, H100, A10)
    fleet.responses.remember("resp_1", replica(2))
    fleet.put(state(2, A10, clock, draining=True))
    assert decide(fleet, "completion", CONTINUED).replica == replica(1)
    assert fleet.response_owner("resp_1") == replica(2)  # retrieving a response is no work
    fleet.put(state(2, A10, clock, healthy=False))
    assert decide(fleet, "completion", CONTINUED).replica == replica(1)
    assert fleet.response_owner("resp_1") is None
    fleet.put(state(2, A10, clock))
    assert decide(fleet, "completion", CONTINUED).replica == replica(2)
    for _ in range(3):
        fleet.eligibility.failed(replica(2))
    assert decide(fleet, "completion", CONTINUED).replica == replica(1)
    assert fleet.response_owner("resp_1") is None
    fleet.eligibility.succeeded(replica(2))
    fleet.remove(replica(2))
    assert decide(fleet, "completion", CONTINUED).replica == replica(1)
    assert fleet.response_owner("resp_1") is None


def test_no_decision_without_a_healthy_replica(clock: ManualClock) -> None:
    fleet = fleet_of(clock, A10)
    fleet.put(state(1, A10, clock, healthy=False))
    assert Router(fleet, "completion", random.Random(0)).decide(chat(1)) is None


REASONS = {
    "least_request": "least_request scores r2 0 and r1 4",
    "round_robin": "its turn",
    "random": "at random",
    "power_of_two": "power_of_two scores r2 0 and r1 4",
    "lmetric": "lmetric scores r2 1,500 and r1 87,500",
    "cache_aware": "cache_aware scores r2 0 and r1 4",
}


@pytest.mark.parametrize("policy", REASONS)
def test_simple_policy_gives_its_scores_as_reason(policy: str) -> None:
    fleet = fleet_of(ManualClock(), A10, A10)
    for _ in range(4):
        fleet.dispatch(replica(1), chat(4000, 800))
    assert decide(fleet, policy, chat(1500, 50)).why == REASONS[policy]


def beginning(tenths: int) -> RequestProfile:
    """Return a prompt of 1,600 tokens of which the first ``tenths`` have keys."""
    prefix = Prefix(np.arange(1, tenths + 1, dtype=np.uint64), 160.0, 160.0 * tenths)
    return replace(chat(1600, 100), prefix=prefix)


def sent(fleet: Fleet, number: int, profile: RequestProfile) -> None:
    fleet.release(fleet.dispatch(replica(number), profile), prefilled=True)


@pytest.mark.parametrize("policy", ["completion", "lmetric", "queue_kv", "cache_aware"])
def test_cached_prompt_goes_to_its_replica(policy: str) -> None:
    fleet = fleet_of(ManualClock(), A10, A10, A10)
    sent(fleet, 2, beginning(8))
    for seed in range(10):
        assert decide(fleet, policy, beginning(8), seed).replica == replica(2)


def test_lmetric_does_not_count_cached_tokens() -> None:
    fleet = fleet_of(ManualClock(), A10, A10)
    sent(fleet, 1, beginning(8))
    fleet.dispatch(replica(1), chat(180, 100))
    decision = decide(fleet, "lmetric", beginning(8))
    assert decision.replica == replica(1)
    assert decision.choice.scores.tolist() == [500 * 2, 1600]


@pytest.mark.parametrize(("cached", "chosen"), [(6, 2), (7, 1)])
def test_queue_kv_prefers_two_thirds_cached_to_the_shortest_queue(cached: int, chosen: int) -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10, A10)
    sent(fleet, 1, beginning(cached))
    fleet.put(state(1, A10, clock, waiting=3))
    assert decide(fleet, "queue_kv", beginning(10)).replica == replica(chosen)


@pytest.mark.parametrize(("cached", "chosen"), [(3, 2), (4, 1)])
def test_cache_aware_counts_more_than_three_tenths_cached(cached: int, chosen: int) -> None:
    fleet = fleet_of(ManualClock(), A10, A10)
    sent(fleet, 1, beginning(cached))
    for _ in range(5):
        fleet.dispatch(replica(1), chat(100, 100))
    assert decide(fleet, "cache_aware", beginning(10)).replica == replica(chosen)


@pytest.mark.parametrize(
    ("there", "elsewhere", "chosen"), [(64, 0, 1), (65, 0, 2), (195, 130, 1), (196, 130, 2)]
)
def test_cache_aware_ignores_the_cache_if_the_load_is_uneven(
    there: int, elsewhere: int, chosen: int
) -> None:
    fleet = fleet_of(ManualClock(), A10, A10)
    sent(fleet, 1, beginning(10))
    for number, requests in ((1, there), (2, elsewhere)):
        for _ in range(requests):
            fleet.dispatch(replica(number), chat(10, 100))
    assert decide(fleet, "cache_aware", beginning(10)).replica == replica(chosen)


Load = tuple[int, RequestProfile, int]  # number of the replica, request, times


class CompletionCase(NamedTuple):
    replicas: tuple[str, str]  # their profiles
    events: list[Load | float]  # load of the replicas, and seconds that pass
    request: RequestProfile
    first: int  # number of the replica chosen
    term: str  # that makes the other replica slower


CASES = {
    "two requests about to end beat one long request": CompletionCase(
        (A10, A10),
        [(2, chat(20_000, 4000), 1), 6.0, (1, chat(100, 60), 2), 1.6],
        *(chat(100, 100), 1, "decode"),
    ),
    "one request about to end beats two long requests": CompletionCase(
        (A10, A10),
        [(1, chat(8000, 4000), 2), 5.0, (2, chat(100, 60), 1), 1.5],
        *(chat(100, 100), 2, "decode"),
    ),
    "a busy fast replica beats an idle slow replica": CompletionCase(
        (H100, A10), [(1, chat(500, 300), 8), 0.5], chat(1000, 200), 1, "decode"
    ),
    "an idle slow replica beats a very busy fast replica": CompletionCase(
        (H100, A10), [(1, chat(30_000, 300), 8)], chat(100, 100), 2, "prefill"
    ),
    "a long queue beats a KV cache that frees late": CompletionCase(
        (A10, A10),
        [(1, chat(41_500, 4000), 1), 15.0, (2, chat(1000, 100), 4)],
        *(chat(1000, 100), 2, "admission"),
    ),
    "a free place beats a full batch": CompletionCase(
        (A10, A10),
        [(1, chat(100, 2000, sequences=256), 1), (2, chat(100, 2000), 1), 1.0],
        *(chat(10, 10), 2, "admission"),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_completion_chooses_the_replica_that_finishes_first(case: CompletionCase) -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, *case.replicas)
    for event in case.events:
        if isinstance(event, float):
            clock.advance(event)
        else:
            number, profile, times = event
            for _ in range(times):
                fleet.dispatch(replica(number), profile)
    decision = decide(fleet, "completion", case.request)
    assert decision.replica == replica(case.first)
    assert decision.why == clause(decision, case.first, 3 - case.first, case.term)


def test_reason_names_a_replica_that_decodes_slower_than_predicted(clock: ManualClock) -> None:
    fleet = fleet_of(clock, A10, A10)
    for _ in range(50):
        fleet.speeds.learn_decode(replica(2), 2.0, 4.0)
    fleet.put(state(2, A10, clock))
    decision = decide(fleet, "completion", chat(100, 100))
    assert decision.why == clause(decision, 1, 2, "decode")


def test_kv_cache_that_frees_soon_beats_a_long_queue(clock: ManualClock) -> None:
    fleet = fleet_of(clock, A10, A10)
    fleet.dispatch(replica(1), chat(41_500, 100))
    clock.advance(13.0)
    for _ in range(8):
        fleet.dispatch(replica(2), chat(4000, 100))
    decision = decide(fleet, "completion", chat(1000, 100))
    assert decision.prediction.admission[0] > 0
    assert decision.replica == replica(1)
    assert decision.why == clause(decision, 1, 2, "prefill")


def test_reason_names_a_slower_prefill() -> None:
    decision = decide(fleet_of(ManualClock(), H100, A10), "completion", embedding(1000))
    assert decision.why == (
        "r1 finishes it in 44.5 ms, r2 in 0.29 s: there prefill takes 0.24 s more"
    )


def test_prompt_goes_to_the_replica_that_can_hold_it(clock: ManualClock) -> None:
    fleet = fleet_of(clock, A10, A10)
    fleet.put(state(1, A10, clock, max_model_len=4_096))
    fleet.dispatch(replica(2), chat(9_000, 500))
    decision = decide(fleet, "completion", chat(8_000, 100))
    assert decision.replica == replica(2)
    assert decision.why.endswith("no other replica could hold a prompt that long")


@pytest.mark.parametrize(
    ("profile", "chosen"),
    [
        (replace(chat(10_000, 100), sequences=4), (replica(2), None)),
        (replace(embedding(10_000), longest_share=0.5), (replica(2), None)),
        (replace(chat(20_000, 100), sequences=8, longest_share=0.25), (replica(2), None)),
        (replace(chat(10_000, 100), sequences=4, longest_share=0.25), (replica(1), replica(2))),
    ],
    ids=["one prompt, n=4", "embeddings", "prompts of different lengths", "many short prompts"],
)
def test_replica_must_hold_the_longest_prompt(
    profile: RequestProfile, chosen: tuple[str, str | None]
) -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, H100, A10)
    fleet.put(state(1, H100, clock, max_model_len=4_096))
    decision = decide(fleet, "completion", profile)
    assert (decision.replica, decision.second) == chosen


def test_stream_goes_to_the_replica_whose_kv_cache_holds_its_prompt(clock: ManualClock) -> None:
    fleet = fleet_of(clock, H100, A10)
    fleet.put(state(1, H100, clock, kv_tokens=4_000))
    decision = decide(fleet, "completion", replace(chat(10_000, 100), stream=True))
    assert (decision.replica, decision.second) == (replica(2), None)
    assert decision.choice.scores[0] == np.inf


def test_answer_ends_at_the_end_of_the_context(clock: ManualClock) -> None:
    fleet = fleet_of(clock, A10)
    fleet.put(state(1, A10, clock, max_model_len=4_096))
    for bound in (None, 2_000):
        profile = chat(4_090, bound)
        decision = decide(fleet, "completion", profile)
        assert decision.prediction.output_tokens <= 6
        fleet.dispatch(replica(1), profile)
    sequences = fleet.sequences(fleet.view(MODEL))
    assert max(sequences.remaining) <= 6


def test_decision_on_another_replica_has_the_work_of_that_replica() -> None:
    decision = decide(fleet_of(ManualClock(), A10, H100), "completion", chat(1000, 100))
    fast, on_slow = decision.work_s, decision.on(replica(1))
    assert on_slow is not None
    assert (decision.replica, on_slow.replica) == (replica(2), replica(1))
    assert on_slow.work_s > 3 * fast


def test_prompt_that_fits_nowhere_is_still_sent() -> None:
    fleet = fleet_of(ManualClock(), A10, A10)
    decision = decide(fleet, "completion", chat(100_000, 100))
    assert decision.predicted_completion < float("inf")


def test_prompt_that_fits_nowhere_counts_as_the_longest_that_fits(clock: ManualClock) -> None:
    figures = []
    for prompt in (4_096, 10_000_000):
        fleet = fleet_of(clock, A10)
        fleet.put(state(1, A10, clock, max_model_len=4_096))
        decision = decide(fleet, "completion", chat(prompt, 100))
        fleet.dispatch(replica(1), decision.profile)
        behind = decide(fleet, "completion", chat(100, 10)).predicted_ttft
        figures.append((decision.work_s, decision.predicted_ttft, behind))
    assert figures[0] == figures[1]


def test_empty_replica_is_preferred_for_equal_completions() -> None:
    fleet = fleet_of(ManualClock(), A10, A10)
    fleet.dispatch(replica(1), chat(3000, 500))
    assert decide(fleet, "completion", chat(100, 10)).replica == replica(2)


def test_several_routers_do_not_all_choose_the_replica_with_the_fewest_requests(
    clock: ManualClock,
) -> None:
    here, other = (fleet_of(clock, A10, A10, A10, A10) for _ in range(2))
    for number in (1, 1, 2, 2, 3, 3, 4):
        here.dispatch(replica(number), chat(100, 500))
    clock.advance(1.0)

    def choices() -> set[str]:
        drawn = [decide(here, "completion", chat(100, 50), seed) for seed in range(20)]
        return {decision.replica for decision in drawn}

    assert choices() == {replica(4)}
    deliver(other, here)
    assert len(choices()) > 1


@pytest.mark.parametrize("held", [0, 35_000])
def test_sooner_first_token_may_delay_a_completion_unless_kv_caches_fill(held: int) -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, A10, A10)
    for number in (1, 2) if held else ():
        fleet.first_token(fleet.dispatch(replica(number), chat(held, 4000)))
    fleet.dispatch(replica(1), chat(3000, 10))
    for _ in range(50):
        fleet.speeds.learn_decode(replica(2), 2.0, 2.38)
    decision = decide(fleet, "completion", chat(100, 2000))
    ttft, scores = decision.prediction.ttft, decision.choice.scores
    assert ttft[1] < ttft[0] - 0.5
    assert scores[0] < scores[1] < 1.1 * scores[0]
    assert decision.replica == replica(1 if held else 2)


def test_later_completion_wins_if_others_lose_less(clock: ManualClock) -> None:
    fleet = fleet_of(clock, A10, A10)
    for _ in range(30):
        fleet.dispatch(replica(1), chat(1000, 2000))
    for prompt in (1000, 1000, 1000, 37_000):
        fleet.dispatch(replica(2), chat(prompt, 2000))
    clock.advance(13.0)
    decision = decide(fleet, "completion", chat(500, 100))
    completion = decision.prediction.completion
    assert decision.replica == replica(2)
    assert completion[0] < completion[1]
    expected = f"r1 already in {completion[0]:.2f} s, but there requests in flight lose"
    assert expected in decision.why


def test_reason_names_a_draw_among_equal_replicas() -> None:
    fleet = fleet_of(ManualClock(), A10, A10, A10, A10)
    decision = decide(fleet, "completion", chat(100, 10))
    assert f"finishes it in {finish(decision, 1)}, " in decision.why
    assert decision.why.endswith(": as good as equal, so one was drawn at random")


def test_reason_names_the_only_replica() -> None:
    decision = decide(fleet_of(ManualClock(), A10), "completion", chat(100, 10))
    assert decision.why == (
        f"r1 finishes it in {finish(decision, 1)}; no other replica could serve it"
    )


def finish(decision: Decision, number: int) -> str:
    return f"{decision.prediction.completion[number - 1]:.2f} s"


def clause(decision: Decision, first: int, second: int, term: str) -> str:
    values = getattr(decision.prediction, term)
    more = values[second - 1] - values[first - 1]
    return (
        f"r{first} finishes it in {finish(decision, first)}, r{second} in "
        f"{finish(decision, second)}: there {term} takes {more:.2f} s more"
    )


def test_decision_names_stale_digests_of_other_routers(clock: ManualClock) -> None:
    fleet, other = fleet_of(clock, A10, A10), fleet_of(clock, A10, A10)
    other.dispatch(replica(1), chat(1000, 100))
    deliver(other, fleet)
    clock.advance(0.05)
    fresh = decide(fleet, "completion", chat(100, 50))
    assert (fresh.replica, fresh.fallback) == (replica(2), "")
    assert fresh.situation.peers_age_s == pytest.approx(0.05)
    clock.advance(0.3)
    late = decide(fleet, "completion", chat(100, 50))
    assert late.fallback == "load of other routers ignored (newest digest 0.35 s old)"
    assert late.why.startswith(f"{late.fallback}: r")


@pytest.mark.parametrize("streamed", [True, False])
def test_first_token_of_a_stream_counts_beside_its_completion(streamed: bool) -> None:
    fleet = fleet_of(ManualClock(), H100, A10)
    fleet.dispatch(replica(1), chat(25_000, 200))
    decision = decide(fleet, "completion", replace(chat(1000, 60), stream=streamed))
    prediction = decision.prediction
    assert prediction.completion.argmin() == 0, "the H100 finishes first"
    assert decision.replica == replica(2 if streamed else 1)
    if streamed:
        later = prediction.ttft[0] - prediction.ttft[1]
        assert decision.why.endswith(f"but there the first token takes {later:.2f} s more")


def test_decision_weighs_the_first_token_against_the_delay_of_others() -> None:
    fleet = fleet_of(ManualClock(), H100, A10)
    for _ in range(2):
        fleet.first_token(fleet.dispatch(replica(1), chat(100, 300)))
    for _ in range(12):
        fleet.dispatch(replica(1), chat(5000, 10))
    decision = decide(fleet, "completion", replace(chat(7000, 60), stream=True))
    prediction = decision.prediction
    later = prediction.ttft[0] - prediction.ttft[1]
    lost = prediction.lost_by_others[0] - prediction.lost_by_others[1]
    assert prediction.first_token_weight * later < lost < later
    assert decision.why.endswith(f"but there requests in flight lose {lost:.2f} s more")


def test_first_token_does_not_count_if_the_request_waits_for_the_earliest_completion() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, H100, A10)
    fleet.put(state(1, H100, clock, kv_tokens=30_000))
    router = Router(fleet, "completion", random.Random(0), backlog=Backlog(clock()))
    stream = replace(chat(9_000, 300), stream=True)
    assert decided(router, stream).prediction.first_token_weight > 1.0
    fleet.first_token(fleet.dispatch(replica(1), chat(20_000, 20)))
    decision = decided(router, stream)
    assert decision.prediction.kv_pressure[0] < 1.0
    assert (decision.replica, decision.prediction.first_token_weight) == (replica(1), 0.0)
    assert decision.wait_s > 0.0


@pytest.mark.parametrize("streamed", [True, False])
def test_replica_that_is_worse_in_every_term_is_not_chosen(streamed: bool) -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, H100, H100)
    for number in (1, 2):
        fleet.put(state(number, H100, clock, kv_tokens=70_000))
    for _ in range(20):
        fleet.first_token(fleet.dispatch(replica(1), chat(1500, 300)))
    for number in (1, 2):
        fleet.dispatch(replica(number), chat(30_000, 10))
    decision = decide(fleet, "completion", replace(chat(100, 200), stream=streamed))
    prediction = decision.prediction
    for term in ("ttft", "completion", "cost_to_others", "kv_pressure"):
        assert getattr(prediction, term).argmin() == 1, term
    assert decision.replica == replica(2)


@pytest.mark.parametrize("streamed", [True, False])
def test_cost_to_others_counts_in_full_without_streaming(streamed: bool) -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, H100, A10)
    for _ in range(60):
        fleet.first_token(fleet.dispatch(replica(1), chat(10, 200)))
    decision = decide(fleet, "completion", replace(chat(2000, 200), stream=streamed))
    prediction = decision.prediction
    assert prediction.completion.argmin() == 0, (
        "the H100 is first, and 60 other requests lose time there"
    )
    assert decision.replica == replica(1 if streamed else 2)
