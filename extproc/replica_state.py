"""What a poll saw of one replica: the record that pollers write and routers read."""

from pydantic import BaseModel, ConfigDict

from extproc.predict.step import StepModel

SILENT_AFTER_S = 5.0
"""Seconds without news: polls of a replica that answers are closer, late ones too, for
``poll.timeout_s`` is bounded by it."""
TTL_S = 10.0
"""Life of a replica's state in Redis without a scrape, in seconds: longer than any wait between two
scrapes and an answer that is given up, 2 s and ``SILENT_AFTER_S`` at most."""


class ReplicaState(BaseModel):
    """One replica at the time of one scrape. Engines of a data-parallel server are summed.

    Counters grow from the start of the replica's process and fall back to zero when it restarts.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    id: str  # `ip:port`, as Envoy knows the member
    name: str = ""  # what the configuration calls it; for people
    profile: str = ""  # name of its hardware profile; empty: the router's default
    learned: StepModel | None = None
    """Its step-time model as learned from its counters; None: the profile's."""
    measured: bool = False
    """Whether that comes of its own work; until then it is its profile, put right by the others."""
    models: tuple[str, ...] = ()  # model names it serves, LoRA adapters included; empty: not known
    listed: bool = False
    """Whether these are all: it told them itself. Until it does, its figures name one."""
    adapters: tuple[str, ...] = ()  # those of them that are LoRA adapters
    max_loras: int = 0  # adapters that a batch may have; 0: not known
    adapters_in_use: tuple[str, ...] = ()  # adapters with a request that runs or waits
    max_model_len: int | None = None  # context length in tokens
    takes_priority: bool = False
    """Whether its version takes any body with ``priority``; others refuse some, or may."""
    by_priority: bool = False
    """Whether it takes a higher priority first, by ``priority_scheduling`` of its pool."""
    healthy: bool = True  # false: the last scrape found it dead, hung or failing
    problem: str = ""  # why it is not healthy, in a few words
    draining: bool = False  # it is to get nothing new: somebody wants to take it away
    unanswered_s: float = 0.0
    """Seconds for which it has taken connections and answered none, neither for its figures nor for
    its health, and counting; what is told below is of the scrape before."""

    engines: int = 1
    """How many a data-parallel server has; each has a batch and a KV cache of its own."""
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    """Fraction of KV blocks in use, 0…1; blocks that are cached but free count as free."""
    kv_tokens: int = 0  # KV cache in tokens; 0: not known
    block_size: int = 16  # tokens in a KV block
    prefix_caching: bool = True  # whether prefixes are cached; True where that is not known

    steps: float = 0.0  # counter: engine steps; with several engines, the mean of theirs
    prompt_tokens: float = 0.0
    """Counter: prompt tokens, cached ones included; counted when their prefill ends."""
    cached_tokens: float = 0.0  # counter: prompt tokens taken from the prefix cache
    generated_tokens: float = 0.0  # counter: tokens generated
    first_tokens: float = 0.0
    """Counter: sequences that got their first token, or whose prompt was all there was to do."""
    accepted_tokens: float = 0.0
    """Counter: of the tokens generated, those that speculative decoding had drafted; every other
    one is a sequence's part of a step."""
    preemptions: float = 0.0  # counter: sequences preempted

    kv_news: int | None = None
    """Number of the latest news of its KV blocks, where the poller hears of all of them; None: what
    its prefix cache holds is not known."""

    output_lengths: tuple[tuple[float, float], ...] = ()
    """Counters: requests that generated at most so many tokens, and more than the entry before;
    those beyond the last are left out."""

    scraped_at: float = 0.0  # seconds since the epoch, on the poller's clock
    scrape_seconds: float = 0.0
    """How long the scrape took: the figures are at most this much older than ``scraped_at``."""
    life_s: float = 0.0
    """How long it is kept in Redis, in seconds: what is left of that tells its age there without
    two machines' clocks; 0: not known."""
