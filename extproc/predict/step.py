"""Step-time model of a vLLM engine, and the profiles that it starts from."""

from dataclasses import dataclass
from math import sqrt
from typing import Annotated

from msgspec import Meta

from extproc.ground.text import suggest

USUAL_BATCH = 8.0, 8 * 1000.0  # sequences and KV tokens
_MOST_SLOWER = 5.0  # bound of the slowness that the size of a KV cache implies, and of its inverse

_Seconds = Annotated[float, Meta(ge=0.0, le=1e6)]  # checked when a state is decoded


@dataclass(frozen=True, slots=True)
class StepModel:
    """Step time in seconds, linear in the work of the step.

    ``t = c0 + c_prefill·P + c_batch·B + c_kv·K + c_att·A`` with P prompt tokens prefilled in the
    step, B sequences in the step, K KV tokens of these sequences, and A = Σ(chunk × context) over
    the prefill chunks. Fitted to real steps of vLLM 0.32, the first four terms have a median error
    of 6%; the attention term reduces the bias on long prefills from −8% to ±3%.
    """

    c0: _Seconds  # seconds per step
    c_prefill: _Seconds  # seconds per prompt token prefilled
    c_batch: _Seconds  # seconds per sequence in the step
    c_kv: _Seconds  # seconds per KV token held by the sequences in the step
    c_att: _Seconds = 0.0
    """Seconds per (prefill token × token of its context). Only simulated engines use this term: the
    counters that step times are learned from do not contain A."""
    frontend: _Seconds = 0.0  # seconds of a request outside steps: HTTP, tokenizer, transport

    def step_time(self, prefill: float, batch: float, kv: float, attention: float = 0.0) -> float:
        """Seconds of a step with P ``prefill``, B ``batch``, K ``kv`` and A ``attention``."""
        return (
            self.c0
            + self.c_prefill * prefill
            + self.c_batch * batch
            + self.c_kv * kv
            + self.c_att * attention
        )

    @property
    def usual(self) -> float:
        """Seconds of a decode step with ``USUAL_BATCH``: a single figure for the speed of the
        engine."""
        return self.step_time(0.0, *USUAL_BATCH)

    def slowed(self, factor: float) -> "StepModel":
        return StepModel(
            self.c0 * factor,
            self.c_prefill * factor,
            self.c_batch * factor,
            self.c_kv * factor,
            self.c_att * factor,
            self.frontend,
        )


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """Step times and limits of a model on a machine."""

    name: str
    step: StepModel
    kv_tokens: int  # KV cache in tokens, for replicas that do not report theirs
    token_budget: int  # vLLM's ``max_num_batched_tokens``: most tokens scheduled in one step
    max_num_seqs: int  # vLLM's limit on running sequences

    def expected_step(self, kv_tokens: float) -> StepModel:
        """Step times expected of an engine before its first work, from the size of its KV cache.

        An engine with four times the ``kv_tokens`` of the profile is expected to be twice as fast.
        By the data sheets of nine GPUs (L4 to B200), bandwidth and compute grow as m^0.7 to m^1.2,
        with m the memory that a model of 1 to 8 billion parameters leaves for the KV cache. The
        exponent 0.5 is cautious, because settings of vLLM change the size of the cache as well.

        Args:
            kv_tokens: KV cache of the engine in tokens, or 0 if the size is not known.
        """
        slower = sqrt(self.kv_tokens / kv_tokens) if kv_tokens else 1.0
        return self.step.slowed(min(max(slower, 1.0 / _MOST_SLOWER), _MOST_SLOWER))


# Default token budget and max_num_seqs of vLLM's API server (`get_batch_defaults` of `EngineArgs`
# in 0.32): the large ones for GPUs with at least 70 GiB, except the A100.
_LARGE, _OTHER = (8192, 1024), (2048, 256)

PROFILES: dict[str, HardwareProfile] = {
    name: HardwareProfile(
        name,
        StepModel(c0_ms / 1e3, prefill_us / 1e6, batch_us / 1e6, kv_us / 1e6),
        kv_tokens,
        *limits,
    )
    for name, (c0_ms, prefill_us, batch_us, kv_us), kv_tokens, limits in (
        # Roofline of the GPU with usual efficiency:
        ("llama-8b-h100", (6.5, 38, 20, 0.047), 400_000, _LARGE),
        ("llama-8b-a10", (29, 260, 50, 0.26), 42_000, _OTHER),
        # Fits to the linear operators of the Vidur simulator's published profiles; the last
        # profile leaves out the all-reduce:
        ("llama-3-8b-a100", (11, 66, 29, 0.086), 400_000, _OTHER),
        ("llama-2-7b-a100", (11, 64, 29, 0.34), 100_000, _OTHER),
        ("llama-2-7b-h100", (7, 20, 11, 0.21), 100_000, _LARGE),
        ("llama-3-70b-4xa100", (26, 158, 70, 0.054), 300_000, _OTHER),
        # Fits to whole engines, published with the BLIS simulator:
        ("qwen2.5-7b-h100", (7.1, 19.5, 25, 0.03), 800_000, _LARGE),
        ("llama-3.3-70b-4xh100", (12.6, 76, 67, 0.033), 500_000, _LARGE),
    )
}

DEFAULT_PROFILE = "llama-3-8b-a100"


def profile_or_default(name: str) -> HardwareProfile:
    """Returns the named profile, or the default profile if no profile has this name."""
    return PROFILES.get(name) or PROFILES[DEFAULT_PROFILE]


def hardware_profile(name: str) -> HardwareProfile:
    """Returns the named profile.

    Raises:
        ValueError: no profile has this name; the message suggests the nearest name.
    """
    if name not in PROFILES:
        hint = suggest(name, PROFILES) or f"; known: {', '.join(PROFILES)}"
        raise ValueError(f"no hardware profile is named {name!r}{hint}")
    return PROFILES[name]
