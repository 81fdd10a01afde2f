"""What came out, in sentences."""

from collections.abc import Iterator, Sequence

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
from benchmarks.report.units import ratio, ratios, seconds

_TOLD = (
    "Warning: requests told how long their answers would be (max_tokens with ignore_eos), which "
    "callers seldom do: whoever predicts from them predicts better than with yours."
)


def outcome(results: Results, contenders: Sequence[Contender]) -> list[str]:
    """Where the contender that matters wins and where it loses; what failed."""
    told = [_TOLD] if results.about.get("known_lengths") else []
    said = comparison(results, contenders)
    return said + told + _failures(contenders) + _warnings(results)


def comparison(results: Results, contenders: Sequence[Contender]) -> list[str]:
    """The contender that matters beside the best of the others, and which turns are in doubt."""
    return list(_comparison(results, contenders))


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


def _comparison(results: Results, contenders: Sequence[Contender]) -> Iterator[str]:
    subject, others = rivals(contenders, results.ours)
    if subject is None:
        yield f"{results.ours[0]} has no run: nothing is compared."
    elif not any(spread(subject, metric) for metric in METRICS):
        yield f"{subject.name}: no request was answered."
    else:
        yield from _about(subject, others)
    doubtful = [f"{one.name} in {of_turns(one)}" for one in contenders if one.doubtful]
    if doubtful:
        yield f"In doubt: {', '.join(doubtful)}. Comparisons leave these turns out."


def of_turns(one: Contender) -> str:
    """How many of a contender's turns are in doubt."""
    return f"{len(one.doubtful)} of {len(one.runs)} turn{'s' * (len(one.runs) > 1)}"


def _about(subject: Contender, others: Sequence[Contender]) -> Iterator[str]:
    headlines = [one for one in METRICS if one.headline]
    compared = [beside_best(subject, others, metric) for metric in headlines]
    for metric, beside in zip(headlines, compared, strict=True):
        its = spread(subject, metric)
        if beside is not None:
            yield _beside(subject, metric, beside)
        elif its is not None:
            yield f"{metric.name}: {seconds(its.median)}."
    if others and not any(compared):
        yield f"Nothing is compared: in no turn are both {subject.name} and another without doubt."


def _beside(subject: Contender, metric: Metric, beside: Beside) -> str:
    return (
        f"{metric.name}: {subject.name} is {ratio(beside.ratio.median)} the best other "
        f"({', '.join(beside.names)}), {_verdict(beside)}. "
        f"{seconds(beside.mine.median)} against {seconds(beside.best.median)}."
    )


def _verdict(beside: Beside) -> str:
    turns = beside.ratio.turns
    if turns == 1:
        return "in one turn, which shows no spread"
    spread = ratios(beside.ratio.least, beside.ratio.most)
    where = f" ({spread})" if spread else ""
    if beside.better is None:
        return f"better in {beside.less} of {turns} turns{where}: no clear difference"
    return f"{'better' if beside.better else 'worse'} in all {turns} turns{where}"


def _failures(contenders: Sequence[Contender]) -> list[str]:
    failed = [f"{one.name} {one.failed:,} of {one.counted:,}" for one in contenders if one.failed]
    if not failed:
        return []
    return [f"Failed requests: {', '.join(failed)}. Figures are of those answered."]


def _warnings(results: Results) -> list[str]:
    every = [(run.run.name, text) for run in results.runs for text in run.summary.warnings]
    return [f"Warning, {name}: {text}" for name, text in dict.fromkeys(every)]
