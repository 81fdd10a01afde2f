"""Step times learned from polls: of a real vLLM, of simulated engines, and across a fleet."""

import json
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median

import numpy as np
import pytest

from extproc.predict.estimator import Estimator, FleetPrior, Prior, descend
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
    """Predicted seconds of the work between the first and the last poll."""
    first, last = window[0], window[-1]
    kv = sum((b.steps - a.steps) * (a.kv_tokens + b.kv_tokens) / 2 for a, b in pairwise(window))
    return (
        model.c0 * (last.steps - first.steps)
        + model.c_prefill * (last.computed_tokens - first.computed_tokens)
        + model.c_batch * (last.generated_tokens - first.generated_tokens)
        + model.c_kv * kv
    )


def test_coefficient_that_would_be_negative_is_zero() -> None:
    """``x + y = 1`` and ``x = 1.5``: with ``y`` at zero, the best ``x`` is the mean."""
    solution = [0.0, 0.0]
    descend(np.array([[2.0, 1.0, 2.5], [1.0, 1.0, 1.0]]), [0.0, 0.0], [0.0, 0.0], solution)
    assert solution == pytest.approx([1.25, 0.0])


@pytest.mark.parametrize("start", ["llama-3-8b-a100", "llama-8b-a10", "llama-8b-h100"])
def test_step_times_of_a_real_vllm_are_learned_from_its_counters(start: str) -> None:
    """In the second half, the model learned so far predicts the work of the next 4 s within 5%."""
    polls, estimator = real_run(), Estimator(PROFILES[start].step)
    learned: list[StepModel] = []
    for poll in polls:
        estimator.poll(poll)
        learned.append(estimator.model)
    errors = []
    for begin in range(len(polls) // 2, len(polls) - 16):
        window, model = polls[begin : begin + 17], learned[begin]
        if all(poll.in_flight for poll in window):
            took = window[-1].at - window[0].at
            errors.append(abs(seconds(model, window) - took) / took)
    assert len(errors) > 150
    assert median(errors) <= 0.05


def assert_like(learned: StepModel, true: StepModel) -> None:
    assert learned.c0 == pytest.approx(true.c0, rel=0.1)
    assert learned.c_prefill == pytest.approx(true.c_prefill, rel=0.1)


def simulated(
    model: StepModel, polls: int, start: EngineCounts | None = None
) -> list[EngineCounts]:
    """Polls, every 0.2 s, of an engine whose steps change in size."""
    now = start or EngineCounts(0.0, 0.0, 0.0, 0.0, 4, 0.0)
    polled, at, next_poll = [now], now.at, now.at + 0.2
    steps, computed, generated = now.steps, now.computed_tokens, now.generated_tokens
    number = 0
    while len(polled) <= polls:
        number += 1
        prefill = 300 * (number % 17 == 0)
        batch = 4 + 8 * (number // 150 % 2)
        kv = 2_000.0 + 6_000 * (number // 230 % 2)
        at += model.step_time(prefill, batch, kv)
        steps, computed, generated = steps + 1, computed + prefill, generated + batch
        while next_poll <= at and len(polled) <= polls:
            polled.append(EngineCounts(at, steps, computed, generated, batch, kv))
            next_poll = at + 0.2
    return polled


@pytest.mark.parametrize("wrong", [0.5, 2.0])
def test_wrong_profile_is_corrected_within_a_minute(wrong: float) -> None:
    estimator = Estimator(A10.slowed(wrong))
    for poll in simulated(A10, 300):
        estimator.poll(poll)
    assert_like(estimator.model, A10)


def test_throttled_gpu_is_noticed_after_10_s_of_work() -> None:
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
    """Polls of an engine that is idle after these polls."""
    last = polls[-1]
    return [
        replace(last, at=last.at + 0.2 * number, in_flight=0, kv_tokens=0.0)
        for number in range(1, round(seconds / 0.2))
    ]


def test_idle_time_does_not_make_an_engine_look_slow() -> None:
    estimator = Estimator(A10)
    polls = simulated(A10, 300)
    for poll in polls + idle(polls, 40):
        estimator.poll(poll)
    assert_like(estimator.model, A10)


def test_hang_between_failed_polls_does_not_make_an_engine_look_slow() -> None:
    estimator = Estimator(A10)
    polls = simulated(A10, 300)
    later = replace(polls[-1], at=polls[-1].at + 10.0)
    for poll in polls:
        estimator.poll(poll)
    estimator.interrupted()
    for poll in simulated(A10, 20, start=later):
        estimator.poll(poll)
    assert_like(estimator.model, A10)


def test_first_steps_of_an_engine_make_it_look_at_most_4_times_slower() -> None:
    """The engine compiles kernels in its first steps, which take a second each."""
    estimator = Estimator(A10)
    for number in range(30):
        steps = number // 5
        estimator.poll(EngineCounts(0.2 * number, steps, 40.0 * steps, steps, 1, 40.0))
    assert A10.c0 < estimator.model.c0 < 4.1 * A10.c0
    start = EngineCounts(6.0, 12.0, 480.0, 12.0, 4, 0.0)
    for poll in simulated(A10, 15, start=start):
        estimator.poll(poll)
    assert estimator.model.step_time(0, 4, 2000) < 1.5 * A10.step_time(0, 4, 2000)


def test_pauses_between_two_polls_do_not_make_an_engine_look_slow() -> None:
    """A request of 5 steps in 150 ms arrives every 200 ms, and each poll finds it running."""
    estimator = Estimator(A10)
    for number in range(300):
        estimator.poll(
            EngineCounts(0.2 * number, 5.0 * number, 20.0 * number, 5.0 * number, 1, 30.0, number)
        )
    assert_like(estimator.model, A10)


def test_long_prompts_alone_do_not_make_each_step_look_expensive() -> None:
    """Each step prefills a chunk of a prompt, which is counted when its prefill ends."""
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


def test_throttled_gpu_is_still_slow_after_10_s_of_idling() -> None:
    estimator = Estimator(A10)
    polls = simulated(A10, 600)
    polls += simulated(A10.slowed(3.0), 50, start=polls[-1])[1:]
    for poll in polls + idle(polls, 10):
        estimator.poll(poll)
    assert estimator.model.step_time(0, 4, 2000) == pytest.approx(
        3 * A10.step_time(0, 4, 2000), rel=0.2
    )


@pytest.mark.parametrize("seconds", [10, 300])
def test_slow_replica_counts_by_its_profile_again_after_3_minutes_of_idling(seconds: int) -> None:
    """While the replica looks slow it gets no requests, so that no work could correct it."""
    estimator = Estimator(A10)
    polls = simulated(A10, 1500)
    polls += simulated(A10.slowed(3.0), seconds * 5, start=polls[-1])[1:]
    for poll in polls:
        estimator.poll(poll)
    assert estimator.model.c0 > 2 * A10.c0
    for poll in idle(polls, 180):
        estimator.poll(poll)
    assert estimator.model.c0 < 1.2 * A10.c0


def test_step_times_known_at_the_start_are_forgotten_after_an_idle_hour() -> None:
    estimator = Estimator(A10, known=A10.slowed(3.0))
    polls = [EngineCounts(0.0, 0.0, 0.0, 0.0, 0, 0.0)]
    estimator.poll(polls[0])
    assert_like(estimator.model, A10.slowed(3.0))
    for poll in idle(polls, 3_600):
        estimator.poll(poll)
    assert_like(estimator.model, A10)


def test_replica_is_not_measured_after_a_night_without_work() -> None:
    estimator = Estimator(A10)
    for poll in simulated(A10.slowed(1.4), 300):
        estimator.poll(poll)
    assert estimator.measured
    estimator.poll(EngineCounts(1e5, 0.0, 0.0, 0.0, 0, 0.0))
    assert not estimator.measured
    assert_like(estimator.model, A10)


def test_replica_without_work_has_the_step_times_of_the_fleet() -> None:
    estimator = Estimator(A10)
    assert not estimator.measured
    estimator.poll(EngineCounts(0.0, 0.0, 0.0, 0.0, 0, 0.0), Prior((2.0,) * 4, 1e-5))
    assert_like(estimator.model, A10.slowed(2.0))


def test_restart_of_the_engine_leaves_the_learned_step_times() -> None:
    estimator = Estimator(A10)
    for _ in range(2):
        for poll in simulated(A10, 100):
            estimator.poll(poll)
    assert_like(estimator.model, A10)


@pytest.mark.parametrize("counter", ["steps", "computed_tokens", "generated_tokens", "finished"])
@pytest.mark.parametrize("value", [0.0, 1e7, 2.0**53])
def test_one_wrong_reading_of_a_counter_leaves_the_learned_step_times(
    counter: str, value: float
) -> None:
    estimator = Estimator(A10)
    polls = simulated(A10, 400)
    for number, poll in enumerate(polls):
        wrong = {counter: value} if number == 200 else {}
        estimator.poll(EngineCounts(**{**asdict(poll), **wrong}))
    assert_like(estimator.model, A10)


def test_throttled_gpu_is_noticed_after_three_requests() -> None:
    """After the three requests the replica is idle for 20 s."""
    estimator, counts = Estimator(A10), EngineCounts(0.0, 0.0, 0.0, 0.0, 0, 0.0)
    for _ in range(30):
        counts = poll_request(estimator, counts, 1.0)
    for _ in range(3):
        counts = poll_request(estimator, counts, 4.0)
    for _ in range(100):
        counts = replace(counts, at=counts.at + 0.2, in_flight=0)
        estimator.poll(counts)
    assert estimator.model.c0 == pytest.approx(4.0 * A10.c0, rel=0.2)


def poll_request(estimator: Estimator, counts: EngineCounts, slow: float) -> EngineCounts:
    """Polls an engine every 0.2 s during a request of 2,000 and 40 tokens, and 1 s after it."""
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


class SoloReplica:
    """An A10, whose profile is an A100's, that serves a request from time to time."""

    def __init__(self) -> None:
        self.estimator = Estimator(PROFILES["llama-3-8b-a100"].step)
        self.counts = EngineCounts(0.0, 20.0, 0.0, 0.0, 0, 0.0)
        self.estimator.poll(self.counts)

    def serve(
        self, prompt: int, tokens: int, cached: int = 0, at_once: int = 1, aborted: int = 0
    ) -> None:
        """Serves equal requests between two idle polls.

        ``at_once``: requests whose times in vLLM overlap; ``aborted``: requests without times.
        """
        prefill = A10.step_time(prompt - cached, 1, 0)
        decode = (tokens - 1) * A10.step_time(0, 1, prompt + tokens / 2)
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


def test_ten_solo_requests_separate_prefill_from_decode_steps() -> None:
    solo, random = SoloReplica(), Random(1)
    for _ in range(10):
        solo.serve(random.randint(20, 2000), random.randint(3, 30))
    learned = solo.estimator.model
    assert learned.step_time(0, 1, 1000) == pytest.approx(A10.step_time(0, 1, 1000), rel=0.1)
    assert learned.step_time(1000, 1, 0) == pytest.approx(A10.step_time(1000, 1, 0), rel=0.1)


def test_cached_tokens_of_a_solo_request_do_not_make_prefill_look_fast() -> None:
    solo = SoloReplica()
    for _ in range(20):
        solo.serve(1000, 20, cached=900)
    learned = solo.estimator.model
    assert learned.step_time(100, 1, 0) == pytest.approx(A10.step_time(100, 1, 0), rel=0.1)


@pytest.mark.parametrize(("at_once", "aborted"), [(2, 0), (1, 1)])
def test_requests_served_together_do_not_count_as_solo_requests(at_once: int, aborted: int) -> None:
    solo = SoloReplica()
    start = solo.estimator.model
    for _ in range(20):
        solo.serve(1000, 20, at_once=at_once, aborted=aborted)
    assert solo.estimator.model == start


@pytest.mark.parametrize("cached", [0, 4_000, 32_000])
def test_prefill_time_is_learned_from_counters_of_an_old_vllm(cached: int) -> None:
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
            estimator.poll(replace(counts, cached_early=True))
            poll_at += 0.2
    assert estimator.model.c_prefill == pytest.approx(A10.c_prefill, rel=0.1)


START = StepModel(0.01, 1e-4, 1e-4, 1e-7)


class Pool:
    """Replicas of one poller with the same profile, whose estimators share a :class:`FleetPrior`.

    ``ratios``: actual ÷ profile's step times of each replica; None: the replica is always idle.
    """

    def __init__(self, *ratios: float | None) -> None:
        self._prior = FleetPrior()
        self.replicas = [Estimator(START) for _ in ratios]
        self.ratios = list(ratios)
        self._at = 0.0

    def poll(self, seconds: float, working: bool = True) -> None:
        """Polls all replicas once a second; ``working=False``: all are idle."""
        for _ in range(round(seconds)):
            self._at += 1.0
            for number, (replica, ratio) in enumerate(zip(self.replicas, self.ratios, strict=True)):
                replica.poll(self._counts(ratio if working else None), self._prior.prior)
                self._prior.report(str(number), replica.evidence)

    def _counts(self, ratio: float | None) -> EngineCounts:
        if ratio is None:
            return EngineCounts(self._at, 1e6, 0.0, 0.0, 0, 0.0)
        steps = self._at / START.slowed(ratio).step_time(0.0, 2.0, 100.0)
        return EngineCounts(self._at, steps, 0.0, 2.0 * steps, 2, 100.0)

    @property
    def slowness(self) -> list[float]:
        return [replica.model.c0 / START.c0 for replica in self.replicas]


def test_replica_that_is_not_measured_has_the_speed_of_most_others() -> None:
    pool = Pool(2.0, 2.0, None)
    assert pool.slowness == [1.0] * 3
    pool.poll(30)
    assert pool.slowness == pytest.approx([2.0] * 3, rel=0.05)


@pytest.mark.parametrize("measured", [0.5, 7.0])
def test_one_measured_replica_of_two_does_not_change_the_other(measured: float) -> None:
    """A fast replica is measured first, and a slow replica may be an outlier."""
    pool = Pool(measured, None)
    pool.poll(30)
    assert pool.slowness == pytest.approx([measured, 1.0], rel=0.05)


@pytest.mark.parametrize(("measured", "others"), [(4.0, 4.0), (0.25, 1.0)])
def test_three_of_eight_replicas_tell_if_the_profile_is_too_fast(
    measured: float, others: float
) -> None:
    """Fast replicas are measured first, so three of them say nothing about the others."""
    pool = Pool(*[measured] * 3, *[None] * 5)
    pool.poll(30)
    assert pool.slowness == pytest.approx([measured] * 3 + [others] * 5, rel=0.05)


def test_measured_replicas_keep_their_own_speed() -> None:
    pool = Pool(1.0, 3.0)
    pool.poll(30)
    assert pool.slowness == pytest.approx([1.0, 3.0], rel=0.05)


def test_replica_that_is_not_measured_has_the_median_speed_of_the_others() -> None:
    pool = Pool(1.0, 2.0, 2.0, 9.0, None)
    pool.poll(30)
    assert pool.slowness[-1] == pytest.approx(2.0, rel=0.05)


def test_slow_replica_has_the_speed_of_the_other_after_20_idle_minutes() -> None:
    """The median no longer contains its own slowness, which would keep it slow."""
    pool = Pool(1.0, 3.0)
    pool.poll(30)
    pool.ratios[1] = None
    pool.poll(20 * 60)
    assert pool.slowness == pytest.approx([1.0, 1.0], rel=0.05)


def test_all_replicas_have_the_speed_of_the_profile_after_20_idle_minutes() -> None:
    pool = Pool(2.0, 3.0)
    pool.poll(30)
    pool.poll(20 * 60, working=False)
    assert pool.slowness == pytest.approx([1.0, 1.0], rel=0.05)
