"""Line types of a traffic record, which holds no text of prompts or answers."""

from base64 import b64decode, b64encode
from math import inf
from typing import Any

import numpy as np
from msgspec import Struct

from extproc.replica_state import ReplicaState
from extproc.request.prefix import Keys, token_keys

FORMAT = 2  # version of the lines below; no other version is read
PATTERN = "*.jsonl"  # names of a record's files
_HALF_BITS = 32

OF_PROFILE = (
    *("endpoint", "model", "output_bound", "least_output", "sequences", "prompts"),
    *("longest_share", "stream", "session"),
)
"""Fields of a :class:`RequestLine` that a request's profile has under the same name."""


class _Line(Struct, frozen=True, omit_defaults=True, tag_field="kind"):
    at: float  # seconds since the epoch


class StartLine(_Line, frozen=True, tag="start"):
    """First line of a file. This file and the following files have every request from the time of
    this line on, except those that a :class:`LostLine` counts."""

    format: int
    pool: str = ""
    config: dict[str, Any] = {}  # settings that decisions depend on


class ReplicaLine(_Line, frozen=True, tag="replica"):
    """State of a replica from this time on; None if the replica left the pool.

    The ``learned`` of the state has the step times that predictions used. Fields that what-if does
    not need have their defaults: ``scrape_seconds``, ``life_s``, ``kv_update``.
    """

    id: str
    state: ReplicaState | None = None
    token_budget: float = 0.0
    max_num_seqs: float = 0.0
    tokens_per_step: float = 1.0


class RequestLine(_Line, frozen=True, tag="request"):
    """Request that a replica served or that the router refused; ``at``: its arrival."""

    endpoint: str
    model: str
    replica: str  # `ip:port` that served the request; empty: no replica
    seconds: float  # from dispatch to the end of the stream
    prompt_tokens: int  # as the replica reported, else as estimated
    estimated_tokens: int
    refused: str = ""  # why no replica got the request
    queued_s: float = 0.0  # in the router's queue, before dispatch
    ttft_s: float | None = None  # since dispatch; None: the router did not see the first token
    complete: bool = False  # the router saw the end of the response, not only of the stream
    cut: bool = False  # the client hung up while the router read the response
    failed: bool = False  # no answer, an error, or work in the background, which is not seen
    output_tokens: float = 0.0  # of each sequence, as reported, else counted by steps
    output_bound: int | None = None
    least_output: int = 0
    sequences: int = 1
    prompts: int = 1
    longest_share: float = 1.0
    stream: bool = False
    tenant: str = ""  # a hash, like the session
    session: str = ""
    objective: str = ""
    priority: int = 0
    ttft_target_s: float = inf
    tpot_target_s: float = inf
    completion_target_s: float = inf
    keys: str = ""  # this and the next four fields: a Prefix with the upper halves of its keys
    unit: float = 0.0
    whole: int = 0
    previous_key: int = 0
    previous_tokens: float = 0.0


class RefusedLine(_Line, frozen=True, tag="refused"):
    """Request that the router refused without a profile: its body could not be read."""

    why: str


class LostLine(_Line, frozen=True, tag="lost"):
    """Requests without a line, because the disk was full or too slow; ``at``: approximate time."""

    requests: int  # upper bound: a failed write may have stored some lines


Line = StartLine | ReplicaLine | RequestLine | RefusedLine | LostLine


def upper(key: int) -> int:
    """Return the upper half of a key. Four billion keys share an upper half, so that nobody can
    infer a prompt."""
    return key >> _HALF_BITS


def text_of(keys: Keys) -> str:
    """Encode the upper halves of a prompt's keys, 4 bytes each."""
    return b64encode((keys >> np.uint64(_HALF_BITS)).astype("<u4").tobytes()).decode()


def keys_of(text: str) -> Keys:
    """Decode the result of :func:`text_of`, and hash the upper halves into new keys. Key n of two
    prompts is equal if their first n upper halves are equal.

    Raises:
        ValueError: ``text`` is no base64.
    """
    return token_keys(np.frombuffer(b64decode(text, validate=True), "<u4"), 1, 0)
