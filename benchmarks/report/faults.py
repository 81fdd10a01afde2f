"""Effects of a fault in the middle of a turn on the requests of a contender."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.report.figures import Contender
from benchmarks.report.results import Results, Run

HEAD = (
    *("hit", "lost", "elsewhere", "later", "until s", "slowest s"),
    *("before: mean", "p99", "after: mean", "p99"),
)
_TERMS = (
    "Failed requests: lost, of those hit; elsewhere, of the others that were in flight; later, of "
    "those sent afterwards, the last of them until so long after the fault. Slowest: from sending "
    "to the end, good or bad. Before and after: completion of the answered requests that were "
    "sent before and after the fault, without those hit. !: some turns are in doubt."
)


@dataclass(frozen=True, slots=True)
class Harm:
    """In one turn; times in seconds."""

    hit: int  # requests that were in flight on the part when the fault fell
    lost: int  # those of them that failed
    elsewhere: int  # others in flight then that failed
    later: int  # requests sent afterwards that failed
    until_s: float | None  # when the last of these was sent, after the fault
    slowest_s: float | None  # of the requests that ended after the fault, failed ones too
    before_s: list[float]  # completions of requests sent before and not hit
    after_s: list[float]  # completions of requests sent afterwards

    @property
    def failed(self) -> int:
        return self.lost + self.elsewhere + self.later


def harm(run: Run) -> Harm:
    assert run.fault
    at_s = run.fault.at_s
    hit = [one for one in run.counted if one.struck]
    before = [one for one in run.counted if one.sent_s <= at_s and not one.struck]
    after = [one for one in run.counted if one.sent_s > at_s]
    late = [one.sent_s - at_s for one in after if not one.answered]
    ends = [(one.sent_s, one.ended_s) for one in run.counted]
    return Harm(
        hit=len(hit),
        lost=sum(not one.answered for one in hit),
        elsewhere=sum(not one.answered and (one.ended_s or 0.0) > at_s for one in before),
        later=len(late),
        until_s=max(late, default=None),
        slowest_s=max((end - sent for sent, end in ends if end and end > at_s), default=None),
        before_s=[one.completion_s for one in before if one.answered and one.completion_s],
        after_s=[one.completion_s for one in after if one.answered and one.completion_s],
    )


def rows(results: Results, every: Sequence[Contender]) -> Iterator[list[str]]:
    """Rows of name and figures: counts are sums over turns, ``until`` and ``slowest`` the most of
    any turn, other times medians.
    """
    for one in every:
        name = f"{one.name} !" if one.doubtful else one.name
        yield [name, *_cells([harm(run) for run in one.runs if run.fault])]
    for name in results.without_part:
        yield [f"{name}: has none", *["–"] * len(HEAD)]


def what(results: Results) -> str:
    """Sentence on the fault, and the terms of the table."""
    assert results.fault
    part, _, way = results.fault.name.partition("-")
    there = "all that were in flight" if part == "picker" else "requests in flight on it"
    return f"{part} {way} after {results.fault.at_s:g} s. Hit: {there} then. {_TERMS}"


def _cells(turns: Sequence[Harm]) -> Iterator[str]:
    for count in ("hit", "lost", "elsewhere", "later"):
        yield f"{sum(getattr(one, count) for one in turns):,}"
    for most in ("until_s", "slowest_s"):
        yield _seconds([max((getattr(one, most) or 0.0 for one in turns), default=0.0)])
    for sent in ("before_s", "after_s"):
        completions = [times for one in turns if (times := getattr(one, sent))]
        yield _seconds([float(np.mean(times)) for times in completions])
        yield _seconds([float(np.percentile(times, 99)) for times in completions])


def _seconds(values: Sequence[float]) -> str:
    return f"{np.median(values):.2f}" if any(values) else "–"
