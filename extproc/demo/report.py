"""What two runs of the same requests under two policies came to."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from extproc.demo.journal import Entry
from extproc.demo.traffic import Answer
from extproc.layout import Column, table

_Percentiles = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Run:
    """Requests sent under one policy, and what is known of them."""

    answers: list[Answer]
    entries: Mapping[str, Entry]
    """By request id."""
    names: Mapping[str, str]
    """``ip:port`` → name of the replica."""

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
    def completion_s(self) -> _Percentiles:
        """Of the seconds to the end of an answer."""
        return percentiles([answer.completion_s for answer in self.answers if answer.ok])

    @property
    def ttft_s(self) -> _Percentiles:
        """Of the seconds to the first token, of the streamed answers."""
        return percentiles([one.ttft_s for one in self.answers if one.ok and one.ttft_s])

    @property
    def added_ms(self) -> _Percentiles:
        """Of the milliseconds requests waited for the router, as Envoy counts them."""
        waits = [entry.access.added_ms for entry in self._known() if entry.access]
        return percentiles([wait for wait in waits if wait is not None])

    @property
    def predicted_error_median(self) -> float | None:
        """Median of \\|predicted - actual\\| ÷ actual completion."""
        return percentiles(
            [
                abs(entry.decision.predicted_completion_s / answer.completion_s - 1.0)
                for answer in self.answers
                if answer.ok
                and (entry := self.entries.get(answer.request_id))
                and entry.decision is not None
            ]
        )["p50"]

    def failure(self, policy: str) -> str:
        """Why it did not show what it should, under a policy of that name; empty when it did."""
        sent = len(self.answers)
        if self.ok < sent:
            problem = next(answer.account for answer in self.answers if not answer.ok)
            return f"under {policy}, {sent - self.ok} of {sent} requests failed: {problem}"
        if self.fallback:
            return f"under {policy}, Envoy's fallback served {self.fallback} of {sent} requests"
        if self.routed < sent:
            return f"under {policy}, {sent - self.routed} of {sent} requests were not routed"
        return ""

    def to_json(self) -> dict[str, Any]:
        """The figures that both runs have; seconds as the names say."""
        names = ("ok", "routed", "fallback", "per_replica", "completion_s", "ttft_s")
        return {name: getattr(self, name) for name in names}

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
        return self.run.failure("the default policy") or self.round_robin.failure("round_robin")

    def to_json(self) -> dict[str, Any]:
        """The figures; seconds and milliseconds as the names say."""
        added_ms = self.run.added_ms
        return {
            "requests": len(self.run.answers),
            **self.run.to_json(),
            "predicted_error_median": self.run.predicted_error_median,
            "added_ms_p50": added_ms["p50"],
            "added_ms_p99": added_ms["p99"],
            "ready_s": self.ready_s,
            "round_robin": self.round_robin.to_json(),
            "p99_ratio": self.p99_ratio,
        }

    def __str__(self) -> str:
        """Both runs side by side, and what follows."""
        runs = (self.run, self.round_robin)
        rows = [
            ["answered", *(str(run.ok) for run in runs)],
            ["routed / by fallback", *(f"{run.routed} / {run.fallback}" for run in runs)],
        ]
        for title, name in (("completion", "completion_s"), ("first token", "ttft_s")):
            for at in ("p50", "p99"):
                rows.append([f"{title} {at}", *(_seconds(getattr(run, name)[at]) for run in runs)])
        for replica in self.run.per_replica:
            rows.append([f"served by {replica}", *(str(run.per_replica[replica]) for run in runs)])
        title = f"{len(self.run.answers)} requests"
        columns = [Column(title, left=True), Column("default"), Column("round_robin")]
        return "\n".join([*table(columns, rows), "", *self._conclusions()])

    def _conclusions(self) -> list[str]:
        lines, added_ms = [], self.run.added_ms
        if self.p99_ratio is not None:
            lines.append(f"p99 completion: {self.p99_ratio:.1f} times as long under round_robin")
        if (error := self.run.predicted_error_median) is not None:
            lines.append(
                f"prediction error: {error:.0%} in the median, the answers' lengths being unknown"
            )
        if (p50 := added_ms["p50"]) is not None:
            p99 = added_ms["p99"]
            lines.append(f"the router adds {p50:.1f} ms in the median, {p99:.1f} ms at p99")
        return lines


def percentiles(values: list[float]) -> _Percentiles:
    """``p50`` and ``p99``; None of no values."""
    if not values:
        return {"p50": None, "p99": None}
    p50, p99 = np.percentile(values, (50, 99))
    return {"p50": float(p50), "p99": float(p99)}


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
