"""State of a replica after a scrape, with figures of the engine's batch that ``/metrics`` lacks.

Two figures are derived from consecutive scrapes:

- *Limit of sequences* (``max_num_seqs``): the most sequences that ran at once since the process
  started. This number counts as the limit once requests wait in two consecutive polls although KV
  space is free and all running sequences decode, until a poll has more running sequences.
- *Tokens per step*: tokens that a step gives a sequence; mean of about the last thousand tokens.
"""

from math import exp
from typing import Any

from msgspec import structs

from extproc.poll.metrics_text import PageFigures
from extproc.replica_state import EngineFigures, ReplicaState

_LISTED = ("models", "listed", "adapters", "max_model_len")  # from /v1/models
_NEARLY_FULL = 0.9  # fraction of the KV cache above which requests may be waiting for KV space
_FEWEST_STEPS = 3  # between two polls; if fewer, starts and ends of sequences distort figures
_MOST_PER_STEP = 8.0  # tokens of a sequence per step: longer drafts are seldom accepted
_MEMORY = 1000.0  # generated tokens in which the weight of an older ratio falls to 1/e


def scraped_state(
    base: ReplicaState, before: ReplicaState, figures: PageFigures, **others: Any
) -> ReplicaState:
    """Returns the state of a replica after a scrape.

    Args:
        base: fields that no scrape changes.
        before: state after the last scrape, whose list of models is kept; a blank state if the
            process has restarted.
        others: fields that replace those of ``figures``.
    """
    most = max(before.most_running, figures.running)
    limit = before.max_num_seqs if most == before.most_running else 0
    if most in (before.running, figures.running) and _is_full(before, figures):
        limit = most
    listed = {name: getattr(before, name) for name in _LISTED} if before.listed else {}
    return structs.replace(
        base,
        most_running=most,
        max_num_seqs=limit,
        takes_priority=before.takes_priority,
        tokens_per_step=_tokens_per_step(before, figures),
        **{**figures.of_state(), **listed, **others},
    )


def _is_full(before: ReplicaState, now: EngineFigures) -> bool:
    """Returns True if requests wait only because the batch is full.

    Both polls must show waiting requests, because requests that a single poll shows may just have
    arrived. While a prompt is prefilled, requests wait for the token budget instead, and at least
    one running sequence gets no token from a step. So the batch counts as full if, on average,
    fewer than 0.5 running sequences got no token from a step.
    """
    waiting = all(poll.waiting > 0 and poll.kv_usage < _NEARLY_FULL for poll in (before, now))
    steps = now.steps - before.steps
    decoded = now.generated_tokens - before.generated_tokens
    decoded -= now.accepted_tokens - before.accepted_tokens
    begun = now.first_tokens - before.first_tokens
    run = steps * (before.running + now.running) / 2.0 + begun
    return waiting and steps >= _FEWEST_STEPS and decoded > run - steps / 2.0


def _tokens_per_step(before: ReplicaState, now: EngineFigures) -> float:
    """Returns the mean tokens that a step gives a sequence. With short answers the mean is too
    high: vLLM also counts accepted drafts beyond the end of an answer."""
    generated = now.generated_tokens - before.generated_tokens
    if generated <= 0.0:
        return before.tokens_per_step
    accepted = now.accepted_tokens - before.accepted_tokens
    latest = min(max(1.0 - accepted / generated, 1.0 / _MOST_PER_STEP), 1.0)
    steps_per_token = 1.0 / before.tokens_per_step
    steps_per_token += (1.0 - exp(-generated / _MEMORY)) * (latest - steps_per_token)
    return 1.0 / steps_per_token
