"""Properties of an engine's batch that its page does not tell, learned from poll to poll.

- *Limit.* The most sequences that ever ran in the process, once two polls in a row have shown
  requests that wait while as many run, KV space is free and all that run decode. A poll that shows
  more running disproves the limit.
- *Tokens per step.* The ratio of tokens to steps of a sequence in each stretch between two polls,
  averaged over about the last thousand tokens.
"""

from math import exp
from typing import Any

from extproc.poll.metrics_text import EngineFigures
from extproc.replica_state import ReplicaState

_NEARLY_FULL = 0.9  # fraction of the KV cache above which requests may be waiting for KV space
_STEPS = 3  # between two polls, at least: in fewer, sequences that begin or end count for much
_MOST_PER_STEP = 8.0  # tokens of a sequence from a step, at most: longer drafts are seldom right
_MEMORY = 1000.0  # generated tokens over which a ratio loses two thirds of its weight


def batch_fields(before: ReplicaState, now: EngineFigures | ReplicaState) -> dict[str, Any]:
    """Fields of a ``ReplicaState`` that describe the batch.

    ``before``: what the last poll of the same process told; a blank state for a new process.
    """
    most = max(before.most_running, now.running)
    limit = before.max_num_seqs if most == before.most_running else 0
    if most in (before.running, now.running) and _is_full(before, now):
        limit = most
    return {
        "most_running": most,
        "max_num_seqs": limit,
        "tokens_per_step": _tokens_per_step(before, now),
    }


def _is_full(before: ReplicaState, now: EngineFigures | ReplicaState) -> bool:
    """Return True if requests wait for a place in the batch, and for nothing else.

    Requests that wait in one poll alone may have come a moment ago. While a prompt is prefilled,
    requests wait for the token budget instead: then one running sequence gets no token in a step,
    hence the margin of half a sequence a step.
    """
    waiting = all(one.waiting > 0 and one.kv_usage < _NEARLY_FULL for one in (before, now))
    steps = now.steps - before.steps
    decoded = now.generated_tokens - before.generated_tokens
    decoded -= now.accepted_tokens - before.accepted_tokens
    begun = now.first_tokens - before.first_tokens
    run = steps * (before.running + now.running) / 2.0 + begun
    return waiting and steps >= _STEPS and decoded > run - steps / 2.0


def _tokens_per_step(before: ReplicaState, now: EngineFigures | ReplicaState) -> float:
    """Tokens that a sequence gets from a step. Accepted drafts include those beyond the end of an
    answer, so short answers overstate the figure."""
    generated = now.generated_tokens - before.generated_tokens
    if generated <= 0.0:
        return before.tokens_per_step
    accepted = now.accepted_tokens - before.accepted_tokens
    latest = min(max(1.0 - accepted / generated, 1.0 / _MOST_PER_STEP), 1.0)
    steps_per_token = 1.0 / before.tokens_per_step
    steps_per_token += (1.0 - exp(-generated / _MEMORY)) * (latest - steps_per_token)
    return 1.0 / steps_per_token
