"""Parser of the series on vLLM's ``/metrics`` page that a router needs.

A general parser takes milliseconds for the 60 kB of a page. This parser finds all lines of series
at once, and reads values and labels only in the lines of which the router needs them. Names of
series differ between versions of vLLM; lists of names begin with the newest name.
"""

import re
from collections.abc import Iterable
from typing import Any

from extproc.predict.windows import EngineCounts
from extproc.replica_state import EngineFigures

_LARGEST = 2.0**53  # up to here, every whole number is an exact float
_BLOCK_SIZE_ON_GPUS = 16
_KV_USAGE = "kv_cache_usage_perc", "gpu_cache_usage_perc"
# vLLM up to 0.15: counted at admission.
_CACHED_EARLY = "prefix_cache_hits_total", "gpu_prefix_cache_hits_total"
_ADAPTERS = "lora_requests_info"
_SLEEP = "engine_sleep_state"
_SET = b"\nvllm:lora_requests_info{"

_SUMMED = {
    "prompt_tokens": "prompt_tokens_total",
    "generated_tokens": "generation_tokens_total",
    "first_tokens": "time_to_first_token_seconds_count",
    "accepted_tokens": "spec_decode_num_accepted_tokens_total",
    "preemptions": "num_preemptions_total",
    "finished": "request_success_total",
    "prefill_s": "request_prefill_time_seconds_sum",
    "decode_s": "request_decode_time_seconds_sum",
}
"""Series whose sum over the engines is a field of ``PageFigures``, by field."""
_READ = (
    *("num_requests_running", "num_requests_waiting", *_KV_USAGE, "prompt_tokens_cached_total"),
    *("iteration_tokens_total_count", "cache_config_info", *_CACHED_EARLY, _ADAPTERS, _SLEEP),
    *_SUMMED.values(),
)
_LINE = re.compile(rf"\nvllm:({'|'.join(_READ)})([{{ ].*)")
_START = re.compile(r"\nprocess_start_time_seconds([{ ].*)")
_ESCAPE = re.compile(r"\\(.)")

_Series = dict[str, list[str]]
"""Lines of each series, by its name without ``vllm:``; a line is ``{labels} value [timestamp]``."""


class ScrapeError(Exception):
    """A scrape failed: no answer, or an answer that no healthy vLLM gives."""

    def __init__(
        self, problem: str, *, silent: bool = False, connected: bool = True, refused: bool = False
    ) -> None:
        super().__init__(problem)
        self.silent = silent  # the replica, or its machine, did not answer in time
        self.connected = connected  # False: the replica's process or its machine is down
        self.refused = refused  # the machine refused the connection: no process listens


class PageFigures(EngineFigures, frozen=True, kw_only=True):
    """All figures of a page, including figures that only the estimator of step times needs."""

    finished: float = 0.0  # requests
    prefill_s: float = 0.0  # seconds of finished requests, from admission to first token
    decode_s: float = 0.0  # seconds of finished requests, from first token to last
    cached_early: bool = False  # cached tokens count at admission (vLLM up to 0.15)

    def of_state(self) -> dict[str, Any]:
        """Returns the figures of the page that are fields of a ``ReplicaState``."""
        return {name: getattr(self, name) for name in EngineFigures.__struct_fields__}

    def counts(self, at: float) -> EngineCounts:
        """Returns the counts at the time ``at``, from which step times are learned.

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
    """Reads a ``/metrics`` page; raises ScrapeError for a page or a value that is not vLLM's."""
    shortened = bytearray(b"\n" + page)
    drop_old_adapter_sets(shortened)
    text = shortened.decode(errors="replace")
    series: _Series = {}
    for name, line in _LINE.findall(text):
        series.setdefault(name, []).append(line)
    running = series.get("num_requests_running", [])
    if not running:
        raise ScrapeError("/metrics has no line of vllm:num_requests_running: is this vLLM?")
    usage = _values(series, _first(series, *_KV_USAGE))
    steps = _values(series, "iteration_tokens_total_count")
    cached = _first(series, "prompt_tokens_cached_total", *_CACHED_EARLY)
    configs = series.get("cache_config_info", [])
    block_size, kv_tokens = _kv_cache(configs)
    max_loras, adapters = _adapters(series)
    sleep = zip(series.get(_SLEEP, ()), _values(series, _SLEEP), strict=True)
    sums: dict[str, Any] = {field: _sum(series, name) for field, name in _SUMMED.items()}
    return PageFigures(
        models=tuple(sorted({_label("model_name", line) for line in running} - {""})),
        running=int(_sum(series, "num_requests_running")),
        waiting=int(_sum(series, "num_requests_waiting")),
        kv_usage=min(1.0, sum(usage) / len(usage)) if usage else 0.0,
        kv_tokens=kv_tokens,
        block_size=block_size,
        # Average per engine: a sequence advances only with the steps of its own engine.
        steps=sum(steps) / max(len(steps), 1),
        cached_tokens=_sum(series, cached),
        cached_early=cached in _CACHED_EARLY,
        engines=len(running),
        prefix_caching=all(_label("enable_prefix_caching", line) != "False" for line in configs),
        max_loras=max_loras,
        adapters_in_use=adapters,
        # vLLM puts all engines of a server to sleep together.
        asleep=any(_label("sleep_state", line) == "awake" and not value for line, value in sleep),
        started_at=sum(_value("process_start_time_seconds", line) for line in _START.findall(text)),
        **sums,
    )


