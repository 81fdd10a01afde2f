"""A response updates metrics, learned figures and failures of the replica."""

from collections.abc import Mapping
from dataclasses import replace
from math import inf

import pytest
from prometheus_client import CollectorRegistry

from extproc.config import Config
from extproc.observe.dashboard.warnings import pool_warnings
from extproc.observe.decision import RequestOutcome
from extproc.observe.metrics import RouterMetrics
from extproc.predict.completion import Prediction
from extproc.proxy.services import Services
from tests.conftest import Logged
from tests.fakes import MODEL, ManualClock, chat, replica
from tests.proxy.conftest import (
    alive,
    config_of,
    put_replicas,
    router_of,
    samples,
    with_fleet,
)
from tests.proxy.envoy_side import (
    CHAT,
    EVENTS,
    LAST,
    NAMED,
    RESPONSE_TRAILERS,
    STREAMED,
    TOKEN,
    USAGE,
    EnvoySide,
    Local,
    Stream,
)
from tests.proxy.replies import destination

BY = {"model": MODEL, "objective": "chat"}
TUNNEL = "127.0.0.1:15001"
CONNECTION_FAILED, CONNECTION_TERMINATED, RETRIES_EXHAUSTED = 1 << 5, 1 << 6, 1 << 15
"""Envoy's response flags UF, UC and URX."""
Happening = bytes | float | dict[str, float]
"""Event of a stream, seconds that pass, or figures of a poll of both replicas."""


async def play(
    stream: Stream, services: Services, clock: ManualClock, happenings: list[Happening]
) -> None:
    for happening in happenings:
        if isinstance(happening, bytes):
            await stream.response_body(happening, end_of_stream=False)
        elif isinstance(happening, float):
            clock.advance(happening)
        else:
            put_replicas(services, **happening)


async def ended(stream: Stream, services: Services) -> RequestOutcome:
    """Ends the stream; returns the outcome in its record."""
    await stream.end()
    (record,) = services.log.of_request("one")
    return record.outcome


async def fail_until_ejected(envoy: EnvoySide, upstream: str = "") -> None:
    for _ in range(5):  # a replica gets three of the five
        await envoy.converse(status=500, upstream=upstream)


@pytest.fixture
def config() -> Config:
    objectives = {"chat": {"priority": 1, "models": [MODEL]}}
    return config_of(
        route={"seed": 1}, serve={"chunks_per_s": 1e6}, hold={"objectives": objectives}
    )


@pytest.fixture
def services(services: Services, clock: ManualClock, registry: CollectorRegistry) -> Services:
    return with_fleet(replace(services, metrics=RouterMetrics(registry)), clock)


unread = pytest.mark.parametrize(
    "config", [config_of(route={"seed": 1}, serve={"chunks_per_s": 0.0})]
)


def value(registry: CollectorRegistry, name: str, by: Mapping[str, str] = BY) -> float | None:
    return registry.get_sample_value(f"extproc_{name}", dict(by))


async def test_streamed_response_fills_time_and_prediction_metrics(
    stream: Stream, services: Services, clock: ManualClock, registry: CollectorRegistry
) -> None:
    first = await stream.begin()
    await play(stream, services, clock, [0.5, TOKEN, 2.0])
    await stream.response_body(LAST)
    await stream.end()
    (record,) = services.log.of_request("one")
    decision = record.decision
    tpot = decision.forecast().decode_time_per_token  # nothing was learned yet that stretches it
    for name, actual, predicted in (
        ("ttft", 0.5, decision.predicted_ttft),
        ("tpot", 0.5, tpot),
        ("completion", 2.5, decision.predicted_completion),
    ):
        assert value(registry, f"{name}_seconds_count") == 1
        assert value(registry, f"{name}_seconds_sum") == pytest.approx(actual)
        ratio = value(registry, f"{name}_predicted_ratio_sum")
        assert ratio == pytest.approx(predicted / actual)
    assert value(registry, "prediction_error_ratio_count", {}) == 1
    hits = {"replica": first}
    assert value(registry, "prefix_cache_reported_tokens_total", hits) == 32
    assert value(registry, "prefix_cache_expected_tokens_total", hits) == 0
    (result,) = services.results
    assert (result.replica, result.actual_s, result.ttft_s) == (first, 2.5, 0.5)
    assert result.cached == 32
    assert result.predicted_s == decision.predicted_completion


