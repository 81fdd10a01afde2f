"""Histograms of output lengths: expected and remaining tokens, kinds, and their bounded number."""

import numpy as np
import pytest
from numpy.typing import ArrayLike

from extproc.predict.inputs import Floats
from extproc.predict.lengths import OutputLengths
from extproc.request.endpoint import Endpoint
from extproc.request.profile import RequestProfile

FREE = 131_072.0


def request(
    model: str = "llama",
    endpoint: Endpoint = Endpoint.CHAT,
    bound: int | None = None,
    stream: bool = False,
    tenant: str = "",
    least: int = 0,
) -> RequestProfile:
    return RequestProfile(endpoint, model, 100, 400, bound, 1, stream, least, tenant)


def learned(*lengths: float) -> tuple[OutputLengths, int]:
    outputs = OutputLengths()
    for _ in range(200):
        for length in lengths:
            outputs.observe(request(), length)
    return outputs, outputs.row(request())


def remaining(outputs: OutputLengths, row: int, progress: ArrayLike, bound: float) -> Floats:
    """Remaining tokens of sequences that have generated ``progress`` tokens."""
    done = np.minimum(np.atleast_1d(np.array(progress, float)), bound)
    begin, cut = (np.full(len(done), place) for place in outputs.place(row, bound))
    alive, _ = outputs.reached(begin, done)
    return outputs.remaining(alive, cut, done, np.full(len(done), bound), np.zeros(len(done)))


def test_expected_length_is_learned() -> None:
    outputs, row = learned(40)
    assert remaining(outputs, row, 0, 4096) == pytest.approx(40, rel=0.2)


@pytest.mark.parametrize("bound", [0, 1, 16, 100, 4096, 131_072, 1e7])
def test_expected_length_equals_the_remaining_tokens_at_the_start(bound: float) -> None:
    outputs, row = learned(20, 1000)
    assert outputs.expected(row, bound) == pytest.approx(remaining(outputs, row, 0.0, bound).item())


def test_remaining_tokens_end_at_the_bound() -> None:
    outputs, row = learned(400)
    assert remaining(outputs, row, 0, 16) == pytest.approx(16, rel=0.05)
    assert remaining(outputs, row, 10, 16) == pytest.approx(6, rel=0.05)
    assert remaining(outputs, row, 16, 16) == 0


def test_remaining_tokens_rise_once_a_sequence_outlives_the_short_answers() -> None:
    """Half of the sequences end at 20 tokens and half at 1,000."""
    outputs, row = learned(20, 1000)
    assert remaining(outputs, row, 0, 4096) == pytest.approx(510, rel=0.2)
    assert remaining(outputs, row, 30, 4096) > 800
    assert remaining(outputs, row, 900, 4096) < 200


def test_each_length_is_cut_at_the_bound_before_the_mean_is_taken() -> None:
    outputs, row = learned(20, 1000)
    assert remaining(outputs, row, 0, 100) == pytest.approx((20 + 100) / 2, rel=0.15)


def test_unknown_model_uses_the_lengths_of_all_until_it_has_its_own() -> None:
    outputs, _ = learned(40)
    other = outputs.row(request("another", Endpoint.COMPLETIONS))
    assert remaining(outputs, other, 0, 4096) == pytest.approx(40, rel=0.2)
    for _ in range(50):
        outputs.observe(request("another", Endpoint.COMPLETIONS), 600)
    other = outputs.row(request("another", Endpoint.COMPLETIONS))
    assert remaining(outputs, other, 0, 4096) > 400
    assert remaining(outputs, outputs.row(request()), 0, 4096) < 100


def test_sequences_cut_at_their_bound_do_not_count_as_short() -> None:
    outputs, row = learned(20, 1000)
    before = outputs.expected(row, FREE)
    for _ in range(500):
        outputs.observe(request(bound=16), 16)
    assert outputs.expected(row, FREE) == pytest.approx(before, rel=0.3)


def test_remaining_tokens_of_many_sequences_equal_those_of_each() -> None:
    outputs, row = learned(40, 300)
    progress = np.array([0.0, 50.0, 400.0, 1e6])
    together = remaining(outputs, row, progress, FREE)
    alone = [remaining(outputs, row, g, FREE).item() for g in progress]
    assert together == pytest.approx(alone)
    assert (together >= 0).all()
    assert np.isfinite(together).all()


def test_number_of_histograms_is_bounded_for_2000_model_names() -> None:
    outputs = OutputLengths()
    for number in range(2000):
        outputs.observe(request(f"model-{number}"), 100)
    assert len({outputs.row(request(f"model-{number}")) for number in range(2000)}) < 1100


