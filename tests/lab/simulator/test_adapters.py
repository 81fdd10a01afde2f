"""LoRA adapters of a simulated replica behave as vLLM 0.32's do."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import ClientSession

from extproc.lab.simulator.engine import Engine
from extproc.lab.simulator.features import LoadedAdapters
from extproc.lab.simulator.replica import Replica
from extproc.lab.simulator.steps import Sequence
from tests.lab.simulator.conftest import SETTINGS, get, reply
from tests.lab.simulator.test_engine import engine_with, run, single_request_time
from tests.lab.simulator.test_metrics import samples, values

LOAD_S = 0.5


def engine(slots: int, *sequences: Sequence) -> Engine:
    return engine_with(*sequences, adapters=LoadedAdapters(slots, LOAD_S))


def sequence(number: int, adapter: str, output: int = 10) -> Sequence:
    return Sequence(number, 100, output, adapter=adapter)


def test_sequence_without_an_adapter_slot_waits_and_is_passed() -> None:
    a, b, later_b = sequence(1, "a", 50), sequence(2, "b"), sequence(3, "b")
    base, later_a = sequence(4, ""), sequence(5, "a", 80)
    run(engine(1, a, b, later_b, base, later_a))
    assert a.admitted == base.admitted == later_a.admitted == 0.0
    assert b.admitted == later_b.admitted == later_a.finished
    assert base.finished is not None
    assert later_a.finished is not None
    assert base.finished < later_a.finished


def test_batch_has_at_most_as_many_adapters_as_slots() -> None:
    sequences = [sequence(number, name) for number, name in enumerate("abc")]
    run(engine(2, *sequences))
    assert [each.admitted for each in sequences[:2]] == [0.0, 0.0]
    assert sequences[2].admitted == sequences[0].finished


def test_least_recently_used_adapter_is_unloaded() -> None:
    two, now, seconds = engine(2), 0.0, []
    for number, name in enumerate("aabbacabb"):
        each = sequence(number, name)
        two.add(each, now)
        run(two)
        assert each.finished is not None
        seconds.append(each.finished - now - single_request_time(100, 10, 256))
        now = each.finished
    loads = [LOAD_S, 0, LOAD_S, 0, 0, LOAD_S, 0, LOAD_S, 0]
    assert seconds == pytest.approx(loads, abs=1e-9)


@pytest.fixture
def replica() -> Replica:
    return Replica(replace(SETTINGS, adapters=("a", "b"), adapter_load_s=1.0))


async def complete(client: ClientSession, model: str, **fields: object) -> dict[str, Any]:
    body = {"model": model, "prompt": "word " * 100, "max_tokens": 2, **fields}
    return await reply(client, "/v1/completions", body)


async def adapters_on_the_page(client: ClientSession) -> list[tuple[str, str, str]]:
    return [
        (labels["max_lora"], labels["running_lora_adapters"], labels["waiting_lora_adapters"])
        for name, labels, *_ in await samples(client)
        if name == "vllm:lora_requests_info"
    ]


async def test_model_list_names_the_parent_of_each_adapter(client: ClientSession) -> None:
    listed = (await get(client, "/v1/models"))["data"]
    parents = {model["id"]: model["parent"] for model in listed}
    assert [*parents.items()] == [("tiny", None), ("a", "tiny"), ("b", "tiny")]
    assert (await complete(client, "a"))["model"] == "a"


async def test_adapters_do_not_share_cached_prompts(client: ClientSession) -> None:
    cached = [
        (await complete(client, model))["usage"]["prompt_tokens_details"]["cached_tokens"]
        for model in ("tiny", "a", "b", "a", "tiny")
    ]
    assert cached == [0, 0, 0, 112, 112]


async def test_metrics_name_the_running_adapters(client: ClientSession) -> None:
    assert await adapters_on_the_page(client) == []  # vLLM sets the gauge in its first step
    await complete(client, "tiny")
    assert await adapters_on_the_page(client) == [("1", "", "")]
    long = asyncio.create_task(complete(client, "a", max_tokens=2000, ignore_eos=True))
    waits = asyncio.create_task(complete(client, "b"))
    while not (await values(client))["num_requests_waiting_by_reason.deferred"]:
        pass
    assert await adapters_on_the_page(client) == [("1", "a", "a")]
    await asyncio.gather(long, waits)
    assert await adapters_on_the_page(client) == [("1", "", "")]