async def test_infinite_prediction_leaves_sums_of_metrics_finite(
    stream: Stream, services: Services, clock: ManualClock, registry: CollectorRegistry
) -> None:
    """The owner of a stored response may be too small for the prompt by the router's estimate."""
    put_replicas(services, 2, max_model_len=8)
    services.fleet.responses.record("resp_1", replica(2))
    body = {"model": MODEL, "input": "word " * 100, "previous_response_id": "resp_1"}
    owner, _ = destination(await stream.ask(body, "/v1/responses"))
    clock.advance(1.0)
    await stream.answer({}, upstream=owner)
    (result,) = services.results
    assert (result.replica, result.predicted_s) == (replica(2), inf)
    assert value(registry, "completion_seconds_sum") == 1.0
    assert value(registry, "completion_predicted_ratio_sum") == 0.0
    assert value(registry, "prediction_error_ratio_sum", {}) == 0.0


async def test_retry_on_other_replica_measures_no_prediction(
    stream: Stream, services: Services, clock: ManualClock, registry: CollectorRegistry
) -> None:
    first, second = destination(await stream.ask())
    clock.advance(1.5)
    await stream.answer({"usage": USAGE}, upstream=second)
    assert value(registry, "completion_seconds_sum") == 1.5
    assert value(registry, "completion_predicted_ratio_count") == 0.0
    assert value(registry, "prediction_error_ratio_count", {}) == 0
    assert value(registry, "ttft_seconds_count") is None
    assert value(registry, "failures_total", {"replica": first}) == 1
    assert value(registry, "failures_total", {"replica": second}) is None
    assert [*services.results] == []


@pytest.mark.parametrize(("address", "refutes"), [("", True), ("10.0.0.9:8000", False)])
async def test_only_an_answer_of_the_replica_refutes_its_gauges(
    stream: Stream, services: Services, clock: ManualClock, address: str, refutes: bool
) -> None:
    poll: dict[str, float] = {"prompt_tokens": 1000.0, "generated_tokens": 100.0}
    put_replicas(services, **poll)
    clock.advance(3.0)
    first, _ = destination(await stream.ask(STREAMED))
    await stream.answer(TOKEN, LAST, upstream=address or first, content_type=EVENTS, attempts=1)
    await play(stream, services, clock, [3.0, poll] * 2)
    assert services.fleet.eligibility.conditions[first].frozen == refutes


async def test_late_first_token_teaches_load_time_of_adapters(
    envoy: EnvoySide, services: Services, clock: ManualClock
) -> None:
    services.fleet.remove(replica(2))
    put_replicas(services, 1, models=("law", "tax"), adapters=("law", "tax"), max_loras=1)
    loads = []
    for adapter in ("law", "tax"):
        async with envoy.stream() as stream:
            await stream.begin(STREAMED | {"model": adapter})
            loads.append(services.log.last(1)[0].decision.forecast().adapter_load)
            await play(stream, services, clock, [5.0, TOKEN])
            await stream.response_body(LAST)
            await stream.end()
    assert 0.0 < loads[0] < 1.0 < loads[1]


async def test_unanswered_request_counts_as_demand(envoy: EnvoySide, services: Services) -> None:
    assert services.demand.replicas(services.queue) == 0.0
    await envoy.ask()
    assert services.demand.replicas(services.queue) > 0.0


@pytest.mark.parametrize(
    ("status", "counts"), [(200, True), (400, False), (429, True), (500, True)]
)
async def test_request_that_a_replica_refuses_is_no_demand(
    stream: Stream, services: Services, clock: ManualClock, status: int, counts: bool
) -> None:
    await stream.ask(CHAT | {"n": 10_000})
    clock.advance(0.1)
    await stream.answer(status=status)
    needed = services.demand.replicas(services.queue)
    assert needed > 100.0 if counts else needed < 0.5


async def test_ejection_and_recovery_are_logged(
    envoy: EnvoySide, services: Services, clock: ManualClock, logged: Logged
) -> None:
    await fail_until_ejected(envoy)
    (ejected,) = logged.lines()
    (name,) = (address for address in (replica(1), replica(2)) if address in str(ejected["msg"]))
    title = services.fleet.members.title(name)
    assert title == f"r{1 if name == replica(1) else 2} ({name})"
    assert ejected["msg"] == f"replica {title} ejected for 1 s: consecutive failures"
    assert (ejected["levelname"], ejected["last"]) == ("WARNING", "status 500")
    clock.advance(1.1)
    services.fleet.remove(replica(2) if name == replica(1) else replica(1))
    await envoy.converse()
    (recovered,) = logged.lines()[1:]
    assert recovered["msg"] == f"replica {title} recovered: a request succeeded"
    assert recovered["levelname"] == "INFO"


