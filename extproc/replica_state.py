"""State of one replica as a poll saw it: pollers write it, and routers read it."""

import sys
from typing import Annotated

from msgspec import Meta, Struct, msgpack

from extproc.predict.step import StepModel

STALE_AFTER_S = 5.0  # without a state: ``poll.timeout_s`` keeps late polls closer than this
TTL_S = 10.0
"""Seconds that a state lives in Redis without a scrape: longer than the longest wait between two
scrapes (2 s) and an answer that is given up (``STALE_AFTER_S``)."""

Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]


class ReplicaState(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A replica at the time of a scrape. Engines of a data-parallel server are summed.

    Counters grow from the start of the replica's process and fall back to zero when it restarts.
    """

    id: str  # ip:port, as Envoy knows the member
    name: str = ""  # as the configuration calls it; for people
    profile: str = ""  # hardware profile; empty: the router's default
    learned: StepModel | None = None  # step times from its counters; None: the profile's
    measured: bool = False  # ``learned`` is from its own work, not its profile corrected by others
    models: tuple[str, ...] = ()  # LoRA adapters included; empty: not known
    listed: bool = False  # ``models`` are all, as the replica lists them; else its figures name one
    adapters: tuple[str, ...] = ()  # those of ``models`` that are LoRA adapters
    max_loras: int = 0  # adapters in one batch; 0: not known
    adapters_in_use: tuple[str, ...] = ()  # adapters with a request that runs or waits
    max_model_len: int | None = None  # context length in tokens
    takes_priority: bool = False  # this vLLM takes ``priority`` in any body; others may refuse some
    by_priority: bool = False  # it takes higher priorities first (``priority_scheduling``)
    healthy: bool = True  # False: the last scrape found it dead, hung or failing
    problem: str = ""  # why it is not healthy, in a few words
    draining: bool = False  # it gets nothing new: a command or Kubernetes takes it away
    unanswered_s: Finite = 0.0
    """Seconds for which it has taken connections and answered none, so far; the figures below are
    those of the scrape before."""

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
    first_tokens: Finite = 0.0  # sequences with a first token, or with nothing to do but the prompt
    accepted_tokens: Finite = 0.0  # generated from drafts (speculative decoding), not by a step
    preemptions: Finite = 0.0  # sequences preempted

    kv_news: int | None = None
    """Number of the latest change of its KV blocks; None: what its prefix cache holds is not known,
    since the poller does not hear of every change."""

    output_lengths: tuple[tuple[Finite, Finite], ...] = ()
    """Counters: requests that generated at most these tokens, and more than the entry before;
    longer ones than the last entry are not counted."""

    scraped_at: Finite = 0.0  # seconds since the epoch, on the poller's clock
    scrape_seconds: Finite = 0.0  # by which the figures are older than ``scraped_at`` at most
    life_s: Finite = 0.0
    """Seconds that Redis keeps the state: with those left, its age there, by no machine's clock; 0:
    not known."""

    asleep: bool = False  # vLLM's sleep mode: an engine answers no inference until it is woken up
    started_at: Finite = 0.0  # of its process: seconds since the epoch, its clock; 0: not known
    refuses: bool = False  # connections: no process listens there
    most_running: int = 0  # sequences that ever ran at once in its process
    max_num_seqs: int = 0  # sequences that run at once at most, as learned; 0: the profile's
    tokens_per_step: Annotated[float, Meta(ge=1.0, le=sys.float_info.max)] = 1.0  # of a sequence


_DECODER = msgpack.Decoder(ReplicaState)


def checked(state: ReplicaState) -> ReplicaState:
    """Returns the state if routers can read it: a Struct takes any value until it is decoded.

    Raises:
        msgspec.ValidationError: a value is out of bounds.
    """
    return _DECODER.decode(msgpack.encode(state))