@pytest.mark.parametrize("tenants", [False, True])
def test_new_kind_after_thousands_of_others_is_learned(tenants: bool) -> None:
    def numbered(number: int) -> RequestProfile:
        name = f"name-{number}"
        return request(tenant=name) if tenants else request(name)

    outputs = OutputLengths()
    for number in range(2000):
        for _ in range(3):
            outputs.observe(numbered(number), 19)
    for _ in range(36):
        outputs.observe(numbered(2000), 2000)
    assert outputs.expected(outputs.row(numbered(2000)), FREE) == pytest.approx(2000, rel=0.2)


def test_kind_in_use_keeps_its_histogram_among_5000_others() -> None:
    outputs = OutputLengths()
    for number in range(5000):
        if number % 100 == 0:
            for _ in range(20):
                outputs.observe(request("usual"), 900)
        outputs.observe(request(f"model-{number}"), 19)
    assert outputs.expected(outputs.row(request("usual")), FREE) == pytest.approx(900, rel=0.2)


def test_kind_with_requests_in_flight_keeps_its_histogram() -> None:
    outputs, _ = learned(900)
    held = [outputs.hold(request()) for _ in range(2)]
    before = outputs.expected(held[0], FREE)
    for number in range(5000):
        outputs.observe(request(f"model-{number}"), 19)
    assert outputs.row(request()) == held[0]
    assert outputs.expected(held[0], FREE) == before
    for row in held:
        begin, _ = outputs.place(row, FREE)
        outputs.release(begin)
    for number in range(5000):
        outputs.observe(request(f"model-{number}"), 19)
    assert outputs.row(request()) == 0


def test_new_kind_uses_a_coarser_histogram_while_requests_in_flight_hold_all() -> None:
    outputs = OutputLengths()
    for number in range(2000):
        outputs.observe(request(f"model-{number}"), 19)
        outputs.hold(request(f"model-{number}"))
    rows = {number: outputs.row(request(f"model-{number}")) for number in range(2000)}
    outputs.observe(request("new"), 900)
    assert {number: outputs.row(request(f"model-{number}")) for number in rows} == rows


def test_models_without_an_observation_take_no_histogram() -> None:
    outputs = OutputLengths()
    for number in range(2000):
        outputs.row(request(f"bogus-{number}"))
    outputs.observe(request("real"), 100)
    assert outputs.row(request("real")) != 0


@pytest.mark.parametrize(
    "other",
    [
        request(stream=True, tenant="chat"),
        request(bound=64, tenant="chat"),
        request(tenant="summaries"),
    ],
)
def test_streaming_bound_and_tenant_have_lengths_of_their_own(other: RequestProfile) -> None:
    outputs = OutputLengths()
    for _ in range(100):
        outputs.observe(request(tenant="chat"), 800)
        outputs.observe(other, 20)
    assert outputs.expected(outputs.row(request(tenant="chat")), FREE) > 600
    assert outputs.expected(outputs.row(other), FREE) < 60


def test_kind_without_observations_uses_the_next_coarser_kind() -> None:
    outputs, row = learned(40)
    for _ in range(200):
        outputs.observe(request("llama", Endpoint.COMPLETIONS), 800)
    assert outputs.row(request(bound=512, tenant="new")) != row
    assert outputs.expected(outputs.row(request(tenant="new")), FREE) == pytest.approx(40, rel=0.2)


@pytest.mark.parametrize("least", [1999, 2000])
def test_request_with_a_minimum_length_is_not_learned_from(least: int) -> None:
    outputs, row = learned(40)
    before = outputs.expected(row, FREE)
    for _ in range(100):
        outputs.observe(request(bound=2000, least=least), 2000)
    assert outputs.expected(outputs.row(request()), FREE) == before


def test_nine_of_ten_sequences_do_not_exceed_p90() -> None:
    outputs, row = learned(*[20.0] * 17, 300.0, 300.0, 900.0)
    assert outputs.p90(row, FREE) == pytest.approx(300, rel=0.2)
    assert outputs.p90(row, 64) == 64


def test_2000_tenants_leave_histograms_for_a_new_model() -> None:
    outputs = OutputLengths()
    for number in range(2000):
        outputs.observe(request(tenant=f"tenant-{number}"), 100)
    for _ in range(200):
        outputs.observe(request("new"), 900)
    assert outputs.expected(outputs.row(request("new")), FREE) > 700
