"""``/metrics``: the page of vLLM 0.32, in its names, labels and buckets.

prometheus_client takes ten times as long for this page (37 ms against 3): a replica that is scraped
five times a second would deliver its tokens late.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from extproc.ground.clock import wall
from extproc.lab.simulator.engine import Engine
from extproc.lab.simulator.steps import Histogram, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
CHOICES = (1, 2, 5, 10, 20)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    *(20, 40, 80, 160, 640, 2560),
)
PER_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    *(20, 40, 80),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960),
    *(1920, 7680),
)

_HISTOGRAMS = {
    "request_prompt_tokens": TOKENS,
    "request_generation_tokens": TOKENS,
    "request_max_num_generation_tokens": TOKENS,
    "request_params_n": CHOICES,
    "request_params_max_tokens": TOKENS,
    "time_to_first_token_seconds": FIRST_TOKEN_S,
    "inter_token_latency_seconds": PER_TOKEN_S,
    "request_time_per_output_token_seconds": PER_TOKEN_S,
    "e2e_request_latency_seconds": REQUEST_S,
    "request_queue_time_seconds": REQUEST_S,
    "request_inference_time_seconds": REQUEST_S,
    "request_prefill_time_seconds": REQUEST_S,
    "request_decode_time_seconds": REQUEST_S,
    "request_num_preemptions": PREEMPTIONS,
    "request_prefill_kv_computed_tokens": TOKENS,
}
LIMITS = ("max_num_queued_reqs", "max_num_queued_tokens")  # of the queue of requests
FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")


class Metrics:
    """Series of a replica: its engine's, and those of the requests it served."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self._model = f'model_name="{_escaped(model)}"'
        self._labels = f'engine="0",{self._model}'
        self.rejections = dict.fromkeys(LIMITS, 0)  # requests refused, by limit
        self._histograms = {name: Histogram(bounds) for name, bounds in _HISTOGRAMS.items()}

    def observe(self, name: str, value: float, times: int = 1) -> None:
        self._histograms[name].observe(value, times)

    def first_token_came(self, sequence: Sequence, speed: float) -> None:
        """Count a first token; the times of ``sequence`` are ``speed`` times real seconds."""
        arrived, first = _times(sequence.arrived, sequence.first_token)
        self.observe("time_to_first_token_seconds", max(0.0, first - arrived) / speed)

    def sequence_finished(self, sequence: Sequence, bound: int, speed: float) -> None:
        """Count a sequence that was not aborted; its times are ``speed`` times real seconds.

        A step that runs late counts as begun on time, so that it may take in what arrived after.
        """
        arrived, admitted, first, finished = _times(
            sequence.arrived, sequence.admitted, sequence.first_token, sequence.finished
        )
        decode = (finished - first) / speed
        values = {
            "request_prompt_tokens": sequence.prompt_tokens,
            "request_generation_tokens": sequence.generated,
            "request_num_preemptions": sequence.preemptions,
            "request_prefill_kv_computed_tokens": sequence.prompt_tokens - sequence.cached_tokens,
            "e2e_request_latency_seconds": max(0.0, finished - arrived) / speed,
            "request_queue_time_seconds": max(0.0, admitted - arrived) / speed,
            "request_inference_time_seconds": (finished - admitted) / speed,
            "request_prefill_time_seconds": (first - admitted) / speed,
            "request_decode_time_seconds": decode,
        }
        if bound:
            values["request_params_max_tokens"] = bound
        if sequence.generated > 1:
            values["request_time_per_output_token_seconds"] = decode / (sequence.generated - 1)
        for name, value in values.items():
            self.observe(name, value)

    def request_finished(self, generated: int, choices: int) -> None:
        """Count a prompt: the length of the longest answer to it, and how many were asked for."""
        self.observe("request_max_num_generation_tokens", generated)
        self.observe("request_params_n", choices)

    def page(self) -> str:
        return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        now, totals, level = self._engine.gauges, self._engine.counters, self._engine.sleep_level
        gauges = {
            "num_requests_running": now.running,
            "num_requests_waiting": now.waiting,
            "kv_cache_usage_perc": now.kv_usage,
        }
        counters = {
            "prefix_cache_queries": totals.prefix_queries,
            "prefix_cache_hits": totals.prefix_hits,
            "num_preemptions": totals.preemptions,
            "prompt_tokens": totals.prompt_tokens,
            "prompt_tokens_cached": totals.cached_tokens,
            "generation_tokens": totals.generated_tokens,
        }
        if self._engine.speculation:
            counters["spec_decode_num_drafts"] = totals.drafts
            counters["spec_decode_num_draft_tokens"] = totals.draft_tokens
            counters["spec_decode_num_accepted_tokens"] = totals.accepted_tokens
        reasons = {"capacity": now.waiting - now.deferred, "deferred": now.deferred}
        sources = {
            "local_compute": totals.prompt_tokens - totals.cached_tokens,
            "local_cache_hit": totals.cached_tokens,
            "external_kv_transfer": 0,
        }
        sleep = {"awake": level is None, "weights_offloaded": level == 1, "discard_all": level == 2}
        finished = {reason: totals.finished[reason] for reason in FINISHED_REASONS}
        for name, value in gauges.items():
            yield from self._family("gauge", name, {None: value})
        yield from self._family("gauge", "num_requests_waiting_by_reason", reasons, "reason")
        yield from self._family("gauge", "engine_sleep_state", sleep, "sleep_state")
        yield from self._rejections()
        yield from self._adapters()
        for name, value in counters.items():
            yield from self._family("counter", f"{name}_total", {None: value})
        yield from self._family("counter", "prompt_tokens_by_source_total", sources, "source")
        yield from self._family("counter", "request_success_total", finished, "finished_reason")
        yield from self._histogram("iteration_tokens_total", totals.iteration_tokens)
        for name, histogram in self._histograms.items():
            yield from self._histogram(name, histogram)
        yield from self._cache_config()

    def _adapters(self) -> Iterator[str]:
        """Names of adapters that run: vLLM means the other list for those that wait, but both of
        its lists name the same."""
        engine = self._engine
        if engine.adapters and engine.steps:
            names = _escaped(",".join(engine.gauges.adapters))
            yield "# TYPE vllm:lora_requests_info gauge"
            yield (
                f'vllm:lora_requests_info{{max_lora="{engine.adapters.slots}",'
                f'running_lora_adapters="{names}",waiting_lora_adapters="{names}"}} {wall()}'
            )

    def _rejections(self) -> Iterator[str]:
        name = "vllm:admission_rejections_total"
        yield f"# TYPE {name} counter"
        for reason, count in self.rejections.items():
            yield f'{name}{{{self._model},reason="{reason}"}} {float(count)}'

    def _cache_config(self) -> Iterator[str]:
        pool = self._engine.pool
        yield "# TYPE vllm:cache_config_info gauge"
        yield (
            f'vllm:cache_config_info{{block_size="{pool.block_size}",'
            f'enable_prefix_caching="{self._engine.prefix_caching}",engine="0",'
            f'kv_cache_size_tokens="{self._engine.capacity}",num_gpu_blocks="{pool.blocks}"}} 1.0'
        )

    def _family(
        self, kind: str, name: str, values: Mapping[Any, float], label: str = ""
    ) -> Iterator[str]:
        yield f"# TYPE vllm:{name} {kind}"
        for key, value in values.items():
            further = f',{label}="{key}"' if label else ""
            yield f"vllm:{name}{{{self._labels}{further}}} {float(value)}"

    def _histogram(self, name: str, histogram: Histogram) -> Iterator[str]:
        counts = histogram.cumulative()
        bounds = (*(str(float(bound)) for bound in histogram.bounds), "+Inf")
        yield f"# TYPE vllm:{name} histogram"
        for le, count in zip(bounds, counts, strict=True):
            yield f'vllm:{name}_bucket{{{self._labels},le="{le}"}} {float(count)}'
        yield f"vllm:{name}_count{{{self._labels}}} {float(counts[-1])}"
        yield f"vllm:{name}_sum{{{self._labels}}} {histogram.sum}"


def _times(*times: float | None) -> list[float]:
    """Times of events that have all happened."""
    return [time for time in times if time is not None]


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
