"""Parser of the series on vLLM's ``/metrics`` page that a router needs.

A general parser takes milliseconds for the 60 kB of a page. Names of series differ between versions
of vLLM; lists of names begin with the newest name.
"""

import re
from typing import Any

from extproc.predict.windows import EngineCounts
from extproc.replica_state import EngineFigures

_LARGEST = 2.0**53  # up to here, every whole number is an exact float
_BLOCK_SIZE_ON_GPUS = 16

_RUNNING = b"num_requests_running"
_KV_USAGE = (b"kv_cache_usage_perc", b"gpu_cache_usage_perc")
_STEPS = b"iteration_tokens_total_count"
_CACHED_EARLY = (  # vLLM up to 0.15: counted at admission
    b"prefix_cache_hits_total",
    b"prefix_cache_hits",
    b"gpu_prefix_cache_hits_total",
    b"gpu_prefix_cache_hits",
)
_ADAPTERS = b"lora_requests_info"
_SET = b"\nvllm:" + _ADAPTERS + b"{"
_LENGTHS = b"request_generation_tokens_bucket"
_SLEEP = b"engine_sleep_state"
_AWAKE = b'sleep_state="awake"'
_START = b"process_start_time_seconds"

_MODEL_NAME = re.compile(rb'[{,]model_name="((?:[^"\\]|\\.)*)"')
_BLOCK_SIZE = re.compile(rb'[{,]block_size="([1-9]\d{0,5})"')
_NO_PREFIX_CACHE = b'enable_prefix_caching="False"'
_BLOCKS = re.compile(rb'[{,]num_gpu_blocks="(\d{1,9})"')
_EDGE = re.compile(rb'[{,]le="(\d{1,9}(?:\.\d+)?)"')
_KV_TOKENS = re.compile(rb'[{,]kv_cache_size_tokens="(\d{1,12})"')
_MAX_LORAS = re.compile(rb'[{,]max_lora="(\d{1,6})"')
_RUNNING_ADAPTERS = re.compile(rb'[{,]running_lora_adapters="((?:[^"\\]|\\.)*)"')
_WAITING_ADAPTERS = re.compile(rb'[{,]waiting_lora_adapters="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")


class ScrapeError(Exception):
    """A scrape failed: no answer, or an answer that no healthy vLLM gives."""


class PageFigures(EngineFigures, frozen=True, kw_only=True):
    """All figures of a page, including figures that only the estimator of step times needs."""

    finished: float = 0.0  # requests
    prefill_s: float = 0.0  # seconds of finished requests, from admission to first token
    decode_s: float = 0.0  # seconds of finished requests, from first token to last
    cached_early: bool = False  # cached tokens count at admission (vLLM up to 0.15)

    def of_state(self) -> dict[str, Any]:
        """Returns those figures of the page that are fields of a ``ReplicaState``."""
        return {name: getattr(self, name) for name in EngineFigures.__struct_fields__}

    def counts(self, at: float) -> EngineCounts:
        """Returns the counts from which step times are learned; ``at``: time at which the page was
        read.

        KV tokens are estimated from the fraction of KV blocks in use, and the last block of each
        sequence counts as half full. Counting that block as full would overstate the KV tokens by a
        third for blocks of 128 tokens, as on CPUs.
        """
        unfilled = self.running * self.block_size / 2
        return EngineCounts(
            at=at,
            steps=self.steps,
            computed_tokens=self.prompt_tokens - self.cached_tokens,
            # A step gives a sequence one token and the accepted drafts.
            generated_tokens=self.generated_tokens - self.accepted_tokens,
            in_flight=self.running + self.waiting,
            kv_tokens=max(self.kv_usage * self.kv_tokens - unfilled, 0.0),
            finished=self.finished,
            first_tokens=self.first_tokens,
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
            prompt_tokens=self.prompt_tokens,
            cached_early=self.cached_early,
        )


def read_metrics(page: bytes) -> PageFigures:
    """Reads the text of a ``/metrics`` page.

    Raises:
        ScrapeError: the page is not vLLM's, or has a value that no vLLM reports.
    """
    shortened = bytearray(b"\n" + page)
    drop_old_adapter_sets(shortened)
    page = bytes(shortened)
    running = _series(page, _RUNNING)
    if not running:
        raise ScrapeError("/metrics has no line of vllm:num_requests_running: is this vLLM?")
    usage = [_value(_KV_USAGE[0], line) for line in _series(page, *_KV_USAGE)]
    steps = _series(page, _STEPS)
    configs = _series(page, b"cache_config_info")
    cached = _series(page, b"prompt_tokens_cached_total", b"prompt_tokens_cached")
    early = [] if cached else _series(page, *_CACHED_EARLY)
    models = {_text(match[1]) for line in running if (match := _MODEL_NAME.search(line))}
    block_size, kv_tokens = _kv_cache(configs)
    max_loras, adapters = _adapters(page)
    return PageFigures(
        models=tuple(sorted(models)),
        running=int(_sum(_RUNNING, running)),
        waiting=int(_total(page, b"num_requests_waiting")),
        kv_usage=min(1.0, sum(usage) / len(usage)) if usage else 0.0,
        kv_tokens=kv_tokens,
        block_size=block_size,
        # Average per engine: a sequence advances only with the steps of its own engine.
        steps=_sum(_STEPS, steps) / max(len(steps), 1),
        prompt_tokens=_counter(page, b"prompt_tokens"),
        cached_tokens=_sum(b"prompt_tokens_cached", cached or early),
        generated_tokens=_counter(page, b"generation_tokens"),
        first_tokens=_total(page, b"time_to_first_token_seconds_count"),
        accepted_tokens=_counter(page, b"spec_decode_num_accepted_tokens"),
        preemptions=_counter(page, b"num_preemptions"),
        finished=_total(page, b"request_success_total"),
        prefill_s=_total(page, b"request_prefill_time_seconds_sum"),
        decode_s=_total(page, b"request_decode_time_seconds_sum"),
        cached_early=bool(early),
        output_lengths=_output_lengths(_series(page, _LENGTHS)),
        engines=len(running),
        prefix_caching=not any(_NO_PREFIX_CACHE in config for config in configs),
        max_loras=max_loras,
        adapters_in_use=adapters,
        # vLLM puts all engines of a server to sleep together.
        asleep=any(_AWAKE in line and not _value(_SLEEP, line) for line in _series(page, _SLEEP)),
        started_at=_sum(_START, _lines(page, b"\n" + _START)),
    )


def drop_old_adapter_sets(page: bytearray) -> None:
    """Removes from a page, or its first part, all lines of LoRA adapters except the latest.

    vLLM keeps a line for each set of adapters that ever ran together, and for each order of the
    set: up to megabytes. The value of a line is the time when the set last ran.

    Raises:
        ScrapeError: a line has no valid value.
    """
    last = page.rfind(_SET)  # may be incomplete
    if (begin := page.find(_SET, 0, max(last, 0))) >= 0:
        _, *sets = page[begin:last].split(_SET)
        page[begin:last] = _SET + max(sets, key=lambda line: _value(_ADAPTERS, line))


def _series(page: bytes, *names: bytes) -> list[bytes]:
    """Returns the lines of the first of ``names`` on the page: ``{labels} value [timestamp]``."""
    return next((found for name in names if (found := _lines(page, b"\nvllm:" + name))), [])


def _lines(page: bytes, start: bytes) -> list[bytes]:
    begin = page.find(start + b"{")
    if begin < 0 and (begin := page.find(start + b" ")) < 0:
        return []
    end = page.find(b"\n#", begin)
    lines = page[begin : end if end >= 0 else len(page)].split(start)
    # Lines of a longer name with this beginning have another byte here.
    return [line.partition(b"\n")[0] for line in lines if line[:1] in (b"{", b" ")]


def _counter(page: bytes, name: bytes) -> float:
    return _sum(name, _series(page, name + b"_total", name))


def _total(page: bytes, name: bytes) -> float:
    return _sum(name, _series(page, name))


def _sum(name: bytes, lines: list[bytes]) -> float:
    total = sum(_value(name, line) for line in lines)
    if total > _LARGEST:
        raise ScrapeError(f"/metrics has an impossible sum of vllm:{name.decode()}: {total:g}")
    return total


def _value(name: bytes, line: bytes | bytearray) -> float:
    words = line[line.rfind(b"}") + 1 :].split(maxsplit=1)
    try:
        value = float(words[0])
    except (IndexError, ValueError):
        value = -1.0
    if not 0.0 <= value <= _LARGEST:  # catches NaN too
        text = line[-40:].decode(errors="replace")
        raise ScrapeError(f"/metrics has an impossible value of vllm:{name.decode()}: {text!r}")
    return value


def _kv_cache(configs: list[bytes]) -> tuple[int, int]:
    """Returns the tokens in a block, and in the KV caches of all engines; 0: unknown.

    ``kv_cache_size_tokens`` is preferred, because ``num_gpu_blocks`` of each engine counts the
    blocks of all engines, and because with several kinds of attention a block does not hold
    ``block_size`` tokens. Models without a KV cache have one unused block per engine.
    """
    block_size = max(_labels(_BLOCK_SIZE, configs), default=_BLOCK_SIZE_ON_GPUS)
    tokens = sum(_labels(_KV_TOKENS, configs))
    blocks = max(_labels(_BLOCKS, configs), default=0)
    if blocks > len(configs):
        tokens = tokens or blocks * block_size
    return block_size, tokens


def _output_lengths(buckets: list[bytes]) -> tuple[tuple[float, float], ...]:
    """Returns for each bucket the upper bound in generated tokens, and the number of requests."""
    below: dict[float, float] = {}
    for line in buckets:
        if edge := _EDGE.search(line):
            tokens = float(edge[1])
            below[tokens] = below.get(tokens, 0.0) + _value(_LENGTHS, line)
    edges = sorted(below)
    counts = [below[edge] for edge in edges]
    return tuple(
        (edge, max(count - before, 0.0))
        for edge, count, before in zip(edges, counts, [0.0, *counts], strict=False)
    )


def _adapters(page: bytes) -> tuple[int, tuple[str, ...]]:
    """Returns the number of adapters that a batch may have (0: unknown), and the adapters in
    use."""
    if page.rfind(_SET) < 0:  # a search from the beginning takes five times as long
        return 0, ()
    line = max(_series(page, _ADAPTERS), key=lambda line: _value(_ADAPTERS, line))
    used: dict[str, None] = {}
    for label in (_RUNNING_ADAPTERS, _WAITING_ADAPTERS):
        if (match := label.search(line)) and match[1]:
            used |= dict.fromkeys(_text(match[1]).split(","))
    return max(_labels(_MAX_LORAS, [line]), default=0), tuple(used)


def _labels(label: re.Pattern[bytes], lines: list[bytes]) -> list[int]:
    return [int(match[1]) for line in lines if (match := label.search(line))]


def _text(value: bytes) -> str:
    text = value.decode(errors="replace")
    return _ESCAPE.sub(lambda match: "\n" if match[1] == "n" else match[1], text)