@pytest.mark.parametrize(("status", "ejected"), [(200, False), (400, True), (401, True)])
async def test_only_a_success_ends_an_ejection(
    envoy: EnvoySide, services: Services, clock: ManualClock, status: int, ejected: bool
) -> None:
    await fail_until_ejected(envoy)
    clock.advance(1.1)
    for _ in range(5):
        await envoy.converse(status=status)
    assert bool(services.fleet.view("llama").excluded) == ejected


@pytest.mark.parametrize(
    ("served_by", "status", "flags", "last"),
    [
        ("", 503, CONNECTION_FAILED, "no connection"),
        (replica(2), 200, 0, "no connection, a reset or an error status: Envoy retried elsewhere"),
    ],
)
async def test_ejection_names_the_last_failure(
    envoy: EnvoySide, logged: Logged, served_by: str, status: int, flags: int, last: str
) -> None:
    for _ in range(8):
        async with envoy.stream() as stream:
            chosen, *_ = destination(await stream.ask())
            await stream.answer(status=status, upstream=served_by or chosen, flags=flags)
    assert {line["last"] for line in logged.lines() if "ejected" in str(line["msg"])} == {last}


async def test_response_from_a_tunnel_counts_for_the_chosen_replica(
    envoy: EnvoySide, stream: Stream, services: Services
) -> None:
    first = await stream.begin(CHAT, upstream=TUNNEL)
    assert services.fleet.in_flight_on(first) == 1
    assert (await ended(stream, services)).served_by == first
    assert not services.fleet.eligibility.has_suspects
    await fail_until_ejected(envoy, TUNNEL)
    (excluded,) = services.fleet.view("llama").excluded
    assert excluded.why == "ejected: 3 or more consecutive requests failed"


@unread
@pytest.mark.parametrize(
    ("status", "retried", "polled", "learned"),
    [
        (200, False, True, True),
        (200, False, False, False),
        (200, True, True, False),
        (500, False, True, False),
        (None, False, True, False),
    ],
)
async def test_steps_counted_during_unread_stream_teach_its_length(
    envoy: EnvoySide, services: Services, clock: ManualClock,
    status: int | None, retried: bool, polled: bool, learned: bool,
) -> None:  # fmt: skip
    before, steps = expected_length(services), 0.0
    for _ in range(5):
        async with envoy.stream() as stream:
            first, second = destination(await stream.ask(STREAMED))
            if status is not None:
                server = second if retried else first
                await stream.response_headers(status, upstream=server, content_type=EVENTS)
            for _ in range(60):
                clock.advance(1.0)
                steps += 30.0
                if polled:
                    put_replicas(services, running=2, steps=steps)
            await stream.end()
    after = services.fleet.lengths.expected(0, 10_000.0)
    assert after > 2 * before if learned else after == before


def expected_length(services: Services) -> float:
    """Expected output tokens; occupies each replica, so that no later request runs alone."""
    for number in (1, 2):
        services.fleet.dispatch(replica(number), chat(100, 10_000))
    return services.fleet.lengths.expected(0, 10_000.0)


@unread
async def test_response_that_the_router_ends_teaches_no_length(
    services: Services, clock: ManualClock
) -> None:
    before, router = expected_length(services), Local(services)
    async with EnvoySide(router).stream() as stream:
        on = await stream.begin()
        for second in range(1, 61):
            clock.advance(1.0)
            put_replicas(services, running=2, steps=second * 30.0)
        put_replicas(services, 1 + (on == replica(2)), healthy=False, unanswered_s=20.5)
        router.server.end_hung()
        assert (await stream.read()).immediate_response
        await stream.end()
    assert services.fleet.lengths.expected(0, 10_000.0) == before


ERROR = b'data: {"error": {"code": 503}}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize(
    ("tokens", "last"),
    [(1, b""), (0, ERROR), (3, ERROR)],
    ids=["cut off", "error instead of tokens", "error after tokens"],
)
async def test_incomplete_stream_teaches_no_length(
    stream: Stream, services: Services, clock: ManualClock, tokens: int, last: bytes
) -> None:
    before = expected_length(services)
    await stream.begin()
    await play(stream, services, clock, [*[TOKEN] * tokens, 1.0, {"running": 2, "steps": 30.0}])
    if last:
        await stream.response_body(last)
    outcome = await ended(stream, services)
    assert services.fleet.lengths.expected(0, 10_000.0) == before
    assert (outcome.status, outcome.completion_s) == (200, None)
    assert (outcome.ttft_s is None) is (tokens == 0)


