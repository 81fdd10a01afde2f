"""Figures are read from pages of several vLLM versions; any other page is refused."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import msgpack
from msgspec.structs import replace

from extproc.poll.metrics_text import PageFigures, ScrapeError, read_metrics
from extproc.replica_state import ReplicaState
from tests.examples import examples

DATA = Path(__file__).parent.parent / "data" / "vllm"


def sample(name: str) -> bytes:
    return (DATA / f"metrics-{name}.txt").read_bytes()


PAGES = """
page        model running waiting kv_usage             kv_tokens block steps prompt cached generated
idle        tiny  0       0       0                    524288    128   0     0      0      0
busy        tiny  4       16      0.003907203907203893 524288    128   101   1600   0      401
kv-pressure tiny  4       1       0.6031746031746033   8192      128   303   9600   0      1586
two-engines tiny  0       0       0                    16384     128   363.5 3604   0      727
ngram       m63   0       0       0                    25600     128   93    720    0      480
embeddings  tiny  0       0       0                    8192      128   19    30224  0      0
encoder     bert  0       0       0                    0         128   2     1206   0      0
0.31        tiny  8       4       0.6349206349206349   8192      128   118   13500  2048   971
0.29        tiny  8       6       0.33333333333333337   8192      128   134   4400   1920   1054
0.15        tiny  8       6       0.38095238095238093   8192      128   222   4400   1920   1757
0.10        llama 2       0       0.19                 432000    16    3     3200   64     10
"""
"""With two engines the label num_gpu_blocks of each is 128, though each has 64 blocks. The encoder
has no KV cache, though its label is 1."""
NUMBERS = (
    *("running", "waiting", "kv_usage", "kv_tokens", "block_size", "steps", "prompt_tokens"),
    *("cached_tokens", "generated_tokens", "first_tokens", "accepted_tokens", "preemptions"),
    *("finished", "prefill_s", "decode_s"),
)
# First tokens, accepted, preempted, finished; seconds of prefill and of decoding.
OTHERS: dict[str, tuple[list[float], dict[str, Any]]] = {
    "idle": ([0, 0, 0, 0], {}),
    "busy": ([4, 0, 0, 0], {"max_loras": 1}),
    "kv-pressure": ([8, 0, 1, 5, 0.8538, 7.8946], {}),
    "two-engines": ([16, 0, 0, 16, 0.3099, 4.6546], {"engines": 2}),
    "ngram": ([6, 289, 0, 6, 2.0713, 2.8378], {}),
    "embeddings": ([26, 0, 0, 26, 6.6665], {}),
    "encoder": ([12, 0, 0, 12, 0.3817], {"prefix_caching": False}),
    "0.31": ([17, 402, 0, 9, 96.5108, 2.9495], {}),
    "0.29": ([16, 0, 0, 8, 61.2663, 9.9894], {}),
    "0.15": ([16, 0, 0, 8, 76.0375, 5.6158], {"cached_early": True}),
    "0.10": ([3, 3, 1, 1, 100.0, 0.1], {"cached_early": True}),
}


@pytest.mark.parametrize("line", PAGES.strip().splitlines()[1:])
def test_figures_of_vllm_page(line: str) -> None:
    name, model, *figures = line.split()
    counters, others = OTHERS[name]
    numbers: list[Any] = [*map(float, figures), *counters]
    numbered = dict(zip(NUMBERS, numbers, strict=False))
    expected = PageFigures(models=(model,), **numbered, **others)
    read = read_metrics(sample(name))
    read = replace(read, prefill_s=round(read.prefill_s, 4), decode_s=round(read.decode_s, 4))
    assert replace(read, started_at=0.0) == expected


@pytest.mark.parametrize("state", ["weights_offloaded", "discard_all", "paused"])
def test_server_is_asleep_if_any_engine_is_not_awake(state: str) -> None:
    awake = b'engine="1",model_name="tiny",sleep_state="awake"} '
    other = f'engine="1",model_name="tiny",sleep_state="{state}"}} '.encode()
    page = sample("two-engines")
    assert awake + b"1.0" in page
    page = page.replace(awake + b"1.0", awake + b"0.0").replace(other + b"0.0", other + b"1.0")
    assert read_metrics(page).asleep


def test_process_start_time_is_read_unless_several_processes_serve() -> None:
    assert read_metrics(sample("busy")).started_at == 1.79522570554e09
    assert read_metrics(sample("two-engines")).started_at == 0.0


def test_engine_counters_are_summed_and_kv_usage_is_averaged() -> None:
    figures = read_metrics(
        b'vllm:num_requests_running{engine="0",model_name="m"} 3.0\n'
        b'vllm:num_requests_running{engine="1",model_name="m"} 5.0\n'
        b'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25\n'
        b'vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75\n'
        b'vllm:generation_tokens_total{engine="0",model_name="m"} 1e+06\n'
        b'vllm:generation_tokens_total{engine="1",model_name="m"} 5.0\n'
    )
    assert figures.running == 8
    assert figures.kv_usage == 0.5
    assert figures.generated_tokens == 1_000_005


def test_series_names_of_older_vllm_versions_are_read() -> None:
    figures = read_metrics(
        b'vllm:num_requests_running{model_name="m"} 1.0\n'
        b'vllm:num_requests_waiting{model_name="m"} 2.0\n'
        b'vllm:gpu_cache_usage_perc{model_name="m"} 0.5\n'
        b'vllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1.0\n'
        b'vllm:prompt_tokens_total{model_name="m"} 10.0\n'
        b'vllm:gpu_prefix_cache_hits_total{model_name="m"} 4.0\n'
        b'vllm:generation_tokens_total{model_name="m"} 20.0\n'
        b'vllm:time_to_first_token_seconds_count{model_name="m"} 6.0\n'
        b'vllm:spec_decode_num_accepted_tokens_total{model_name="m"} 5.0\n'
        b'vllm:num_preemptions_total{model_name="m"} 3.0\n'
    )
    numbers: dict[str, Any] = dict(
        zip(NUMBERS, (1, 2, 0.5, 16_000, 16, 0, 10, 4, 20, 6, 5, 3), strict=False)
    )
    assert figures == PageFigures(models=("m",), **numbers, cached_early=True)


def test_labels_with_escapes_timestamps_and_similar_names_are_read() -> None:
    figures = read_metrics(
        b'vllm:num_requests_running{model_name="a \\"b}\\" \\\\ c",e="0"} 7.0 1700000000000\r\n'
        b'vllm:num_requests_waiting_by_reason{model_name="x"} 9.0\n'
        b'vllm:cache_config_info{_block_size_resolved="True",effective_attention_block_size="8",'
        b'num_gpu_blocks_override="5",block_size="None",num_gpu_blocks="None"} 1.0'
    )
    assert figures.models == ('a "b}" \\ c',)
    assert (figures.running, figures.waiting, figures.kv_tokens) == (7, 0, 0)


@pytest.mark.parametrize("size", [b"0", b"None", b""])
def test_invalid_block_size_defaults_to_16_tokens(size: bytes) -> None:
    config = b'vllm:cache_config_info{block_size="' + size + b'"} 1.0\n'
    page = b'vllm:num_requests_running{model_name="m"} 1.0\n' + config
    assert read_metrics(page).block_size == 16


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"<html>It works!</html>",
        b"# TYPE vllm:num_requests_running gauge\n",
        b"sglang:num_running_reqs 3.0\n",
        b"\xff" * 1000,
    ],
)
def test_page_of_another_server_is_refused(page: bytes) -> None:
    with pytest.raises(ScrapeError, match="is this vLLM"):
        read_metrics(page)


@pytest.mark.parametrize("value", [b"", b"many", b"NaN", b"+Inf", b"-1.0", b"1e300", b"\xff"])
def test_value_that_no_vllm_reports_is_refused(value: bytes) -> None:
    with pytest.raises(ScrapeError, match="num_requests_running"):
        read_metrics(b'vllm:num_requests_running{model_name="m"} ' + value + b"\n")


ADAPTERS = b"""
# HELP vllm:lora_requests_info Running stats on lora requests.
# TYPE vllm:lora_requests_info gauge
vllm:lora_requests_info{max_lora="2",running_lora_adapters="",waiting_lora_adapters=""} 1.7953251069705088e+09
vllm:lora_requests_info{max_lora="2",running_lora_adapters="a",waiting_lora_adapters="a"} 1.7953251059578154e+09
vllm:lora_requests_info{max_lora="2",running_lora_adapters="a,b",waiting_lora_adapters="a,b"} 1.795325106372747e+09
vllm:lora_requests_info{max_lora="2",running_lora_adapters="c",waiting_lora_adapters="c"} 1.7953251069359317e+09
"""  # noqa: E501 - a page of vLLM 0.32
"""vLLM keeps the line of every set; the value is the time at which the set ran last."""


@pytest.mark.parametrize(
    ("line", "in_use"),
    [
        (b"", ()),
        (b'running_lora_adapters="b,a",waiting_lora_adapters="b,a"} 1.795325107e+09', ("b", "a")),
        # Older versions list running and waiting adapters apart.
        (b'running_lora_adapters="b",waiting_lora_adapters="a"} 1.795325107e+09', ("b", "a")),
        (rb'running_lora_adapters="x\"y",waiting_lora_adapters=""} 1.795325107e+09', ('x"y',)),
    ],
)
def test_adapters_in_use_are_read_from_the_latest_line(
    line: bytes, in_use: tuple[str, ...]
) -> None:
    added = b'vllm:lora_requests_info{max_lora="2",' + line + b"\n" if line else b""
    figures = read_metrics(sample("idle") + ADAPTERS + added)
    assert (figures.max_loras, figures.adapters_in_use) == (2, in_use)


LINE = st.tuples(
    st.sampled_from(
        [b"vllm:num_requests_running", b"vllm:kv_cache_usage_perc", b"vllm:cache_config_info"]
    ),
    st.sampled_from([b"", b" ", b"{", b"}", b'{model_name="', b'{block_size="9999999999999"}'])
    | st.binary(max_size=20),
    st.floats().map(lambda value: repr(value).encode()) | st.binary(max_size=20),
)


LINES = st.lists(LINE.map(b" ".join)).map(b"\n".join)
BUSY, PLACE = sample("busy"), st.integers(0, 60_000)
DAMAGED = st.builds(lambda start, size: BUSY[:start] + BUSY[start + size :], PLACE, PLACE)


@settings(max_examples=examples(300))
@given(st.binary() | LINES | DAMAGED)
def test_any_page_is_read_or_refused(page: bytes) -> None:
    """Accepted figures make a state that Redis can carry."""
    try:
        figures = read_metrics(page)
    except ScrapeError:
        return
    state = ReplicaState(id="10.0.0.1:80", **figures.of_state())
    assert msgpack.decode(msgpack.encode(state), type=ReplicaState) == state
    assert 0 <= state.kv_usage <= 1
    assert min(state.running, state.waiting, state.steps, state.kv_tokens) >= 0


def test_last_block_of_each_sequence_counts_as_half_full() -> None:
    figures = read_metrics(sample("busy"))
    assert (figures.running, figures.block_size) == (4, 128)
    in_blocks = figures.kv_usage * figures.kv_tokens
    assert figures.counts(at=1.0).kv_tokens == pytest.approx(in_blocks - 4 * 64)
    assert read_metrics(sample("idle")).counts(at=1.0).kv_tokens == 0.0
