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
    """Of sequences that have generated so much."""
    done = np.minimum(np.atleast_1d(np.array(progress, float)), bound)
    begin, cut = (np.full(len(done), place) for place in outputs.place(row, bound))
    alive, _ = outputs.reached(begin, done)
    return outputs.remaining(alive, cut, done, np.full(len(done), bound), np.zeros(len(done)))


def test_the_expectation_is_learned() -> None:
    outputs, row = learned(40)
    assert remaining(outputs, row, 0, 4096) == pytest.approx(40, rel=0.2)


@pytest.mark.parametrize("bound", [0, 1, 16, 100, 4096, 131_072, 1e7])
def test_the_first_estimate_is_what_remains_at_the_start(bound: float) -> None:
    outputs, row = learned(20, 1000)
    assert outputs.expected(row, bound) == pytest.approx(remaining(outputs, row, 0.0, bound).item())


def test_the_bound_clamps_it() -> None:
    outputs, row = learned(400)
    assert remaining(outputs, row, 0, 16) == pytest.approx(16, rel=0.05)
    assert remaining(outputs, row, 10, 16) == pytest.approx(6, rel=0.05)
    assert remaining(outputs, row, 16, 16) == 0


def test_what_remains_follows_from_the_hazard_not_from_the_first_estimate() -> None:
    """Half of them end at 20 tokens, half at 1,000: who passes 30 goes on for long."""
    outputs, row = learned(20, 1000)
    assert remaining(outputs, row, 0, 4096) == pytest.approx(510, rel=0.2)
    assert remaining(outputs, row, 30, 4096) > 800
    assert remaining(outputs, row, 900, 4096) < 200


def test_the_bound_is_taken_inside_the_expectation() -> None:
    outputs, row = learned(20, 1000)
    assert remaining(outputs, row, 0, 100) == pytest.approx((20 + 100) / 2, rel=0.15)


def test_what_nothing_is_known_of_is_taken_for_what_all_have_shown() -> None:
    outputs, _ = learned(40)
    other = outputs.row(request("another", Endpoint.COMPLETIONS))
    assert remaining(outputs, other, 0, 4096) == pytest.approx(40, rel=0.2)
    for _ in range(50):
        outputs.observe(request("another", Endpoint.COMPLETIONS), 600)
    other = outputs.row(request("another", Endpoint.COMPLETIONS))
    assert remaining(outputs, other, 0, 4096) > 400
    assert remaining(outputs, outputs.row(request()), 0, 4096) < 100


def test_what_was_cut_by_its_bound_would_have_gone_on() -> None:
    outputs, row = learned(20, 1000)
    before = outputs.expected(row, FREE)
    for _ in range(500):
        outputs.observe(request(bound=16), 16)
    assert outputs.expected(row, FREE) == pytest.approx(before, rel=0.3)


def test_it_takes_all_requests_in_flight_at_once() -> None:
    outputs, row = learned(40, 300)
    progress = np.array([0.0, 50.0, 400.0, 1e6])
    together = remaining(outputs, row, progress, FREE)
    alone = [remaining(outputs, row, g, FREE).item() for g in progress]
    assert together == pytest.approx(alone)
    assert (together >= 0).all()
    assert np.isfinite(together).all()


def test_a_flood_of_model_names_does_not_grow_it_without_end() -> None:
    outputs = OutputLengths()
    for number in range(2000):
        outputs.observe(request(f"model-{number}"), 100)
    assert len({outputs.row(request(f"model-{number}")) for number in range(2000)}) < 1100


@pytest.mark.parametrize("tenants", [False, True])
def test_kind_that_comes_after_thousands_is_learned(tenants: bool) -> None:
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


def test_kind_in_use_outlives_those_that_are_not() -> None:
    outputs = OutputLengths()
    for number in range(5000):
        if number % 100 == 0:
            for _ in range(20):
                outputs.observe(request("usual"), 900)
        outputs.observe(request(f"model-{number}"), 19)
    assert outputs.expected(outputs.row(request("usual")), FREE) == pytest.approx(900, rel=0.2)


def test_requests_in_flight_keep_the_histogram_of_their_kind() -> None:
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


def test_kinds_share_coarser_rows_while_requests_in_flight_have_all() -> None:
    outputs = OutputLengths()
    for number in range(2000):
        outputs.observe(request(f"model-{number}"), 19)
        outputs.hold(request(f"model-{number}"))
    rows = {number: outputs.row(request(f"model-{number}")) for number in range(2000)}
    outputs.observe(request("new"), 900)
    assert {number: outputs.row(request(f"model-{number}")) for number in rows} == rows


def test_names_that_clients_make_up_take_no_room() -> None:
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
def test_kinds_of_requests_are_told_apart(other: RequestProfile) -> None:
    outputs = OutputLengths()
    for _ in range(100):
        outputs.observe(request(tenant="chat"), 800)
        outputs.observe(other, 20)
    assert outputs.expected(outputs.row(request(tenant="chat")), FREE) > 600
    assert outputs.expected(outputs.row(other), FREE) < 60


def test_a_kind_not_seen_yet_is_like_the_next_coarser_one() -> None:
    outputs, row = learned(40)
    for _ in range(200):
        outputs.observe(request("llama", Endpoint.COMPLETIONS), 800)
    assert outputs.row(request(bound=512, tenant="new")) != row
    assert outputs.expected(outputs.row(request(tenant="new")), FREE) == pytest.approx(40, rel=0.2)


@pytest.mark.parametrize("least", [1999, 2000])
def test_a_request_that_had_to_go_on_tells_nothing(least: int) -> None:
    outputs, row = learned(40)
    before = outputs.expected(row, FREE)
    for _ in range(100):
        outputs.observe(request(bound=2000, least=least), 2000)
    assert outputs.expected(outputs.row(request()), FREE) == before


def test_nine_of_ten_do_not_exceed_p90() -> None:
    outputs, row = learned(*[20.0] * 17, 300.0, 300.0, 900.0)
    assert outputs.p90(row, FREE) == pytest.approx(300, rel=0.2)
    assert outputs.p90(row, 64) == 64


def test_a_replicas_own_histogram_tells_of_its_model() -> None:
    outputs = OutputLengths()
    outputs.observe_counts("llama", [(10.0, 0.0), (20.0, 90.0), (50.0, 10.0), (float("inf"), 0.0)])
    row = outputs.row(request())
    seen = outputs.expected(row, FREE)
    assert seen < 30
    assert outputs.p90(row, FREE) <= 50
    outputs.observe_counts("llama", [(10.0, 0.0), (float("inf"), 0.0)])
    assert outputs.expected(row, FREE) == seen


def test_tenants_that_clients_make_up_leave_room_for_models() -> None:
    outputs = OutputLengths()
    for number in range(2000):
        outputs.observe(request(tenant=f"tenant-{number}"), 100)
    for _ in range(200):
        outputs.observe(request("new"), 900)
    assert outputs.expected(outputs.row(request("new")), FREE) > 700
