"""State of one replica at a scrape: pollers write it, and routers read it."""

from typing import Annotated, final

from msgspec import Meta, Struct, msgpack

from extproc.predict.step import StepModel, profile_or_default

STALE_AFTER_S = 5.0  # seconds without an update; late scrapes take less (``poll.timeout_s``)
TTL_S = 10.0
"""Seconds that a state lives in Redis: longer than the longest wait between two scrapes (2 s) plus
the longest unanswered scrape (``STALE_AFTER_S``)."""

_LARGEST = 1e18  # products of a few figures must not overflow
Finite = Annotated[float, Meta(ge=-_LARGEST, le=_LARGEST)]
_Count = Annotated[int, Meta(ge=0)]


class EngineFigures(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Figures on a replica's ``/metrics``, summed over the engines of a data-parallel server.

    Counters begin at zero when the replica's process starts.
    """

    models: tuple[str, ...] = ()  # LoRA adapters included; empty: not known
    max_loras: _Count = 0  # most adapters in one batch; 0: not known
    adapters_in_use: tuple[str, ...] = ()  # adapters with a request that runs or waits
    engines: _Count = 1  # of a data-parallel server; every engine has its own batch and KV cache
    running: _Count = 0
    waiting: _Count = 0
    kv_usage: Finite = 0.0  # fraction of KV blocks in use, 0…1; cached free blocks count as free
    kv_tokens: _Count = 0  # size of the KV cache in tokens; 0: not known
    block_size: Annotated[int, Meta(ge=1)] = 16  # tokens in a KV block
    prefix_caching: bool = True  # True if not known
    asleep: bool = False  # vLLM's sleep mode: no inference until the engine is woken up
    started_at: Finite = 0.0  # start of the process, in epoch seconds on its machine; 0: not known

    # Counters.
    steps: Finite = 0.0  # engine steps; the mean if there are several engines
    prompt_tokens: Finite = 0.0  # cached tokens included; counted when the prefill ends
    cached_tokens: Finite = 0.0  # prompt tokens taken from the prefix cache
    generated_tokens: Finite = 0.0
    first_tokens: Finite = 0.0  # sequences whose prefill has ended
    accepted_tokens: Finite = 0.0  # drafted tokens that speculative decoding accepted
    preemptions: Finite = 0.0  # sequences preempted


@final
class ReplicaState(EngineFigures, frozen=True, kw_only=True, omit_defaults=True):
    """A replica at the time of a scrape."""

    id: str  # ip:port, as in Envoy's cluster
    name: str = ""  # name in the configuration, for people
    profile: str = ""  # hardware profile; empty: the router's default
    learned: StepModel | None = None  # step times learned from counters; None: the profile's
    measured: bool = False  # ``learned`` is from this replica's work, not from other replicas'
    listed: bool = False  # ``models`` is from ``/v1/models``, not from ``/metrics``
    adapters: tuple[str, ...] = ()  # names in ``models`` that are LoRA adapters
    max_model_len: _Count | None = None  # context length in tokens
    takes_priority: bool = False  # vLLM accepts ``priority`` in every request body
    by_priority: bool = False  # vLLM serves higher priorities first (``priority_scheduling``)
    healthy: bool = True  # False: the last scrape failed
    problem: str = ""  # why the replica is not healthy or not ready, in a few words
    ready: bool = True  # False: Kubernetes says not ready
    draining: bool = False  # no new requests: a command or Kubernetes takes the replica away
    unanswered_s: Finite = 0.0
    """Seconds for which the replica has neither answered a scrape nor refused a connection; the
    figures are those of the last answer."""

    kv_update: _Count | None = None
    """Number of the last update of the KV blocks; None: the blocks are not known, because the
    replica reports no blocks or the poller misses events."""

    scraped_at: Finite = 0.0  # seconds since the epoch, on the poller's clock
    scrape_seconds: Finite = 0.0  # duration of the scrape: the figures may be this much older
    life_s: Finite = 0.0
    """Time to live in Redis, in seconds. ``life_s`` minus the time left is the state's age,
    whatever the machines' clocks say. 0: not known."""

    refuses: bool = False  # connections are refused: no process listens
    most_running: _Count = 0  # most sequences that ran at once since the process started
    max_num_seqs: _Count = 0  # vLLM's setting, as learned; 0: the profile's
    tokens_per_step: Annotated[float, Meta(ge=1.0, le=_LARGEST)] = 1.0  # for each sequence

    @property
    def serves(self) -> bool:
        return self.healthy and self.ready and not self.asleep

    @property
    def speeds(self) -> dict[str, float]:
        """Speed of the usual decode step and of prefill, by phase: learned ÷ the profile's. A phase
        that was not measured is missing."""
        if self.learned is None or not self.measured:
            return {}
        learned, profile = self.learned, profile_or_default(self.profile).step
        seconds = {
            "decode": (learned.usual, profile.usual),
            "prefill": (learned.c_prefill, profile.c_prefill),
        }
        return {phase: expected / actual for phase, (actual, expected) in seconds.items() if actual}


_DECODER = msgpack.Decoder(ReplicaState)


def checked(state: ReplicaState) -> ReplicaState:
    """Returns the state if routers can decode it; raises msgspec.ValidationError if a value is out
    of bounds. msgspec checks values only while decoding."""
    return _DECODER.decode(msgpack.encode(state))
