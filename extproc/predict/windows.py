"""Windows: stretches of an engine's uninterrupted work that its counters measure exactly."""

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from operator import add, sub
from typing import NamedTuple

SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Lengths of the windows. Short windows tell the coefficients apart, because their mix of prefill
and decode varies; long windows are exact."""
_SHORTEST, _LONGEST = 0.8, 1.3  # bounds of a window's actual ÷ nominal length
_WARMING_UP = 1.0  # number of an engine's first steps to skip, in which it compiles kernels
_DIP = 0.1
"""Fraction by which ``computed_tokens`` (prompt − cached) may fall between two polls, because vLLM
up to 0.15 counts cached tokens before their prompt. A larger fall is a wrong reading."""
_DECODING = 0.95
"""Generated tokens ÷ (steps × batch) above which no sequence was in prefill: a sequence in prefill
generates nothing."""


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """Counters and gauges of an engine at one poll."""

    at: float  # seconds, on the poller's clock
    steps: float
    computed_tokens: float  # prompt tokens prefilled, without cached tokens
    generated_tokens: float  # without accepted drafts: one per sequence and step
    in_flight: int  # requests running and waiting
    kv_tokens: float  # in use
    finished: float = 0.0  # requests finished
    first_tokens: float = 0.0  # sequences with a first token
    prefill_s: float = 0.0  # sum of the times from admission to the first token
    decode_s: float = 0.0  # sum of the times from the first token to the last
    prompt_tokens: float = 0.0  # cached tokens included
    cached_early: bool = False
    """vLLM up to 0.15: cached tokens are counted at admission, the prompt when its prefill ends."""


Terms = tuple[float, ...]
"""Steps, prompt tokens prefilled, tokens generated, and KV tokens summed over the steps. A tuple,
because Python adds four numbers in a quarter of numpy's time."""
_NOTHING: Terms = (0.0, 0.0, 0.0, 0.0)


class Work(NamedTuple):
    """Work of an engine in a stretch of time in which the engine was never idle."""

    seconds: float
    terms: Terms

    def times(self, factor: float) -> "Work":
        return Work(self.seconds * factor, tuple([term * factor for term in self.terms]))

    def plus(self, more: "Work") -> "Work":
        return Work(self.seconds + more.seconds, tuple(map(add, self.terms, more.terms)))