async def test_trailers_end_a_response(stream: Stream, services: Services) -> None:
    await stream.begin()
    await stream.response_body(LAST, end_of_stream=False)
    await stream.send(RESPONSE_TRAILERS)
    outcome = await ended(stream, services)
    assert (outcome.completion_s, outcome.output_tokens) == (0.0, 5)


OUTPUTS: dict[str, tuple[dict[str, float], list[Happening], int]] = {
    # With speculative decoding, vLLM sends the tokens of a step together.
    "tokens of a step": ({"tokens_per_step": 3.0}, [TOKEN] * 4, 1 + 4 * 3),
    # vLLM does so if its server is busy, or with ``--stream-interval``.
    "tokens of several steps": (
        {"steps": 0.0}, [TOKEN, 1.0, {"running": 1, "steps": 20.0}], 1 + 20,
    ),
    # The prompt takes longer than predicted, and the replica's other requests go on.
    "steps before the first token": (
        {"steps": 0.0},
        [
            *(1.0, {"running": 2, "steps": 20.0}, 1.0, {"running": 2, "steps": 40.0}),
            *(1.0, {"running": 2, "steps": 60.0}, TOKEN),
            *(0.1, {"running": 2, "steps": 62.0}, TOKEN),
        ],
        3,
    ),
    "steps that are only predicted": (
        {"steps": 0.0}, [TOKEN, 0.1, {"running": 1, "steps": 1.0}, 0.2], 2,
    ),
}  # fmt: skip
"""Figures of a replica, what happens before the last token, and the counted tokens."""


@pytest.mark.parametrize(("figures", "happenings", "tokens"), OUTPUTS.values(), ids=OUTPUTS)
async def test_tokens_of_stream_without_usage_are_counted_by_events_and_steps(
    stream: Stream, services: Services, clock: ManualClock,
    figures: dict[str, float], happenings: list[Happening], tokens: int,
) -> None:  # fmt: skip
    put_replicas(services, **figures)
    await stream.begin()
    await play(stream, services, clock, happenings)
    await stream.response_body(TOKEN)
    assert (await ended(stream, services)).output_tokens == tokens


async def test_stream_without_usage_teaches_completion_error(
    envoy: EnvoySide, services: Services, clock: ManualClock
) -> None:
    for _ in range(5):
        async with envoy.stream() as stream:
            await stream.begin()
            await play(stream, services, clock, [500.0, {}])
            await stream.response_body(b"data: [DONE]\n\n")
            await stream.end()
    assert services.router.error_quantiles.completion.ratio > 1.1


@unread
async def test_unread_stream_has_no_completion_time(
    stream: Stream, services: Services, registry: CollectorRegistry
) -> None:
    """Envoy closes its stream alike when a response ends and when a client hangs up."""
    await stream.ask(STREAMED, headers=NAMED)
    reply = await stream.response_headers(content_type=EVENTS)
    assert reply.mode_override is None
    outcome = await ended(stream, services)
    assert (outcome.status, outcome.completion_s) == (200, None)
    assert value(registry, "prediction_error_ratio_count", {}) == 0


async def test_sequences_report_no_cached_tokens(stream: Stream, services: Services) -> None:
    first, _ = destination(await stream.ask(CHAT | {"n": 2}))
    await stream.answer({"usage": USAGE}, upstream=first)
    assert [result.cached for result in services.results] == [None]


async def test_usage_teaches_bytes_per_token_and_output_length(
    envoy: EnvoySide, services: Services
) -> None:
    tokens, lengths = services.tokens, services.fleet.lengths
    bytes_per_token, length = tokens.bytes_per_token("llama"), lengths.expected(0, 10_000.0)
    for _ in range(20):
        await envoy.converse(CHAT, {"usage": {"prompt_tokens": 300, "completion_tokens": 5}})
    assert tokens.bytes_per_token("llama") < bytes_per_token / 2
    assert lengths.expected(0, 10_000.0) < length / 2


