"""The lines of a record of traffic: what is in them, and nothing of what was asked or answered."""

from base64 import b64decode, b64encode
from math import inf
from typing import Any

import numpy as np
from msgspec import Struct

from extproc.request.prefix import Keys, token_keys

FORMAT = 2  # of the lines below; another one is not read
PATTERN = "*.jsonl"  # names of its files
_HALF = 32


class _Line(Struct, frozen=True, omit_defaults=True, tag_field="kind"):
    at: float  # seconds since the epoch


class Start(_Line, frozen=True, tag="start"):
    """A router began to write, or began another file: what it decides by. All requests that came
    from then on are in this file or a later one, but for those that :class:`Lost` tells of."""

    format: int
    pool: str
    config: dict[str, Any]  # of its configuration, what it decides by


class Replica(_Line, frozen=True, tag="replica"):
    """What is known of a replica from now on."""

    id: str
    state: dict[str, Any] | None = None
    """Fields of :class:`~extproc.replica_state.ReplicaState` that are not as usual, with the step
    times that predictions are made with as ``learned``; None: it left."""
    token_budget: float = 0.0
    max_num_seqs: float = 0.0
    tokens_per_step: float = 1.0


class Request(_Line, frozen=True, tag="request"):
    """A request that was sent to a replica, and has ended; ``at`` is when it came."""

    endpoint: str
    model: str
    replica: str  # `ip:port` that served it
    seconds: float  # from when it was sent to the end of its stream
    prompt_tokens: int  # as the replica reported them, or else as estimated
    estimated_tokens: int
    waited_s: float = 0.0  # before it was sent
    ttft_s: float | None = None  # since it was sent; None: not seen
    complete: bool = False
    """Whether the end of its answer was seen; else the stream was over, and no more is known."""
    cut: bool = False  # whether its answer was read, and did not end: the client left
    failed: bool = False
    output_tokens: float = 0.0  # of each sequence, as reported, or else as steps were counted
    output_bound: int | None = None
    least_output: int = 0
    sequences: int = 1
    prompts: int = 1
    longest_share: float = 1.0
    stream: bool = False
    tenant: str = ""  # hashed, as is the session
    session: str = ""
    objective: str = ""
    priority: int = 0
    ttft_target_s: float = inf
    tpot_target_s: float = inf
    completion_target_s: float = inf
    keys: str = ""
    """Of the prompt's beginnings, as :func:`text_of` writes them; these and the next as in
    :class:`~extproc.request.prefix.Prefix`, but only the :func:`upper` halves of keys."""
    unit: float = 0.0
    whole: int = 0
    asked: int = 0
    answered: float = 0.0


class Refused(_Line, frozen=True, tag="refused"):
    """A request that was not sent anywhere."""

    why: str


class Lost(_Line, frozen=True, tag="lost"):
    """Requests have no line, as the disk was full or too slow; ``at``: up to when, or since when,
    about."""

    requests: int  # how many, at most: of what failed to be written a part may have been


Line = Start | Replica | Request | Refused | Lost


def upper(key: int) -> int:
    """What is written of a key. From whole ones what was hashed could be computed, for they are
    made to be fast; half of one is the same for four thousand million others."""
    return key >> _HALF


def text_of(keys: Keys) -> str:
    """The upper halves of a prompt's keys, 4 bytes each."""
    return b64encode((keys >> np.uint64(_HALF)).astype("<u4").tobytes()).decode()


def keys_of(text: str) -> Keys:
    """Whole keys again: others, but equal where all halves up to there are.

    Raises:
        ValueError: it is no such text.
    """
    return token_keys(np.frombuffer(b64decode(text, validate=True), "<u4"), 1, 0)
