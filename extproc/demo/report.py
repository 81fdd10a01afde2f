"""What two runs of the same requests under two policies came to."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from extproc.demo.journal import Entry, ReplicaNow
from extproc.demo.traffic import Answer


class FleetLoad:
    """How busy each replica was, from samples of the fleet."""

    def __init__(self) -> None:
        self._samples: list[dict[str, ReplicaNow]] = []

    def sample(self, fleet: dict[str, ReplicaNow]) -> None:
        """Take the fleet as it is now, by name."""
        self._samples.append(fleet)

    def busy(self, name: str) -> float:
        """Share of the samples in which the replica had work, 0…1."""
        return self._mean(float(one[name].running > 0) for one in self._samples if name in one)

    def running(self, name: str) -> float:
        """Requests running on the replica, on average."""
        return self._mean(one[name].running for one in self._samples if name in one)

    @staticmethod
    def _mean(values: Iterable[float]) -> float:
        listed = list(values)
        return sum(listed) / len(listed) if listed else 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """Requests sent under one policy, and what is known of them."""

    answers: list[Answer]
    entries: Mapping[str, Entry]
    """By request id."""
    names: Mapping[str, str]
    """``ip:port`` → name of the replica."""
    load: FleetLoad

    @property
    def ok(self) -> int:
        """Requests with a whole answer."""
        return sum(answer.ok for answer in self.answers)

    @property
    def routed(self) -> int:
        """Requests served by a replica the router named."""
        return sum(entry.routed for entry in self._known())

    @property
    def fallback(self) -> int:
        """Requests whose replica Envoy chose, without the router."""
        return sum(entry.fallback for entry in self._known())

    @property
    def per_replica(self) -> dict[str, int]:
        """Requests served, by replica."""
        served = Counter(entry.access.upstream for entry in self._known() if entry.access)
        return {name: served[address] for address, name in self.names.items()}

    @property
    def completion_s(self) -> dict[str, float | None]:
        """Percentiles of the seconds to the end of an answer."""
        return percentiles([answer.completion_s for answer in self.answers if answer.ok])

    @property
    def ttft_s(self) -> dict[str, float | None]:
        """Percentiles of the seconds to the first token, of the streamed answers."""
        return percentiles([one.ttft_s for one in self.answers if one.ok and one.ttft_s])

    @property
    def added_ms(self) -> dict[str, float | None]:
        """Percentiles of the milliseconds requests waited for the router, as Envoy counts them."""
        waits = [entry.access.added_ms for entry in self._known() if entry.access]
        return percentiles([wait for wait in waits if wait is not None])

    @property
    def predicted_error_median(self) -> float | None:
        """Median of \\|predicted - actual\\| ÷ actual completion."""
        return percentiles(
            [
                abs(entry.decision.predicted_completion_s - answer.completion_s)
                / answer.completion_s
                for answer in self.answers
                if answer.ok
                and (entry := self.entries.get(answer.request_id))
                and entry.decision is not None
            ]
        )["p50"]

    def _known(self) -> list[Entry]:
        found = (self.entries.get(answer.request_id) for answer in self.answers)
        return [entry for entry in found if entry is not None]


@dataclass(frozen=True, slots=True)
class Report:
    """The default policy beside round robin."""

    ready_s: float
    run: Run
    round_robin: Run

    @property
    def p99_ratio(self) -> float | None:
        """p99 completion under round robin ÷ under the default policy."""
        ours, theirs = self.run.completion_s["p99"], self.round_robin.completion_s["p99"]
        return theirs / ours if ours and theirs else None

    @property
    def failure(self) -> str:
        """Why the demo did not show what it should; empty when it did."""
        for policy, run in (("the default policy", self.run), ("round_robin", self.round_robin)):
            sent = len(run.answers)
            if run.ok < sent:
                problem = next(answer.account for answer in run.answers if not answer.ok)
                return f"under {policy}, {sent - run.ok} of {sent} requests failed: {problem}"
            if run.fallback:
                return f"under {policy}, Envoy's fallback served {run.fallback} of {sent} requests"
            if run.routed < sent:
                return f"under {policy}, {sent - run.routed} of {sent} requests were not routed"
        return ""

    def to_json(self) -> dict[str, Any]:
        """The figures; seconds and milliseconds as the names say."""
        run, other = self.run, self.round_robin
        return {
            "requests": len(run.answers),
            "ok": run.ok,
            "routed": run.routed,
            "fallback": run.fallback,
            "predicted_error_median": run.predicted_error_median,
            "added_ms_p50": run.added_ms["p50"],
            "added_ms_p99": run.added_ms["p99"],
            "ready_s": self.ready_s,
            "per_replica": run.per_replica,
            "completion_s": run.completion_s,
            "ttft_s": run.ttft_s,
            "round_robin": {
                "ok": other.ok,
                "routed": other.routed,
                "fallback": other.fallback,
                "per_replica": other.per_replica,
                "completion_s": other.completion_s,
                "ttft_s": other.ttft_s,
            },
            "p99_ratio": self.p99_ratio,
        }


def percentiles(values: list[float]) -> dict[str, float | None]:
    """``p50`` and ``p99``; None of no values."""
    if not values:
        return {"p50": None, "p99": None}
    p50, p99 = np.percentile(values, (50, 99))
    return {"p50": float(p50), "p99": float(p99)}
