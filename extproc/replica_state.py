"""What a poll saw of one replica: the record that pollers write and routers read."""

import sys
from typing import Annotated

from msgspec import Meta, Struct, msgpack

from extproc.predict.step import StepModel

SILENT_AFTER_S = 5.0
"""Seconds without news: polls of a replica that answers are closer, late ones too, for
``poll.timeout_s`` is bounded by it."""
TTL_S = 10.0
"""Life of a replica's state in Redis without a scrape, in seconds: longer than any wait between two
scrapes and an answer that is given up, 2 s and ``SILENT_AFTER_S`` at most."""

Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]


class ReplicaState(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One replica at the time of one scrape. Engines of a data-parallel server are summed.

    Counters grow from the start of the replica's process and fall back to zero when it restarts.
    """

    id: str  # ip:port, as Envoy knows the member
    name: str = ""  # as the configuration calls it; for people
    profile: str = ""  # hardware profile; empty: the router's default
    learned: StepModel | None = None  # step times from its counters; None: the profile's
    measured: bool = False
    """``learned`` comes from its own work; until then it is its profile, corrected by others."""
    models: tuple[str, ...] = ()  # LoRA adapters included; empty: not known
    listed: bool = False
    """``models`` are all: the replica listed them itself. Until then its figures name one."""
    adapters: tuple[str, ...] = ()  # those of ``models`` that are LoRA adapters
    max_loras: int = 0  # adapters in one batch; 0: not known
    adapters_in_use: tuple[str, ...] = ()  # adapters with a request that runs or waits
    max_model_len: int | None = None  # context length in tokens
    takes_priority: bool = False
    """True if vLLM of this version takes any body with ``priority``; others may refuse some."""
    by_priority: bool = False
    """True if the replica takes higher priorities first (``priority_scheduling`` of its pool)."""
    healthy: bool = True  # False: the last scrape found it dead, hung or failing
    problem: str = ""  # why it is not healthy, in a few words
    draining: bool = False  # it gets nothing new: a command or Kubernetes takes it away
    unanswered_s: Finite = 0.0
    """Seconds for which it has taken connections and answered none, neither for its figures nor for
    its health, and counting; the figures below are of the scrape before."""

    engines: int = 1  # of a data-parallel server; each has a batch and a KV cache of its own
    running: int = 0
    waiting: int = 0
    kv_usage: Finite = 0.0  # fraction of KV blocks in use, 0…1; cached but free ones count as free
    kv_tokens: int = 0  # KV cache in tokens; 0: not known
    block_size: int = 16  # tokens in a KV block
    prefix_caching: bool = True  # True where that is not known

    # Counters.
    steps: Finite = 0.0  # engine steps; with several engines, the mean of theirs
    prompt_tokens: Finite = 0.0  # cached ones included; counted when their prefill ends
    cached_tokens: Finite = 0.0  # prompt tokens taken from the prefix cache
    generated_tokens: Finite = 0.0
    first_tokens: Finite = 0.0
    """Sequences that got their first token, or whose prompt was all there was to do."""
    accepted_tokens: Finite = 0.0
    """Of the tokens generated, those that speculative decoding had drafted; every other one is a
    sequence's part of a step."""
    preemptions: Finite = 0.0  # sequences preempted

    kv_news: int | None = None
    """Number of the latest news of its KV blocks, where the poller hears of all of them; None: what
    its prefix cache holds is not known."""

    output_lengths: tuple[tuple[Finite, Finite], ...] = ()
    """Counters: requests that generated at most so many tokens, and more than the entry before;
    those beyond the last are left out."""

    scraped_at: Finite = 0.0  # seconds since the epoch, on the poller's clock
    scrape_seconds: Finite = 0.0
    """Duration of the scrape: the figures are at most this much older than ``scraped_at``."""
    life_s: Finite = 0.0
    """Seconds that Redis keeps the state: what is left of them tells its age there without two
    machines' clocks; 0: not known."""

    asleep: bool = False  # vLLM's sleep mode: an engine answers no inference until it is woken up
    started_at: Finite = 0.0
    """Start of the replica's process: seconds since the epoch, on its clock; 0: not known."""


_DECODER = msgpack.Decoder(ReplicaState)


def checked(state: ReplicaState) -> ReplicaState:
    """Returns the state if routers can read it: a Struct takes any value until it is decoded.

    Raises:
        msgspec.ValidationError: a value is out of bounds.
    """
    return _DECODER.decode(msgpack.encode(state))
