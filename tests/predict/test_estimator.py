import json
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median

import pytest

from extproc.predict.estimator import Estimator, FleetPrior, Prior
from extproc.predict.step import PROFILES, StepModel
from extproc.predict.windows import EngineCounts

RUN = Path(__file__).parents[1] / "data" / "vllm" / "polled-run.json"
BLOCK_SIZE = 128
KV_TOKENS = 256 * BLOCK_SIZE
A10 = PROFILES["llama-8b-a10"].step


def real_run() -> list[EngineCounts]:
    return [
        EngineCounts(
            at=row["t"],
            steps=row["iteration_tokens_total_count"],
            computed_tokens=row["prompt_tokens_total"] - row["prompt_tokens_cached_total"],
            generated_tokens=row["generation_tokens_total"],
            in_flight=int(row["num_requests_running"] + row["num_requests_waiting"]),
            kv_tokens=row["kv_cache_usage_perc"] * KV_TOKENS
            - row["num_requests_running"] * BLOCK_SIZE / 2,
        )
        for row in json.loads(RUN.read_text())["rows"]
    ]


def seconds(model: StepModel, window: list[EngineCounts]) -> float:
    """How long the work of a window should have taken."""
    first, last = window[0], window[-1]
    kv = sum((b.steps - a.steps) * (a.kv_tokens + b.kv_tokens) / 2 for a, b in pairwise(window))
    return (
        model.c0 * (last.steps - first.steps)
        + model.c_prefill * (last.computed_tokens - first.computed_tokens)
        + model.c_batch * (last.generated_tokens - first.generated_tokens)
        + model.c_kv * kv
    )


