"""What came out, in sentences."""

from collections.abc import Sequence

from benchmarks.report.figures import (
    METRICS,
    Beside,
    Contender,
    Metric,
    beside_best,
    rivals,
    spread,
)
from benchmarks.report.results import Overhead, Results
from benchmarks.report.units import ratio, seconds


def outcome(results: Results, contenders: Sequence[Contender]) -> list[str]:
    """Where the contender that matters wins and where it loses; what failed."""
    subject, others = rivals(contenders, results.ours)
    said = [_one(subject, others, metric) for metric in METRICS if metric.headline]
    said = [one for one in said if one] or [f"{subject.name}: no request was answered."]
    return said + _failures(contenders) + _warnings(results)


def added(overhead: Overhead) -> list[str]:
    """Latency beyond the first setup's, and what failed."""
    alone, *others = overhead.setups
    return [
        f"{one.name.removeprefix('+ ')}: adds {one.rate.p50_ms - alone.rate.p50_ms:.1f} ms at p50 "
        f"and {one.rate.p99_ms - alone.rate.p99_ms:.1f} ms at p99 to {alone.name}, and answers "
        f"{one.requests_per_s:,.0f} requests a second."
        for one in others
    ] + [
        f"{one.name}: {one.failed:,} requests FAILED; its figures are of those answered."
        for one in overhead.setups
        if one.failed
    ]


def _one(subject: Contender, others: Sequence[Contender], metric: Metric) -> str:
    its = spread(subject, metric)
    if its is None:
        return ""
    beside = beside_best(subject, others, metric)
    if beside is None:
        return f"{metric.name}: {seconds(its.median)}."
    return (
        f"{metric.name}: {subject.name} is {ratio(beside.ratio.median)} the best of the rest "
        f"({_range(beside)}) – {_verdict(beside)}. "
        f"{seconds(its.median)} against {seconds(beside.its.median)} of {beside.name}."
    )


def _verdict(beside: Beside) -> str:
    if beside.overlap:
        return "no difference shown, the spreads overlap"
    return "better" if beside.ratio.median < 1 else "worse"


def _range(beside: Beside) -> str:
    of = beside.ratio
    if of.repeats == 1:
        return "one repeat: no spread is known"
    return f"{of.low:.2f} – {of.high:.2f} over {of.repeats} repeats"


def _failures(contenders: Sequence[Contender]) -> list[str]:
    failed = [f"{one.name} {one.failed:,} of {one.counted:,}" for one in contenders if one.failed]
    if not failed:
        return []
    return [f"Failed requests: {', '.join(failed)}. Figures are of those answered."]


def _warnings(results: Results) -> list[str]:
    every = [(run.run.name, text) for run in results.runs for text in run.summary.warnings]
    return [f"Warning, {name}: {text}" for name, text in dict.fromkeys(every)]
