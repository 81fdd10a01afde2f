from dataclasses import replace
from random import Random

import pytest

from extproc.predict.firsthand import Firsthand, Served, work_of
from extproc.predict.step import PROFILES, StepModel

A10, A100 = PROFILES["llama-8b-a10"].step, PROFILES["llama-3-8b-a100"].step


def serve(
    seen: Firsthand,
    truth: StepModel,
    requests: int,
    now: float = 0.0,
    whole: float = 0.0,
    prompts: tuple[int, int] = (50, 1500),
) -> float:
    """Requests one after another, five seconds apart; of ``whole`` the first token is not seen."""
    random = Random(requests)
    for _ in range(requests):
        now += 5.0
        prompt, tokens = random.randrange(*prompts), random.randrange(5, 40)
        ttft = truth.frontend + truth.step_time(prompt, 0, 0)
        decode = sum(truth.step_time(0, 1, prompt + token) for token in range(1, tokens))
        told = None if random.random() < whole else ttft
        seen.observe(work_of(Served(prompt, tokens, ttft + decode, told), prompt, 2048, 1.0), now)
    return now


@pytest.mark.parametrize("whole", [0.0, 0.5])
def test_an_idle_replica_is_known_after_a_few_requests(whole: float) -> None:
    seen = Firsthand(A100, 0.0)
    now = serve(seen, A10, 20, whole=whole)
    learned = seen.model(A100, now=now)
    for prompt, batch, kv in ((1000, 0, 0), (0, 1, 700)):
        truth = A10.step_time(prompt, batch, kv)
        assert learned.step_time(prompt, batch, kv) == pytest.approx(truth, rel=0.03)
    assert seen.sure(now)


def test_what_was_seen_gives_way_to_what_the_counters_newly_teach() -> None:
    seen = Firsthand(A10, 0.0)
    now = serve(seen, A10, 20)
    assert seen.model(A10, now=now).c0 == pytest.approx(A10.c0, rel=0.02)
    throttled = seen.model(A10.slowed(4.0), now=now + 1.0)
    assert throttled.c0 == pytest.approx(4.0 * A10.c0, rel=0.05)


def test_a_throttled_card_is_known_after_two_requests_whatever_the_counters_taught() -> None:
    seen = Firsthand(A10, 0.0)
    now = serve(seen, A10, 20)
    now = serve(seen, A10.slowed(4.0), 4, now)
    learned = seen.model(A10, now=now)
    assert learned.step_time(1000, 1, 700) > 3.0 * A10.step_time(1000, 1, 700)


def test_what_was_seen_long_ago_counts_for_nothing() -> None:
    seen = Firsthand(A10, 0.0)
    now = serve(seen, A10.slowed(4.0), 20)
    assert not seen.sure(now + 600.0)
    assert seen.model(A10, now=now + 1800.0) == A10


def test_one_slow_request_of_a_server_that_warms_up_is_not_taken_for_its_speed() -> None:
    seen = Firsthand(A10, 0.0)
    now = serve(seen, A10.slowed(10.0), 1)
    assert seen.model(A10, now).step_time(500, 1, 500) < 3.0 * A10.step_time(500, 1, 500)
    assert not seen.sure(now)
    now = serve(seen, A10, 6, now)
    learned = seen.model(A10, now)
    assert learned.step_time(500, 1, 500) == pytest.approx(A10.step_time(500, 1, 500), rel=0.1)


DEAR_PROMPTS = replace(A100, c_prefill=10.0 * A100.c_prefill)


def first_token(model: StepModel, prompt: int) -> float:
    return model.frontend + model.step_time(prompt, 0, 0)


def learned_by_polls(seen: Firsthand, now: float) -> StepModel:
    """As after some polls: each brings the estimate nearer to the requests seen."""
    return [seen.model(A100, now) for _ in range(20)][-1]


@pytest.mark.parametrize("whole", [0.0, 0.5])
def test_what_each_request_takes_outside_the_engine_is_told_from_its_prompt(whole: float) -> None:
    truth = replace(DEAR_PROMPTS, frontend=0.016)
    seen = Firsthand(A100, 0.0)
    now = serve(seen, truth, 30, whole=whole, prompts=(20, 400))
    learned = learned_by_polls(seen, now)
    for prompt in (20, 100, 1000):
        assert first_token(learned, prompt) == pytest.approx(first_token(truth, prompt), rel=0.2)
    assert learned.c0 == pytest.approx(truth.c0, rel=0.05)


def test_where_nothing_passes_outside_the_engine_nothing_is_learned() -> None:
    seen = Firsthand(A100, 0.0)
    now = serve(seen, A10, 30, prompts=(20, 400))
    assert learned_by_polls(seen, now).frontend < 0.001


def test_prompts_that_are_all_alike_are_dear_themselves() -> None:
    seen = Firsthand(A100, 0.0)
    now = serve(seen, DEAR_PROMPTS, 30, prompts=(300, 301))
    learned = learned_by_polls(seen, now)
    assert learned.c_prefill == pytest.approx(DEAR_PROMPTS.c_prefill, rel=0.1)
    assert learned.c0 == pytest.approx(DEAR_PROMPTS.c0, rel=0.05)


def test_what_passes_outside_the_engine_is_forgotten_with_the_rest() -> None:
    seen = Firsthand(A100, 0.0)
    now = serve(seen, replace(A100, frontend=0.016), 20, prompts=(20, 400))
    assert learned_by_polls(seen, now).frontend > 0.01
    assert seen.model(A100, now + 1800.0) == A100


def test_counters_that_see_a_mix_of_work_tell_no_news() -> None:
    """A profile whose prompts are too cheap: work with prompts in it looks slow, as a whole."""
    seen = Firsthand(A100, 0.0)
    now = serve(seen, DEAR_PROMPTS, 20)
    for slower in (2.5, 1.5, 4.0, 1.0):
        learned = seen.model(A100.slowed(slower), now)
    assert learned.c_prefill == pytest.approx(DEAR_PROMPTS.c_prefill, rel=0.1)
