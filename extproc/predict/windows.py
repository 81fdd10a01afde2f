"""Stretches of an engine's work whose beginning and end the counters tell exactly."""

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from operator import add, sub
from typing import NamedTuple

SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Lengths of the windows. Short ones tell apart what differs from moment to moment, long ones are
exact."""
_SHORTEST, _LONGEST = 0.8, 1.3  # a window may be shorter or longer than it should by this factor
_WARMING_UP = 1.0  # steps of an engine's life that tell nothing: it compiles most kernels for them
_DIP = 0.1
"""Largest fraction by which computed tokens fall where cached tokens are counted before the prompt
they belong to; a larger fall is an error of a counter."""
_DECODING = 0.95
"""Share of the tokens that a batch without prefill would have generated, from which on there was
none: a sequence in prefill generates nothing."""


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """What one poll read, at one time."""

    at: float  # seconds, on the poller's clock
    steps: float
    computed_tokens: float  # prompt tokens prefilled, cached ones not counted
    generated_tokens: float  # without drafted ones: as many as sequences took part in steps
    in_flight: int  # requests running and waiting
    kv_tokens: float  # in use
    finished: float = 0.0  # requests finished
    first_tokens: float = 0.0  # sequences with a first token
    prefill_s: float = 0.0  # seconds of these from their admission to their first token
    decode_s: float = 0.0  # seconds of these from their first token to their last
    prompt_tokens: float = 0.0  # cached ones included
    early: bool = False  # cached tokens count at admission, all others when the prefill ends


Terms = tuple[float, ...]
"""Steps, prompt tokens prefilled, tokens generated, and KV tokens summed over the steps. Of four
numbers Python makes a sum in a quarter of the time that numpy takes."""
_NOTHING: Terms = (0.0, 0.0, 0.0, 0.0)


class Work(NamedTuple):
    """What an engine did in a stretch of time without a pause."""

    seconds: float
    terms: Terms

    def times(self, factor: float) -> "Work":
        return Work(self.seconds * factor, tuple([term * factor for term in self.terms]))

    def plus(self, more: "Work") -> "Work":
        return Work(self.seconds + more.seconds, tuple(map(add, self.terms, more.terms)))


class Windows:
    """Finds, poll by poll, the stretches that a step-time model can be learned from.

    vLLM counts the tokens of a prompt when its prefill ends. A stretch that ends in the middle of a
    prefill took time for tokens that are not counted yet, and taking the count as it is makes
    prefill look cheap and steps dear: by tens of percent where prompts are long. So a stretch
    begins and ends at polls that are settled: a prompt has just been counted, or none is in
    prefill. (vLLM up to 0.15 counts cached tokens at admission: there, none is in prefill.) And it
    holds no pause: the engine is never seen idle, nor can it have been in between.

    A request that an engine served alone between two idle polls is two stretches, its prefill and
    its decoding, by vLLM's own times.
    """

    def __init__(self) -> None:
        self._last: EngineCounts | None = None
        self._idle: EngineCounts | None = None  # the last poll of an idle engine
        self._now = _NOTHING  # terms since the last pause
        self._settled: deque[tuple[float, Terms]] = deque()  # when, and the terms until then

    def poll(self, counts: EngineCounts) -> list[Work]:
        """The stretches to learn from that end with this poll, after one that spans the latest of
        them: all since the last settled poll, or a lone request."""
        last, self._last = self._last, counts
        if last is None or _paused(last, counts):
            self._now = _NOTHING
            self._settled.clear()
            return self._lone(counts)
        step = _terms(last, counts)
        self._now = tuple(map(add, self._now, step))
        if not _settled(last, counts, step):
            return []
        found = self._stretches(counts.at)
        self._settled.append((counts.at, self._now))
        return found

    def interrupted(self) -> None:
        """A poll failed: nothing is known of the time from the last one to the next."""
        self._last = self._idle = None

    def _lone(self, counts: EngineCounts) -> list[Work]:
        if counts.in_flight:
            return []
        before, self._idle = self._idle, counts
        if before is None or not _served_one(before, counts):
            return []
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
        if end - chosen[0][0] > SECONDS[-1]:  # a prompt that takes longer than any window
            chosen.append(chosen[0])
        return [Work(end - at, tuple(map(sub, self._now, terms))) for at, terms in chosen]

    def _nearest(self, wanted: float) -> tuple[float, Terms]:
        after = bisect_left(self._settled, (wanted,))
        if after in (0, len(self._settled)):
            return self._settled[max(after - 1, 0)]
        earlier, later = self._settled[after - 1], self._settled[after]
        return earlier if wanted - earlier[0] <= later[0] - wanted else later


def _served_one(before: EngineCounts, counts: EngineCounts) -> bool:
    """True if one request began and ended, and no other was aborted."""
    finished = counts.finished - before.finished
    return finished == counts.first_tokens - before.first_tokens == 1.0


def warms_up(before: float, after: float) -> bool:
    """True if the engine's first step lies between two counts of its steps; an engine that counts
    no steps never warms up."""
    return before < _WARMING_UP and after > 0.0


def _paused(last: EngineCounts, counts: EngineCounts) -> bool:
    """Whether the engine restarted, was idle, or may have been in between, or a counter fell."""
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
    if counts.early:  # a prompt in prefill may have more cached tokens than all others computed
        same = (last.in_flight, last.finished) == (counts.in_flight, counts.finished)
        return same and steps > 0 and generated >= steps * batch
    return computed > 0 or (steps > 0 and generated >= _DECODING * steps * batch)
