"""Objective, targets and session of a request, from its headers."""

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from math import inf
from typing import NamedTuple


class Objective(NamedTuple):
    """Priority of a request, and its targets in seconds."""

    name: str = ""  # in the configuration; empty: not configured
    priority: int = 0  # queued requests of a higher priority go first
    sheddable: bool = False  # refused if the request would miss a target
    ttft_s: float = inf  # until the first token; infinite, here and below: no target
    tpot_s: float = inf  # for each token after the first, on average
    completion_s: float = inf  # until the last token

    @property
    def has_target(self) -> bool:
        return self.ttft_s < inf or self.bounds_end

    @property
    def bounds_end(self) -> bool:
        """True if the objective has a target for the time per token or to the last token."""
        return min(self.tpot_s, self.completion_s) < inf

    def due_s(self, decode: float) -> float:
        """Return the latest time for the first token, in seconds after the arrival, at which both
        first and last token meet their targets. ``decode``: seconds between these two tokens."""
        return min(self.ttft_s, self.completion_s - decode)


NO_OBJECTIVE = Objective()

OBJECTIVE = "x-llm-d-inference-objective", "x-gateway-inference-objective"
FAIRNESS_ID = "x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id"
"""Headers of the objective and the tenant. Of each pair, the first name is llm-d's, the second is
that of the Gateway API Inference Extension; llm-d accepts both (``pkg/epp/metadata/consts.go``)."""
TARGETS = {
    "x-slo-ttft-ms": "ttft_s",
    "x-slo-tpot-ms": "tpot_s",
    "x-llm-d-slo-ttft-ms": "ttft_s",
    "x-llm-d-slo-tpot-ms": "tpot_s",
}  # header → target; of two headers for one target the last counts


def first_of(names: Iterable[str], headers: Mapping[str, str]) -> str:
    """Return the value of the first header in ``names`` that is present, or an empty string."""
    return next((headers[name] for name in names if name in headers), "")


def targets_of(headers: Mapping[str, str]) -> dict[str, float]:
    """Return the targets in the headers, in seconds. Like llm-d, ignore values that are no positive
    number."""
    named = {target: headers[name] for name, target in TARGETS.items() if name in headers}
    return {target: time for target, text in named.items() if (time := _seconds(text))}


def _seconds(milliseconds: str) -> float | None:
    try:
        seconds = float(milliseconds) / 1e3
    except ValueError:
        return None
    return seconds if 0.0 < seconds < inf else None


def session_of(headers: Mapping[str, str], header: str | None, cookie: str | None) -> str:
    """Return the session's id from the header, else from the cookie, else an empty string."""
    session = headers.get(header.lower(), "") if header else ""
    if session or cookie is None:
        return session
    cookies = (pair.strip().partition("=") for pair in headers.get("cookie", "").split(";"))
    return next((value for name, _, value in cookies if name == cookie), "")


def session_key(session: str, model: str) -> str:
    """Return the key under which a session's replica for this model is stored.

    The key is a hash, because keys go through Redis and an id may be a secret, or very long.
    """
    return blake2b(f"{model}\n{session}".encode(), digest_size=16).hexdigest()
