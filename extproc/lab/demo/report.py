"""Report of ``extproc demo --once``: the same requests under two policies."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from extproc.ground.text import Column, table
from extproc.lab.demo.journal import Entry
from extproc.lab.harness.traffic import Answer
from extproc.lab.replay.figures import distribution

_Percentiles = dict[str, float | None]


@dataclass(frozen=True)
class Run:
    """Requests sent under a policy."""

    answers: list[Answer]
    entries: list[Entry]  # of the answers whose end Envoy has logged
    names: Mapping[str, str]  # `ip:port` → name of the replica

    @cached_property
    def figures(self) -> dict[str, Any]:
        """Counts of requests, by outcome and by replica; completion and TTFT in seconds."""
        whole = [answer for answer in self.answers if answer.ok]
        served = Counter(entry.access.upstream for entry in self.entries)
        return {
            "ok": len(whole),
            "routed": sum(entry.routed for entry in self.entries),
            "fallback": sum(entry.fallback for entry in self.entries),
            "per_replica": {name: served[address] for address, name in self.names.items()},
            "completion_s": percentiles([answer.completion_s for answer in whole]),
            "ttft_s": percentiles([answer.ttft_s for answer in whole if answer.ttft_s]),
        }

    @property
    def added_ms(self) -> _Percentiles:
        """Percentiles of the requests' wait for the router in milliseconds, from Envoy's log."""
        waits = [entry.access.added_ms for entry in self.entries]
        return percentiles([wait for wait in waits if wait is not None])

    @property
    def predicted_error_median(self) -> float | None:
        """Median relative error of the predicted completion times; 0.1: off by 10%."""
        decisions = {entry.access.request_id: entry.decision for entry in self.entries}
        errors = [
            abs(predicted / answer.completion_s - 1.0)
            for answer in self.answers
            if answer.ok
            and (decision := decisions.get(answer.request_id))
            and (predicted := decision.predicted_completion_s) is not None
        ]
        return percentiles(errors)["p50"]

    def failure(self, policy: str) -> str:
        """Return the run's problem in words; empty if all requests were answered and routed."""
        sent = len(self.answers)
        ok, routed, fallback = (self.figures[name] for name in ("ok", "routed", "fallback"))
        if ok < sent:
            problem = next(answer.account for answer in self.answers if not answer.ok)
            return f"under {policy}, {sent - ok} of {sent} requests failed: {problem}"
        if fallback:
            return f"under {policy}, Envoy's fallback served {fallback} of {sent} requests"
        if routed < sent:
            return f"under {policy}, {sent - routed} of {sent} requests were not routed"
        return ""


@dataclass(frozen=True, slots=True)
class Report:
    """Runs of the same requests under the default policy and under round robin."""

    ready_s: float
    run: Run
    round_robin: Run

    @property
    def p99_ratio(self) -> float | None:
        """p99 completion under round robin ÷ p99 completion under the default policy."""
        runs = self.run, self.round_robin
        default, round_robin = (run.figures["completion_s"]["p99"] for run in runs)
        return round_robin / default if default and round_robin else None

    @property
    def failure(self) -> str:
        return self.run.failure("the default policy") or self.round_robin.failure("round_robin")

    def to_json(self) -> dict[str, Any]:
        added_ms = self.run.added_ms
        return {
            "requests": len(self.run.answers),
            **self.run.figures,
            "predicted_error_median": self.run.predicted_error_median,
            "added_ms_p50": added_ms["p50"],
            "added_ms_p99": added_ms["p99"],
            "ready_s": self.ready_s,
            "round_robin": self.round_robin.figures,
            "p99_ratio": self.p99_ratio,
        }

    def __str__(self) -> str:
        runs = self.run.figures, self.round_robin.figures
        rows = [
            ["answered", *(str(run["ok"]) for run in runs)],
            ["routed / by fallback", *(f"{run['routed']} / {run['fallback']}" for run in runs)],
        ]
        rows += [
            [f"{title} {at}", *(_seconds(run[name][at]) for run in runs)]
            for title, name in (("completion", "completion_s"), ("first token", "ttft_s"))
            for at in ("p50", "p99")
        ]
        rows += [
            [f"served by {replica}", *(str(run["per_replica"][replica]) for run in runs)]
            for replica in runs[0]["per_replica"]
        ]
        title = f"{len(self.run.answers)} requests"
        columns = [Column(title, left=True), Column("default"), Column("round_robin")]
        return "\n".join([*table(columns, rows), "", *self._conclusions()])

    def _conclusions(self) -> Iterator[str]:
        if self.p99_ratio is not None:
            yield f"p99 completion: {self.p99_ratio:.1f} times as long under round_robin"
        if (error := self.run.predicted_error_median) is not None:
            yield f"prediction error: {error:.0%} in the median, with unknown answer lengths"
        p50, p99 = self.run.added_ms.values()
        if p50 is not None:
            yield f"the router adds {p50:.1f} ms in the median, {p99:.1f} ms at p99"


def percentiles(values: list[float]) -> _Percentiles:
    """``p50`` and ``p99``; both None without values."""
    found = distribution(values) or {}
    return {name: found.get(name) for name in ("p50", "p99")}


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