def drop_old_adapter_sets(page: bytearray) -> None:
    """Removes from a page, or its first part, all lines of LoRA adapters except the latest.

    vLLM keeps a line for each set of adapters that ever ran together, in each order: up to
    megabytes. The value of a line is the time when the set last ran. Raises ScrapeError if a line
    has no valid value."""
    last = page.rfind(_SET)  # may be incomplete
    if (begin := page.find(_SET, 0, max(last, 0))) >= 0:
        _, *sets = page[begin:last].split(_SET)
        page[begin:last] = _SET + max(
            sets, key=lambda line: _value(_ADAPTERS, line.decode(errors="replace"))
        )


def _first(series: _Series, *names: str) -> str:
    """Returns the first of ``names`` that the page has, or an empty string."""
    return next((name for name in names if name in series), "")


def _values(series: _Series, name: str) -> list[float]:
    return [_value(name, line) for line in series.get(name, ())]


def _sum(series: _Series, name: str) -> float:
    return sum(_values(series, name))


def _value(name: str, line: str) -> float:
    words = line[line.rfind("}") + 1 :].split(maxsplit=1)
    try:
        value = float(words[0])
    except (IndexError, ValueError):
        value = -1.0
    if not 0.0 <= value <= _LARGEST:  # catches NaN too
        raise ScrapeError(f"/metrics has an impossible value of vllm:{name}: {line[-40:]!r}")
    return value


def _label(name: str, line: str) -> str:
    """Returns the value of a label, or an empty string if the line lacks the label."""
    match = re.search(rf'[{{,]{name}="((?:[^"\\]|\\.)*)"', line)
    value = match[1] if match else ""
    return _ESCAPE.sub(lambda found: "\n" if found[1] == "n" else found[1], value)


def _numbers(name: str, lines: Iterable[str]) -> list[int]:
    """Returns the values of a label that are whole numbers of at most twelve digits."""
    values = (_label(name, line) for line in lines)
    return [int(value) for value in values if value.isdecimal() and len(value) < 13]


def _kv_cache(configs: list[str]) -> tuple[int, int]:
    """Returns the tokens in a block, and in the KV caches of all engines; 0: unknown.

    ``kv_cache_size_tokens`` is preferred, because ``num_gpu_blocks`` of each engine counts the
    blocks of all engines, and because with several kinds of attention a block does not hold
    ``block_size`` tokens. Models without a KV cache have one unused block per engine.
    """
    block_size = max(_numbers("block_size", configs), default=0) or _BLOCK_SIZE_ON_GPUS
    tokens = sum(_numbers("kv_cache_size_tokens", configs))
    blocks = max(_numbers("num_gpu_blocks", configs), default=0)
    if blocks > len(configs):
        tokens = tokens or blocks * block_size
    return block_size, tokens


def _adapters(series: _Series) -> tuple[int, tuple[str, ...]]:
    """Returns the most adapters that a batch may have (0: unknown), and the adapters in use."""
    line = max(series.get(_ADAPTERS, ()), key=lambda line: _value(_ADAPTERS, line), default="")
    names = [_label(f"{state}_lora_adapters", line) for state in ("running", "waiting")]
    used = dict.fromkeys(name for listed in names for name in listed.split(",") if name)
    return max(_numbers("max_lora", [line]), default=0), tuple(used)
