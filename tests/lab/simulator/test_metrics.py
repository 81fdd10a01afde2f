"""Metrics page of a simulated replica: names, labels and buckets of vLLM, and the counts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import ClientSession
from prometheus_client.samples import Sample

from extproc.ground.clock import monotonic, wall
from extproc.lab.harness.pages import samples_of
from extproc.lab.simulator.replica import Replica
from tests.lab.simulator.conftest import SETTINGS

SERIES = Path(__file__).parents[2] / "data" / "vllm_0_32_series.txt"
KEYS = ("finished_reason", "le", "reason", "sleep_state", "source")

MUST_HAVE = (
    *("num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason"),
    *("kv_cache_usage_perc", "prefix_cache_queries", "prefix_cache_hits", "num_preemptions"),
    *("prompt_tokens", "prompt_tokens_by_source", "prompt_tokens_cached", "generation_tokens"),
    *("request_success", "iteration_tokens_total", "request_prompt_tokens"),
    *("request_generation_tokens", "request_params_max_tokens", "time_to_first_token_seconds"),
    *("inter_token_latency_seconds", "e2e_request_latency_seconds", "cache_config_info"),
    *("engine_sleep_state", "admission_rejections"),
)


async def samples(client: ClientSession) -> list[Sample]:
    async with client.get("/metrics") as response:
        return samples_of(await response.text())


async def complete(
    client: ClientSession, prompt: str | list[str], max_tokens: int, **fields: object
) -> str:
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **fields}
    async with client.post("/v1/completions", json=body) as response:
        assert response.status == 200
        return await response.text()


async def values(client: ClientSession) -> dict[str, float]:
    """Return values by name and labels, such as ``request_success_total.length``."""

    def key(sample: Sample) -> str:
        labels = [sample.labels[label] for label in KEYS if label in sample.labels]
        return ".".join([sample.name.removeprefix("vllm:"), *labels])

    return {key(sample): sample.value for sample in await samples(client)}


def line(sample: Sample) -> str:
    if sample.name == "vllm:cache_config_info":
        return sample.name
    labels = [f"{key}={sample.labels[key]}" for key in KEYS if key in sample.labels]
    return " ".join([sample.name, ",".join(sorted(sample.labels)), *labels]).strip()


async def test_names_labels_and_buckets_are_those_of_vllm(client: ClientSession) -> None:
    known = set(SERIES.read_text().splitlines())
    page = await samples(client)
    assert [line(sample) for sample in page if line(sample) not in known] == []
    names = {sample.name for sample in page}
    for name in MUST_HAVE:
        assert any(found.startswith(f"vllm:{name}") for found in names), name


async def test_cache_size_is_given_in_blocks(client: ClientSession) -> None:
    page = await samples(client)
    labels = next(sample.labels for sample in page if sample.name == "vllm:cache_config_info")
    assert (labels["block_size"], labels["num_gpu_blocks"]) == ("16", "25000")


async def test_page_has_the_start_time_of_the_process(client: ClientSession) -> None:
    started_at = (await values(client))["process_start_time_seconds"]
    assert wall() - 60.0 < started_at <= wall()


async def test_finished_requests_are_counted(client: ClientSession) -> None:
    for _ in range(2):
        await complete(client, "word " * 100, 20)
    counted = {
        "prompt_tokens_total": 250,
        "prompt_tokens_cached_total": 112,
        "prefix_cache_hits_total": 112,
        "prompt_tokens_by_source_total.local_compute": 138,
        "prefix_cache_queries_total": 250,
        "generation_tokens_total": 40,
        "request_success_total.length": 2,
        "iteration_tokens_total_count": 40,
        "iteration_tokens_total_sum": 178,
        "request_params_max_tokens_sum": 40,
        "request_generation_tokens_bucket.20.0": 2,
        "e2e_request_latency_seconds_count": 2,
        "inter_token_latency_seconds_count": 38,
        "num_requests_running": 0,
        "kv_cache_usage_perc": 0,
    }
    assert counted.items() <= (await values(client)).items()


async def test_first_token_counts_at_once_and_an_aborted_request_never(
    client: ClientSession,
) -> None:
    body = {"prompt": "word", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    async with client.post("/v1/completions", json=body) as response:
        await response.content.readany()
        counts = await values(client)
        assert counts["time_to_first_token_seconds_count"] == counts["prompt_tokens_total"] == 1
        assert counts["num_requests_running"] == 1
    while counts["num_requests_running"]:
        counts = await values(client)
    assert counts["request_generation_tokens_count"] == counts["request_success_total.abort"] == 0


async def test_each_prompt_counts_as_a_request_with_its_choices(client: ClientSession) -> None:
    await complete(client, ["one", "two", "three"], 5, n=2)
    counts = await values(client)
    assert counts["time_to_first_token_seconds_count"] == 6
    assert counts["request_params_n_count"] == 3
    assert counts["request_params_n_sum"] == 6


@pytest.mark.parametrize(
    "replica", [replace(SETTINGS, draft_tokens=3, acceptance=1.0)], indirect=True
)
async def test_accepted_drafts_are_counted_and_sent_with_their_token(client: ClientSession) -> None:
    whole = json.loads(await complete(client, "word", 9))["choices"][0]["text"]
    lines = (await complete(client, "word", 9, stream=True)).split("\n\n")
    counts = await values(client)
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if "text" in line]
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert [len(text.split()) for text in texts] == [1, 4, 4]
    assert "".join(texts) == whole
    assert counts["spec_decode_num_drafts_total"] == 4
    assert counts["spec_decode_num_draft_tokens_total"] == 12
    assert counts["spec_decode_num_accepted_tokens_total"] == 12
    assert counts["iteration_tokens_total_count"] == 6


@pytest.mark.parametrize(
    "replica", [replace(SETTINGS, old_counters=True, cold_steps=1000)], indirect=True
)
async def test_old_counters_and_cold_steps_are_those_of_the_settings(
    client: ClientSession, replica: Replica
) -> None:
    await complete(client, "word", 50)
    counts = await values(client)
    assert "prefix_cache_hits_total" in counts
    assert not any(
        name.startswith(("prompt_tokens_cached", "prompt_tokens_by_")) for name in counts
    )
    warm_s = 50 * replica.engine.step_model.step_time(prefill=0, batch=1, kv=1) / SETTINGS.speed
    assert counts["e2e_request_latency_seconds_sum"] > 1.9 * warm_s


async def test_latencies_are_those_of_the_client(client: ClientSession) -> None:
    began = monotonic()
    await complete(client, "word", 200)
    elapsed = monotonic() - began
    counts = await values(client)
    # 200 steps of at least 6.5 ms, at 20 times the speed.
    whole, between = (
        counts[f"{name}_latency_seconds_sum"] for name in ("e2e_request", "inter_token")
    )
    assert 0.065 <= whole <= elapsed
    assert between <= whole
    assert counts["inter_token_latency_seconds_count"] == 199