class Windows:
    """Finds, poll by poll, the stretches of work that a step-time model can learn from.

    vLLM counts the tokens of a prompt when its prefill ends. While a prompt is in prefill, the
    engine has spent time on tokens that are not counted yet. A stretch that ended then would make
    prefill look cheap and steps expensive, by tens of percent if prompts are long. Therefore a
    stretch begins and ends at a *settled* poll. A poll is settled if, since the poll before, a
    prompt was counted or no prompt was in prefill. (With vLLM up to 0.15, which counts cached
    tokens at admission, a poll is settled only if no prompt was in prefill.) A stretch contains no
    pause: no poll in it found the engine idle, and the counters rule out that the engine was idle
    between two polls.

    A solo request, which the engine served alone between two idle polls, gives two stretches,
    prefill and decode, with the times that vLLM measured.
    """

    def __init__(self) -> None:
        self._last: EngineCounts | None = None
        self._idle: EngineCounts | None = None  # the last poll that found the engine idle
        self._now = _NOTHING  # terms since the last pause
        self._settled: deque[tuple[float, Terms]] = deque()  # by settled poll: time, and `_now`

    def poll(self, counts: EngineCounts) -> list[Work]:
        """Returns the stretches that end with this poll; empty if the poll ends none.

        The first stretch is the most recent work: the work since the last settled poll, or a whole
        solo request. The step times are learned from the other stretches, which overlap.
        """
        last, self._last = self._last, counts
        if last is None or _paused(last, counts):
            self._now = _NOTHING
            self._settled.clear()
            return self._solo_request(counts)
        step = _terms(last, counts)
        self._now = tuple(map(add, self._now, step))
        if not _settled(last, counts, step):
            return []
        found = self._stretches(counts.at)
        self._settled.append((counts.at, self._now))
        return found

    def interrupted(self) -> None:
        """Notes a failed poll: no stretch spans the gap between the polls before and after."""
        self._last = self._idle = None

    def _solo_request(self, counts: EngineCounts) -> list[Work]:
        if counts.in_flight:
            return []
        before, self._idle = self._idle, counts
        if before is None:
            return []
        finished = counts.finished - before.finished
        if not finished == counts.first_tokens - before.first_tokens == 1.0:
            return []  # more requests or none, or a request was aborted
        steps, computed, generated, _ = _terms(before, counts)
        later = max(generated - 1.0, 0.0)
        if warms_up(before.steps, counts.steps) or steps <= later or computed <= 0.0:
            return []
        prompt = counts.prompt_tokens - before.prompt_tokens
        prefill = (steps - later, computed, generated - later, 0.0)
        decode = (later, 0.0, later, later * (prompt + later / 2))
        works = [
            Work(counts.prefill_s - before.prefill_s, prefill),
            Work(counts.decode_s - before.decode_s, decode),
        ]
        whole = works[0].plus(works[1])
        if min(works).seconds < 0.0 or not 0.0 < whole.seconds <= counts.at - before.at:
            return []
        return [whole, *(work for work in works if work.seconds > 0.0)]

    def _stretches(self, end: float) -> list[Work]:
        while len(self._settled) > 1 and end - self._settled[0][0] > SECONDS[-1] * _LONGEST:
            self._settled.popleft()
        if not self._settled:
            return []
        chosen = [self._settled[-1]]
        for seconds in SECONDS:
            nearest = self._nearest(end - seconds)
            fits = _SHORTEST <= (end - nearest[0]) / seconds <= _LONGEST
            if fits and all(nearest is not other for other in chosen[1:]):
                chosen.append(nearest)
        if end - chosen[0][0] > SECONDS[-1]:  # one prefill took longer than the longest window
            chosen.append(chosen[0])
        return [Work(end - at, tuple(map(sub, self._now, terms))) for at, terms in chosen]

    def _nearest(self, wanted: float) -> tuple[float, Terms]:
        after = bisect_left(self._settled, (wanted,))
        if after in (0, len(self._settled)):
            return self._settled[max(after - 1, 0)]
        earlier, later = self._settled[after - 1], self._settled[after]
        return earlier if wanted - earlier[0] <= later[0] - wanted else later


def warms_up(before: float, after: float) -> bool:
    """True if the engine made its first step between these two step counts; False for an engine
    that does not count steps."""
    return before < _WARMING_UP and after > 0.0


def _paused(last: EngineCounts, counts: EngineCounts) -> bool:
    """True if between two polls the engine restarted or may have been idle, or a counter fell."""
    return (
        warms_up(last.steps, counts.steps)
        or counts.steps < last.steps
        or counts.generated_tokens < last.generated_tokens
        or counts.computed_tokens < last.computed_tokens - _DIP * abs(last.computed_tokens)
        or counts.in_flight == 0
        or counts.finished - last.finished >= last.in_flight
    )


def _terms(last: EngineCounts, counts: EngineCounts) -> Terms:
    steps = counts.steps - last.steps
    return (
        steps,
        counts.computed_tokens - last.computed_tokens,
        counts.generated_tokens - last.generated_tokens,
        steps * (last.kv_tokens + counts.kv_tokens) / 2,
    )


def _settled(last: EngineCounts, counts: EngineCounts, terms: Terms) -> bool:
    steps, computed, generated, _ = terms
    batch = max(last.in_flight, counts.in_flight)
    if counts.cached_early:  # cached tokens of a prompt in prefill distort `computed`
        same = (last.in_flight, last.finished) == (counts.in_flight, counts.finished)
        return same and steps > 0 and generated >= steps * batch
    return computed > 0 or (steps > 0 and generated >= _DECODING * steps * batch)
