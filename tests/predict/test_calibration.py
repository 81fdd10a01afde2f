import json
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from extproc.predict.calibration import Calibration, Typical
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
    polls, calibration = real_run(), Calibration(PROFILES[start].step)
    known: list[StepModel] = []
    for poll in polls:
        calibration.poll(poll)
        known.append(calibration.model)
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
    calibration = Calibration(A10.slowed(wrong))
    for poll in simulated(A10, 300):
        calibration.poll(poll)
    assert_like(calibration.model, A10)


def test_a_throttled_card_is_seen_within_seconds() -> None:
    calibration = Calibration(A10)
    polls = simulated(A10, 600)
    for poll in polls:
        calibration.poll(poll)
    for poll in simulated(A10.slowed(3.0), 50, start=polls[-1])[1:]:
        calibration.poll(poll)
    assert calibration.model.step_time(0, 4, 2000) == pytest.approx(
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
    calibration = Calibration(A10)
    polls = simulated(A10, 300)
    for poll in polls + idle(polls, 40):
        calibration.poll(poll)
    assert_like(calibration.model, A10)


def test_neither_does_a_hang_that_polls_noticed() -> None:
    calibration = Calibration(A10)
    polls = simulated(A10, 300)
    later = replace(polls[-1], at=polls[-1].at + 10.0)
    for poll in polls:
        calibration.poll(poll)
    calibration.interrupted()
    for poll in simulated(A10, 20, start=later):
        calibration.poll(poll)
    assert_like(calibration.model, A10)


def test_nor_do_the_first_steps_of_an_engine_that_warms_up() -> None:
    """It compiles its kernels while the first requests wait."""
    calibration = Calibration(A10)
    for number in range(30):
        steps = number // 5
        calibration.poll(EngineCounts(0.2 * number, steps, 40.0 * steps, steps, 1, 40.0))
    assert calibration.model == A10
    assert calibration.ratio is None


def test_pauses_between_two_polls_do_not_either() -> None:
    """One request at a time, of 5 steps in 150 ms, every 200 ms; each poll finds one running."""
    calibration = Calibration(A10)
    for number in range(300):
        calibration.poll(
            EngineCounts(0.2 * number, 5.0 * number, 20.0 * number, 5.0 * number, 1, 30.0, number)
        )
    assert_like(calibration.model, A10)


def test_long_prompts_alone_do_not_make_every_step_look_dear() -> None:
    """Every step is a chunk of a prompt; a prompt is counted when its prefill ends."""
    calibration = Calibration(A10)
    at, next_poll, steps, computed, left = 0.0, 0.2, 0, 0, 7_000
    while at < 30.0:
        chunk = min(left, 2_048)
        end = at + A10.step_time(chunk, 1, 7_000)
        while next_poll < end:
            calibration.poll(EngineCounts(next_poll, steps, computed, computed / 7e3, 20, 7e3))
            next_poll += 0.2
        at, steps, left = end, steps + 1, left - chunk
        if left == 0:
            computed, left = computed + 7_000, 7_000
    assert_like(calibration.model, A10)


def test_one_that_was_slow_a_moment_ago_is_not_fast_because_it_was_left_alone() -> None:
    calibration = Calibration(A10)
    polls = simulated(A10, 600)
    polls += simulated(A10.slowed(3.0), 50, start=polls[-1])[1:]
    for poll in polls + idle(polls, 10):
        calibration.poll(poll)
    assert calibration.model.step_time(0, 4, 2000) == pytest.approx(
        3 * A10.step_time(0, 4, 2000), rel=0.2
    )


@pytest.mark.parametrize("seconds", [10, 300])
def test_one_that_was_slow_for_a_while_is_tried_again(seconds: int) -> None:
    """While it looks slow nothing is sent to it, and so nothing would be learned."""
    calibration = Calibration(A10)
    polls = simulated(A10, 1500)
    polls += simulated(A10.slowed(3.0), seconds * 5, start=polls[-1])[1:]
    for poll in polls:
        calibration.poll(poll)
    assert calibration.model.c0 > 2 * A10.c0
    for poll in idle(polls, 180):
        calibration.poll(poll)
    assert calibration.model.c0 < 1.2 * A10.c0


def test_what_was_known_before_a_restart_is_forgotten_when_idle() -> None:
    calibration = Calibration(A10, known=A10.slowed(3.0))
    polls = [EngineCounts(0.0, 0.0, 0.0, 0.0, 0, 0.0)]
    calibration.poll(polls[0])
    assert_like(calibration.model, A10.slowed(3.0))
    for poll in idle(polls, 3_600):
        calibration.poll(poll)
    assert_like(calibration.model, A10)


def test_after_a_night_without_work_nothing_is_told_of_it() -> None:
    calibration = Calibration(A10)
    for poll in simulated(A10.slowed(1.4), 300):
        calibration.poll(poll)
    assert calibration.ratio == pytest.approx(1.4, rel=0.1)
    calibration.poll(EngineCounts(1e5, 0.0, 0.0, 0.0, 0, 0.0))
    assert calibration.ratio is None
    assert_like(calibration.model, A10)


def test_before_anything_was_seen_a_replica_is_as_others_turned_out_to_be() -> None:
    calibration = Calibration(A10)
    assert calibration.ratio is None
    calibration.poll(EngineCounts(0.0, 0.0, 0.0, 0.0, 0, 0.0), typical=2.0)
    assert_like(calibration.model, A10.slowed(2.0))


def test_a_restart_does_not_disturb_what_was_learned() -> None:
    calibration = Calibration(A10)
    for _ in range(2):
        for poll in simulated(A10, 100):
            calibration.poll(poll)
    assert_like(calibration.model, A10)


@pytest.mark.parametrize("counter", ["steps", "computed_tokens", "generated_tokens", "finished"])
@pytest.mark.parametrize("value", [0.0, 1e7, 2.0**53])
def test_one_reading_that_is_nonsense_is_forgotten(counter: str, value: float) -> None:
    calibration = Calibration(A10)
    polls = simulated(A10, 400)
    for number, poll in enumerate(polls):
        wrong = {counter: value} if number == 200 else {}
        calibration.poll(EngineCounts(**{**asdict(poll), **wrong}))
    assert_like(calibration.model, A10)


def test_a_card_that_is_suddenly_throttled_is_known_after_a_few_seconds_of_work() -> None:
    """It gets little to do: three requests in six seconds, then none for twenty."""
    calibration, counts = Calibration(A10), EngineCounts(0.0, 0.0, 0.0, 0.0, 0, 0.0)
    for _ in range(30):
        counts = _serve(calibration, counts, 1.0)
    for _ in range(3):
        counts = _serve(calibration, counts, 4.0)
    for _ in range(100):
        counts = replace(counts, at=counts.at + 0.2, in_flight=0)
        calibration.poll(counts)
    assert calibration.model.c0 == pytest.approx(4.0 * A10.c0, rel=0.2)


def _serve(calibration: Calibration, counts: EngineCounts, slow: float) -> EngineCounts:
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
        calibration.poll(counts)
    counts = replace(counts, at=counts.at + 1.0)
    calibration.poll(counts)
    return counts


START = StepModel(0.01, 1e-4, 1e-4, 1e-7)


class Pool:
    """Replicas that start from one profile and report to one median at every poll."""

    def __init__(self, *ratios: float | None) -> None:
        """By ``ratios`` they were measured to be; None: idle ever since."""
        self._typical = Typical()
        self.replicas = [Calibration(START) for _ in ratios]
        self.ratios = list(ratios)
        self._at = 0.0

    def poll(self, seconds: float, working: bool = True) -> None:
        """One poll a second of all; those that were measured work, or none does."""
        for _ in range(round(seconds)):
            self._at += 1.0
            for number, (one, ratio) in enumerate(zip(self.replicas, self.ratios, strict=True)):
                one.poll(self._counts(ratio if working else None), self._typical.value)
                self._typical.report(str(number), one.ratio)

    def _counts(self, ratio: float | None) -> EngineCounts:
        if ratio is None:
            return EngineCounts(self._at, 1e6, 0.0, 0.0, 0, 0.0)
        steps = self._at / START.slowed(ratio).step_time(0.0, 2.0, 100.0)
        return EngineCounts(self._at, steps, 0.0, 2.0 * steps, 2, 100.0)

    @property
    def slowness(self) -> list[float]:
        """c0 of each as a multiple of the profile's."""
        return [one.model.c0 / START.c0 for one in self.replicas]


def test_of_two_the_one_not_measured_is_taken_to_be_as_the_other() -> None:
    pool = Pool(2.0, None)
    assert pool.slowness == [1.0, 1.0]
    pool.poll(30)
    assert pool.slowness == pytest.approx([2.0, 2.0], rel=0.05)


def test_what_was_measured_of_a_replica_outweighs_the_others() -> None:
    pool = Pool(1.0, 3.0)
    pool.poll(30)
    assert pool.slowness == pytest.approx([1.0, 3.0], rel=0.05)


def test_of_more_the_median_counts() -> None:
    pool = Pool(1.0, 2.0, 9.0, None)
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