@pytest.mark.parametrize("start", ["llama-3-8b-a100", "llama-8b-a10", "llama-8b-h100"])
def test_a_real_vllm_is_learned_from_its_counters_alone(start: str) -> None:
    """Each window of 4 s of the second half is predicted with what was known at its start."""
    polls, estimator = real_run(), Estimator(PROFILES[start].step)
    known: list[StepModel] = []
    for poll in polls:
        estimator.poll(poll)
        known.append(estimator.model)
    errors = []
    for begin in range(len(polls) // 2, len(polls) - 16):
        window, model = polls[begin : begin + 17], known[begin]
        if all(poll.in_flight for poll in window):
            took = window[-1].at - window[0].at
            errors.append(abs(seconds(model, window) - took) / took)
    assert len(errors) > 150
    assert median(errors) <= 0.05


def assert_like(learned: StepModel, true: StepModel) -> None:
    assert learned.c0 == pytest.approx(true.c0, rel=0.1)
    assert learned.c_prefill == pytest.approx(true.c_prefill, rel=0.1)


def simulated(
    model: StepModel, polls: int, start: EngineCounts | None = None, idle: float = 0.0
) -> list[EngineCounts]:
    """An engine that works through steps of changing size, polled every 0.2 s."""
    now = start or EngineCounts(0.0, 0.0, 0.0, 0.0, 4, 0.0)
    seen, at, next_poll = [now], now.at, now.at + 0.2
    steps, computed, generated = now.steps, now.computed_tokens, now.generated_tokens
    number = 0
    while len(seen) <= polls:
        number += 1
        prefill = 300 * (number % 17 == 0)
        batch = 4 + 8 * (number // 150 % 2)
        kv = 2_000.0 + 6_000 * (number // 230 % 2)
        at += model.step_time(prefill, batch, kv) + idle
        steps, computed, generated = steps + 1, computed + prefill, generated + batch
        while next_poll <= at and len(seen) <= polls:
            seen.append(EngineCounts(at, steps, computed, generated, batch, kv))
            next_poll = at + 0.2
    return seen


@pytest.mark.parametrize("wrong", [0.5, 2.0])
def test_a_wrong_profile_is_put_right_within_a_minute(wrong: float) -> None:
    estimator = Estimator(A10.slowed(wrong))
    for poll in simulated(A10, 300):
        estimator.poll(poll)
    assert_like(estimator.model, A10)


def test_a_throttled_card_is_seen_within_seconds() -> None:
    estimator = Estimator(A10)
    polls = simulated(A10, 600)
    for poll in polls:
        estimator.poll(poll)
    for poll in simulated(A10.slowed(3.0), 50, start=polls[-1])[1:]:
        estimator.poll(poll)
    assert estimator.model.step_time(0, 4, 2000) == pytest.approx(
        3 * A10.step_time(0, 4, 2000), rel=0.2
    )


def idle(polls: list[EngineCounts], seconds: float) -> list[EngineCounts]:
    """What an engine without work shows after these polls."""
    last = polls[-1]
    return [
        replace(last, at=last.at + 0.2 * wait, in_flight=0, kv_tokens=0.0)
        for wait in range(1, round(seconds / 0.2))
    ]


def test_idle_time_does_not_make_an_engine_look_slow() -> None:
    estimator = Estimator(A10)
    polls = simulated(A10, 300)
    for poll in polls + idle(polls, 40):
        estimator.poll(poll)
    assert_like(estimator.model, A10)


def test_neither_does_a_hang_that_polls_noticed() -> None:
    estimator = Estimator(A10)
    polls = simulated(A10, 300)
    later = replace(polls[-1], at=polls[-1].at + 10.0)
    for poll in polls:
        estimator.poll(poll)
    estimator.interrupted()
    for poll in simulated(A10, 20, start=later):
        estimator.poll(poll)
    assert_like(estimator.model, A10)


def test_the_first_steps_of_an_engine_that_warms_up_count_for_little() -> None:
    """The engine compiles kernels while the first requests wait: steps take a second each."""
    estimator = Estimator(A10)
    for number in range(30):
        steps = number // 5
        estimator.poll(EngineCounts(0.2 * number, steps, 40.0 * steps, steps, 1, 40.0))
    assert A10.c0 < estimator.model.c0 < 4.1 * A10.c0
    start = EngineCounts(6.0, 12.0, 480.0, 12.0, 4, 0.0)
    for poll in simulated(A10, 15, start=start):
        estimator.poll(poll)
    assert estimator.model.step_time(0, 4, 2000) < 1.5 * A10.step_time(0, 4, 2000)


def test_pauses_between_two_polls_do_not_either() -> None:
    """One request at a time, of 5 steps in 150 ms, every 200 ms; each poll finds one running."""
    estimator = Estimator(A10)
    for number in range(300):
        estimator.poll(
            EngineCounts(0.2 * number, 5.0 * number, 20.0 * number, 5.0 * number, 1, 30.0, number)
        )
    assert_like(estimator.model, A10)


def test_long_prompts_alone_do_not_make_every_step_look_dear() -> None:
    """Every step is a chunk of a prompt; a prompt is counted when its prefill ends."""
    estimator = Estimator(A10)
    at, next_poll, steps, computed, left = 0.0, 0.2, 0, 0, 7_000
    while at < 30.0:
        chunk = min(left, 2_048)
        end = at + A10.step_time(chunk, 1, 7_000)
        while next_poll < end:
            estimator.poll(EngineCounts(next_poll, steps, computed, computed / 7e3, 20, 7e3))
            next_poll += 0.2
        at, steps, left = end, steps + 1, left - chunk
        if left == 0:
            computed, left = computed + 7_000, 7_000
    assert_like(estimator.model, A10)


def test_one_that_was_slow_a_moment_ago_is_not_fast_because_it_was_left_alone() -> None:
    estimator = Estimator(A10)
    polls = simulated(A10, 600)
    polls += simulated(A10.slowed(3.0), 50, start=polls[-1])[1:]
    for poll in polls + idle(polls, 10):
        estimator.poll(poll)
    assert estimator.model.step_time(0, 4, 2000) == pytest.approx(
        3 * A10.step_time(0, 4, 2000), rel=0.2
    )


@pytest.mark.parametrize("seconds", [10, 300])
def test_one_that_was_slow_for_a_while_is_tried_again(seconds: int) -> None:
    """While it looks slow nothing is sent to it, and so nothing would be learned."""
    estimator = Estimator(A10)
    polls = simulated(A10, 1500)
    polls += simulated(A10.slowed(3.0), seconds * 5, start=polls[-1])[1:]
    for poll in polls:
        estimator.poll(poll)
    assert estimator.model.c0 > 2 * A10.c0
    for poll in idle(polls, 180):
        estimator.poll(poll)
    assert estimator.model.c0 < 1.2 * A10.c0


def test_what_was_known_before_a_restart_is_forgotten_when_idle() -> None:
    estimator = Estimator(A10, known=A10.slowed(3.0))
    polls = [EngineCounts(0.0, 0.0, 0.0, 0.0, 0, 0.0)]
    estimator.poll(polls[0])
    assert_like(estimator.model, A10.slowed(3.0))
    for poll in idle(polls, 3_600):
        estimator.poll(poll)
    assert_like(estimator.model, A10)


def test_after_a_night_without_work_nothing_is_told_of_it() -> None:
    estimator = Estimator(A10)
    for poll in simulated(A10.slowed(1.4), 300):
        estimator.poll(poll)
    assert estimator.measured
    estimator.poll(EngineCounts(1e5, 0.0, 0.0, 0.0, 0, 0.0))
    assert not estimator.measured
    assert_like(estimator.model, A10)


def test_before_anything_was_seen_a_replica_is_as_others_turned_out_to_be() -> None:
    estimator = Estimator(A10)
    assert not estimator.measured
    estimator.poll(EngineCounts(0.0, 0.0, 0.0, 0.0, 0, 0.0), Prior((2.0,) * 4, 1e-5))
    assert_like(estimator.model, A10.slowed(2.0))


def test_a_restart_does_not_disturb_what_was_learned() -> None:
    estimator = Estimator(A10)
    for _ in range(2):
        for poll in simulated(A10, 100):
            estimator.poll(poll)
    assert_like(estimator.model, A10)


@pytest.mark.parametrize("counter", ["steps", "computed_tokens", "generated_tokens", "finished"])
@pytest.mark.parametrize("value", [0.0, 1e7, 2.0**53])
def test_one_reading_that_is_nonsense_is_forgotten(counter: str, value: float) -> None:
    estimator = Estimator(A10)
    polls = simulated(A10, 400)
    for number, poll in enumerate(polls):
        wrong = {counter: value} if number == 200 else {}
        estimator.poll(EngineCounts(**{**asdict(poll), **wrong}))
    assert_like(estimator.model, A10)


def test_a_card_that_is_suddenly_throttled_is_known_after_a_few_seconds_of_work() -> None:
    """It gets little to do: three requests in six seconds, then none for twenty."""
    estimator, counts = Estimator(A10), EngineCounts(0.0, 0.0, 0.0, 0.0, 0, 0.0)
    for _ in range(30):
        counts = _serve(estimator, counts, 1.0)
    for _ in range(3):
        counts = _serve(estimator, counts, 4.0)
    for _ in range(100):
        counts = replace(counts, at=counts.at + 0.2, in_flight=0)
        estimator.poll(counts)
    assert estimator.model.c0 == pytest.approx(4.0 * A10.c0, rel=0.2)


def _serve(estimator: Estimator, counts: EngineCounts, slow: float) -> EngineCounts:
    """A prompt of 2,000 tokens and an answer of 40, polled every 0.2 s; then a second's pause."""
    prefill, step = A10.step_time(2000, 1, 0) * slow, A10.step_time(0, 1, 2000) * slow
    took = prefill + 39 * step
    start = counts
    for poll in range(1, int(took / 0.2) + 2):
        decoding = min(max(poll * 0.2 - prefill, 0.0), 39 * step)
        steps = 1.0 + decoding // step if poll * 0.2 >= prefill else 0.0
        counts = EngineCounts(
            at=start.at + poll * 0.2,
            steps=start.steps + steps,
            computed_tokens=start.computed_tokens + (2000 if steps else 0),
            generated_tokens=start.generated_tokens + steps,
            in_flight=int(poll * 0.2 < took),
            kv_tokens=2000.0,
        )
        estimator.poll(counts)
    counts = replace(counts, at=counts.at + 1.0)
    estimator.poll(counts)
    return counts


class Lone:
    """An A10, taken for an A100, that serves a request now and then; polled every 0.2 s."""

    def __init__(self, truth: StepModel = A10) -> None:
        self.truth = truth
        self.estimator = Estimator(PROFILES["llama-3-8b-a100"].step)
        self.counts = EngineCounts(0.0, 20.0, 0.0, 0.0, 0, 0.0)
        self.estimator.poll(self.counts)

    def serve(
        self, prompt: int, tokens: int, cached: int = 0, at_once: int = 1, aborted: int = 0
    ) -> None:
        """``at_once``: requests between two polls; their times in vLLM overlap. ``aborted``: more
        of them, which have no times."""
        prefill = self.truth.step_time(prompt - cached, 1, 0)
        decode = (tokens - 1) * self.truth.step_time(0, 1, prompt + tokens / 2)
        counts = self.counts
        polls = max(int((prefill + decode) / 0.2), 1) + 5
        self.counts = EngineCounts(
            at=counts.at + 0.2 * polls,
            steps=counts.steps + tokens,
            computed_tokens=counts.computed_tokens + (at_once + aborted) * (prompt - cached),
            generated_tokens=counts.generated_tokens + (at_once + aborted) * tokens,
            in_flight=0,
            kv_tokens=0.0,
            finished=counts.finished + at_once,
            first_tokens=counts.first_tokens + at_once + aborted,
            prefill_s=counts.prefill_s + at_once * prefill,
            decode_s=counts.decode_s + at_once * decode,
            prompt_tokens=counts.prompt_tokens + at_once * prompt,
        )
        self.estimator.poll(self.counts)


def test_ten_lone_requests_tell_prompts_from_steps() -> None:
    lone, random = Lone(), Random(1)
    for _ in range(10):
        lone.serve(random.randint(20, 2000), random.randint(3, 30))
    learned = lone.estimator.model
    assert learned.step_time(0, 1, 1000) == pytest.approx(A10.step_time(0, 1, 1000), rel=0.1)
    assert learned.step_time(1000, 1, 0) == pytest.approx(A10.step_time(1000, 1, 0), rel=0.1)


def test_cached_tokens_of_a_lone_request_are_not_taken_for_fast_ones() -> None:
    lone = Lone()
    for _ in range(20):
        lone.serve(1000, 20, cached=900)
    learned = lone.estimator.model
    assert learned.step_time(100, 1, 0) == pytest.approx(A10.step_time(100, 1, 0), rel=0.1)


@pytest.mark.parametrize(("at_once", "aborted"), [(2, 0), (1, 1)])
def test_requests_that_were_served_together_are_not_taken_for_lone_ones(
    at_once: int, aborted: int
) -> None:
    lone = Lone()
    start = lone.estimator.model
    for _ in range(20):
        lone.serve(1000, 20, at_once=at_once, aborted=aborted)
    assert lone.estimator.model == start


@pytest.mark.parametrize("cached", [0, 4_000, 32_000])
def test_old_counters_tell_the_time_of_a_prompt_in_spite_of_cached_tokens(cached: int) -> None:
    """vLLM up to 0.15 counts cached tokens at admission, the prompt when its prefill ends."""
    estimator, random = Estimator(A10), Random(1)
    at, poll_at, steps, computed, generated = 0.0, 0.2, 0.0, 0.0, 0.0
    queue = left = 0
    while at < 120.0:
        if not queue and random.random() < 0.03:
            queue, left = 1, 2_000
            computed -= cached
        chunk = min(left, 512)
        at += A10.step_time(chunk, 4, 4_000)
        steps, generated, left = steps + 1, generated + 4, left - chunk
        if queue and not left:
            queue, computed = 0, computed + cached + 2_000
            generated += 1
        while poll_at <= at:
            counts = EngineCounts(poll_at, steps, computed, generated, 4 + queue, 4_000.0)
            estimator.poll(replace(counts, early=True))
            poll_at += 0.2
    assert estimator.model.c_prefill == pytest.approx(A10.c_prefill, rel=0.1)


START = StepModel(0.01, 1e-4, 1e-4, 1e-7)


class Pool:
    """Replicas that start from one profile and report to one median at every poll."""

    def __init__(self, *ratios: float | None) -> None:
        """By ``ratios`` they were measured to be; None: idle ever since."""
        self._prior = FleetPrior()
        self.replicas = [Estimator(START) for _ in ratios]
        self.ratios = list(ratios)
        self._at = 0.0

    def poll(self, seconds: float, working: bool = True) -> None:
        """One poll a second of all; those that were measured work, or none does."""
        for _ in range(round(seconds)):
            self._at += 1.0
            for number, (one, ratio) in enumerate(zip(self.replicas, self.ratios, strict=True)):
                one.poll(self._counts(ratio if working else None), self._prior.prior)
                self._prior.report(str(number), one.evidence)

    def _counts(self, ratio: float | None) -> EngineCounts:
        if ratio is None:
            return EngineCounts(self._at, 1e6, 0.0, 0.0, 0, 0.0)
        steps = self._at / START.slowed(ratio).step_time(0.0, 2.0, 100.0)
        return EngineCounts(self._at, steps, 0.0, 2.0 * steps, 2, 100.0)

    @property
    def slowness(self) -> list[float]:
        """c0 of each as a multiple of the profile's."""
        return [one.model.c0 / START.c0 for one in self.replicas]


def test_one_not_measured_is_taken_to_be_as_most_others_turned_out_to_be() -> None:
    pool = Pool(2.0, 2.0, None)
    assert pool.slowness == [1.0] * 3
    pool.poll(30)
    assert pool.slowness == pytest.approx([2.0] * 3, rel=0.05)


@pytest.mark.parametrize("measured", [0.5, 7.0])
def test_one_of_two_teaches_the_other_nothing(measured: float) -> None:
    """The fast one is measured first, and the slow one may be an outlier."""
    pool = Pool(measured, None)
    pool.poll(30)
    assert pool.slowness == pytest.approx([measured, 1.0], rel=0.05)


def test_what_was_measured_of_a_replica_outweighs_the_others() -> None:
    pool = Pool(1.0, 3.0)
    pool.poll(30)
    assert pool.slowness == pytest.approx([1.0, 3.0], rel=0.05)


def test_of_more_the_median_counts() -> None:
    pool = Pool(1.0, 2.0, 2.0, 9.0, None)
    pool.poll(30)
    assert pool.slowness[-1] == pytest.approx(2.0, rel=0.05)


def test_one_that_is_idle_long_enough_is_as_the_other_again() -> None:
    """Its own ratio is in the median no more, so it does not hold itself up."""
    pool = Pool(1.0, 3.0)
    pool.poll(30)
    pool.ratios[1] = None
    pool.poll(20 * 60)
    assert pool.slowness == pytest.approx([1.0, 1.0], rel=0.05)


def test_when_all_are_idle_the_profile_counts_again() -> None:
    pool = Pool(2.0, 3.0)
    pool.poll(30)
    pool.poll(20 * 60, working=False)
    assert pool.slowness == pytest.approx([1.0, 1.0], rel=0.05)
