"""Lines of a record of traffic, without the text of prompts or answers."""

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
    """Beginning of a file: all later requests are in this file or the next ones, but for those
    that :class:`Lost` counts."""

    format: int
    pool: str
    config: dict[str, Any]  # the settings of decisions


class Replica(_Line, frozen=True, tag="replica"):
    """State of a replica from now on: its fields that differ from the default, with the step times
    of predictions as ``learned``; None: the replica left."""

    id: str
    state: dict[str, Any] | None = None
    token_budget: float = 0.0
    max_num_seqs: float = 0.0
    tokens_per_step: float = 1.0


class Request(_Line, frozen=True, tag="request"):
    """Request that was sent to a replica, and has ended; ``at``: its arrival."""

    endpoint: str
    model: str
    replica: str  # `ip:port` that served it
    seconds: float  # from when it was sent to the end of its stream
    prompt_tokens: int  # as the replica reported them, or else as estimated
    estimated_tokens: int
    waited_s: float = 0.0  # before it was sent
    ttft_s: float | None = None  # since it was sent; None: not seen
    complete: bool = False  # the router saw the end of the answer; else only the end of the stream
    cut: bool = False  # the answer was read and did not end: the client left
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
    keys: str = ""  # from here on the fields of Prefix, with the upper halves of keys
    unit: float = 0.0
    whole: int = 0
    asked: int = 0
    answered: float = 0.0


class Refused(_Line, frozen=True, tag="refused"):
    """Request that was not sent anywhere."""

    why: str


class Lost(_Line, frozen=True, tag="lost"):
    """Requests without a line, as the disk was full or too slow; ``at``: about when."""

    requests: int  # at most: a part of a failed write may be there


Line = Start | Replica | Request | Refused | Lost


def upper(key: int) -> int:
    """Keep half of a key, as 4e9 others have it, too: the hash of a whole key can be inverted."""
    return key >> _HALF


def text_of(keys: Keys) -> str:
    """Encode the upper halves of a prompt's keys, 4 bytes each."""
    return b64encode((keys >> np.uint64(_HALF)).astype("<u4").tobytes()).decode()


def keys_of(text: str) -> Keys:
    """Make whole keys: others than before, but equal where all halves up to there are.

    Raises:
        ValueError: not made by :func:`text_of`.
    """
    return token_keys(np.frombuffer(b64decode(text, validate=True), "<u4"), 1, 0)
