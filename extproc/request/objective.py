"""Objective, targets and session of a request, from its headers."""

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from math import inf
from typing import NamedTuple


class Objective(NamedTuple):
    """Aims of a request: its place among others, and targets in seconds since it came."""

    name: str = ""  # in the configuration; empty: none of those
    priority: int = 0  # of requests that wait, those of a higher one go first
    sheddable: bool = False  # refused where it would miss a target
    ttft_s: float = inf  # until the first token; infinite, as the others: no such target
    tpot_s: float = inf  # for each further token, on average
    completion_s: float = inf  # until the last token

    @property
    def has_target(self) -> bool:
        """The request has a target that it could miss."""
        return self.ttft_s < inf or self.bounds_end

    @property
    def bounds_end(self) -> bool:
        """A target bounds the time to decode."""
        return min(self.tpot_s, self.completion_s) < inf

    def due_s(self, decode: float) -> float:
        """Seconds since the request came after which its first token is late.

        ``decode``: seconds it takes from there to its last token.
        """
        return min(self.ttft_s, self.completion_s - decode)


NO_OBJECTIVE = Objective()

OBJECTIVE = "x-llm-d-inference-objective", "x-gateway-inference-objective"
FAIRNESS_ID = "x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id"
"""llm-d's name, and the extension's, which llm-d still takes (``pkg/epp/metadata/consts.go``)."""
TARGETS = {
    "x-slo-ttft-ms": "ttft_s",
    "x-slo-tpot-ms": "tpot_s",
    "x-llm-d-slo-ttft-ms": "ttft_s",
    "x-llm-d-slo-tpot-ms": "tpot_s",
}  # header → target; of two headers for one target the last counts


def first_of(names: Iterable[str], headers: Mapping[str, str]) -> str:
    """The value of the first of these headers that is there; empty: none is."""
    return next((headers[name] for name in names if name in headers), "")


def targets_of(headers: Mapping[str, str]) -> dict[str, float]:
    """The targets that headers name, in seconds; values that are no time are passed over, as by
    llm-d."""
    named = {target: headers[name] for name, target in TARGETS.items() if name in headers}
    return {target: time for target, text in named.items() if (time := _seconds(text))}


def _seconds(milliseconds: str) -> float | None:
    try:
        seconds = float(milliseconds) / 1e3
    except ValueError:
        return None
    return seconds if 0.0 < seconds < inf else None


def session_of(headers: Mapping[str, str], header: str | None, cookie: str | None) -> str:
    """The session's id in the header or, where that is absent, in the cookie; empty: none."""
    named = headers.get(header.lower(), "") if header else ""
    if named or cookie is None:
        return named
    cookies = (one.strip().partition("=") for one in headers.get("cookie", "").split(";"))
    return next((value for name, _, value in cookies if name == cookie), "")


def session_key(session: str, model: str) -> str:
    """The key of a session and one of the models it uses: each model has a replica of its own.

    Keys are digests, for an id may be a secret, and of any length; keys go through Redis.
    """
    return blake2b(f"{model}\n{session}".encode(), digest_size=16).hexdigest()