async def test_usage_teaches_image_tokens(envoy: EnvoySide, services: Services) -> None:
    image = {"type": "image_url", "image_url": {"url": "https://x/y.png"}}
    body = {"model": "llama", "messages": [{"role": "user", "content": [image, image]}]}
    for _ in range(50):
        await envoy.converse(body, {"usage": {"prompt_tokens": 3_009, "completion_tokens": 1}})
    assert services.tokens.image_tokens("llama") == pytest.approx(1_500, rel=0.05)
    assert services.tokens.image_tokens("other") == services.config.request.image_tokens
    assert services.tokens.bytes_per_token("llama") == services.config.request.bytes_per_token


@pytest.mark.parametrize(
    ("status", "flags", "counts"),
    [
        (500, RETRIES_EXHAUSTED, False),
        (503, RETRIES_EXHAUSTED | CONNECTION_TERMINATED, False),
        (503, RETRIES_EXHAUSTED | CONNECTION_FAILED, True),
    ],
)
async def test_request_that_fails_on_two_replicas_counts_only_if_the_second_refused_it(
    envoy: EnvoySide, services: Services, clock: ManualClock, status: int, flags: int, counts: bool
) -> None:
    for _ in range(3):
        clock.advance(1.1)
        async with envoy.stream() as stream:
            _first, second = destination(await stream.ask())
            await stream.answer(status=status, upstream=second, flags=flags)
    assert bool(services.fleet.view("llama").excluded) == counts


async def test_second_retry_that_a_third_replica_serves_is_a_retry(
    stream: Stream, services: Services, registry: CollectorRegistry
) -> None:
    put_replicas(services, 3)
    tried = destination(await stream.ask())
    (third,) = {*map(replica, (1, 2, 3))} - {*tried}
    await stream.answer(upstream=third, attempts=3, held=",".join(tried))
    assert samples(services.metrics.not_followed) == {("retry",): 1.0}
    assert value(registry, "failures_total", {"replica": tried[0]}) == 1


@pytest.mark.parametrize("config", [config_of(state="memory", serve={"decisions_kept": 0})])
async def test_page_warns_of_a_decision_not_followed_whose_record_is_gone(
    stream: Stream, services: Services
) -> None:
    put_replicas(services, 3)
    tried = destination(await stream.ask())
    (third,) = {*map(replica, (1, 2, 3))} - {*tried}
    await stream.answer(upstream=third, attempts=1)
    (warning,) = pool_warnings(services, services.fleet.overview(), ())
    assert warning.startswith("Envoy did not follow decisions in the last minute: Envoy's fallback")


@pytest.mark.parametrize(("status", "failed"), [(200, True), (500, True), (401, False)])
async def test_retry_is_no_failure_if_the_second_replica_answers_4xx(
    stream: Stream, services: Services, registry: CollectorRegistry, status: int, failed: bool
) -> None:
    first, second = destination(await stream.ask())
    await stream.answer(status=status, upstream=second)
    assert bool(value(registry, "failures_total", {"replica": first})) == failed
    assert services.fleet.eligibility.has_suspects == (status == 200)


async def test_replicas_with_another_key_are_no_second_choice_of_each_other(
    envoy: EnvoySide, services: Services, registry: CollectorRegistry
) -> None:
    put_replicas(services, 3, 4)
    wrong, statuses = {replica(1), replica(2)}, []
    for _ in range(20):
        async with envoy.stream() as stream:
            tried = destination(await stream.ask())
            served = next((each for each in tried if each not in wrong), tried[-1])
            statuses.append(401 if served in wrong else 200)
            await stream.answer(status=statuses[-1], upstream=served)
    assert statuses.count(401) <= len(wrong)
    assert all(value(registry, "failures_total", {"replica": each}) for each in wrong)


async def test_request_in_flight_keeps_no_candidates() -> None:
    """A thousand candidates would take 0.3 MB for each request in flight."""
    services = router_of(config_of(serve={"decisions_kept": 0}), 1)
    before = alive(Prediction)
    async with EnvoySide(Local(services)).stream() as stream:
        assert destination(await stream.ask())
        assert services.fleet.in_flight == 1
        assert alive(Prediction) == before


async def test_session_follows_serving_replica_without_its_id() -> None:
    services = router_of(config_of(route={"session_header": "X-Session", "seed": 1}))
    envoy = EnvoySide(Local(services))
    home = ""
    for _ in range(6):
        async with envoy.stream() as stream:
            first, second = destination(await stream.ask(CHAT, headers={"x-session": "secret"}))
            assert first == (home or first)
            home = second  # Envoy retried there
            await stream.answer({"usage": USAGE}, upstream=second)
    announced = await services.fleet.sessions.take_announcements(100)
    assert announced[-1][1] == home
    assert "secret" not in str(announced)
