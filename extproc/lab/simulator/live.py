"""Simulated engine that runs in real time, and the lateness of its steps."""

import asyncio
from bisect import bisect_left
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import count
from math import ceil
from typing import Any, NamedTuple, NoReturn

from extproc.ground.clock import monotonic
from extproc.lab.simulator import tokens
from extproc.lab.simulator.engine import Engine
from extproc.lab.simulator.metrics import Metrics
from extproc.lab.simulator.steps import FinishReason, Histogram, Sequence, StepOutcome

_BOUNDS_S = (
    *(0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0),
)
MAX_LAG_S = 1.0  # longest delay that the engine makes up for by running steps back to back


class Lateness:
    """Delays from the due end of each step to its actual end.

    A simulated step ends late if its process gets no CPU. Reports show the lateness, so that
    figures from an overloaded machine can be recognized.
    """

    def __init__(self) -> None:
        self._late = Histogram(_BOUNDS_S)
        self._most = 0.0
        self._lost = 0.0

    def delivered(self, late_s: float) -> None:
        """Count a step whose tokens were delivered ``late_s`` seconds after its due end."""
        self._late.observe(late_s)
        self._most = max(self._most, late_s)
        self._lost += max(late_s - MAX_LAG_S, 0.0)  # which later steps do not make up

    def to_json(self) -> dict[str, Any]:
        """Return the lateness as JSON, in seconds. The p99 is the upper bound of a bucket, so it
        may be up to twice the true value."""
        steps = self._late.count
        nth = bisect_left(self._late.cumulative(), ceil(0.99 * steps))
        p99 = min([*_BOUNDS_S, self._most][nth], self._most)
        late = {"mean": self._late.sum / max(steps, 1), "p99": p99, "max": self._most}
        return {"steps": steps, "late_s": late, "lost_s": self._lost}


class TokenUsage(NamedTuple):
    """Token counts of a request."""

    prompt: int
    completion: int
    cached: int  # prompt tokens taken from the prefix cache


@dataclass(frozen=True, slots=True)
class GeneratedAnswer:
    """Answer to a request: the tokens of one sequence."""

    sequence: Sequence
    bound: int  # most tokens to generate; 0: only the prompt is computed
    start: int  # index of the answer's first word in the vocabulary

    @property
    def text(self) -> str:
        return tokens.generated_text(self.start, self.sequence.generated)


class Token(NamedTuple):
    """Tokens that an answer got from one step."""

    answer: int  # index of the answer
    text: str
    reason: FinishReason | None  # None: the answer continues


class Generation:
    """Generation of the answers to a request; each prompt gets ``choices`` answers."""

    def __init__(self, answers: list[GeneratedAnswer], choices: int, streamed: bool) -> None:
        self.answers = answers
        self.choices = choices
        self._streamed = streamed
        self._left = len(answers)
        self._tokens: list[Token] = []
        self._changed = asyncio.Event()

    def usage(self) -> TokenUsage:
        """Count the tokens so far. A prompt counts once, however many choices it has."""
        prompts = [answer.sequence for answer in self.answers[:: self.choices]]
        return TokenUsage(
            prompt=sum(sequence.prompt_tokens for sequence in prompts),
            completion=sum(answer.sequence.generated for answer in self.answers),
            cached=sum(sequence.cached_tokens for sequence in prompts),
        )

    def longest(self) -> list[int]:
        """Return the number of tokens in the longest answer to each prompt."""
        generated = [answer.sequence.generated for answer in self.answers]
        starts = range(0, len(generated), self.choices)
        return [max(generated[start : start + self.choices]) for start in starts]

    @property
    def complete(self) -> bool:
        return not self._left

    async def stream(self) -> AsyncIterator[list[Token]]:
        """Yield the tokens as they are generated; a slow reader gets the tokens of several steps at
        once."""
        while self._left or self._tokens:
            await self._changed.wait()
            self._changed.clear()
            batch, self._tokens = self._tokens, []
            yield batch

    async def done(self) -> None:
        await self._changed.wait()

    def add_tokens(self, index: int, count: int) -> None:
        """Add the last ``count`` tokens of answer ``index``; a stream sends them together."""
        if self._streamed:
            answer, sequence = self.answers[index], self.answers[index].sequence
            reason = sequence.reason if sequence.finished is not None else None
            text = tokens.generated_text(answer.start + sequence.generated - count, count)
            self._tokens.append(Token(index, text, reason))
            self._changed.set()

    def end(self) -> None:
        self._left -= 1
        if not self._left:
            self._changed.set()


class LiveEngine:
    """Engine that :meth:`run` steps in real time."""

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self.engine = engine
        self.lateness = Lateness()
        self._metrics = metrics
        self._owners: dict[int, tuple[Generation, int]] = {}  # by sequence id
        self.ids = count(1)  # of sequences
        self._arrival = asyncio.Event()
        self.working = asyncio.Event()  # cleared while the engine hangs
        self.working.set()

    def submit(self, generation: Generation) -> None:
        now = monotonic()
        for index, answer in enumerate(generation.answers):
            self.engine.add(answer.sequence, now)
            self._owners[answer.sequence.id] = (generation, index)
        self._arrival.set()

    def abort(self, generation: Generation) -> None:
        now = monotonic()
        for answer in generation.answers:
            if self._owners.pop(answer.sequence.id, None):
                self.engine.abort(answer.sequence, now)

    def sleep(self, level: int) -> None:
        """Abort all requests, and begin no step until :meth:`wake`."""
        for generation, index in [*self._owners.values()]:
            sequence = generation.answers[index].sequence
            self.engine.abort(sequence, monotonic())
            generation.add_tokens(index, 0)
            self._end(sequence)
        self.engine.sleep(level)

    def wake(self) -> None:
        self.engine.sleep_level = None
        self._arrival.set()

    @property
    def unfinished(self) -> int:
        return len(self._owners)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of all sequences without a first token."""
        unanswered = (each for each in self.engine.queued if each.first_token is None)
        return sum(sequence.prompt_tokens for sequence in unanswered)

    async def run(self) -> NoReturn:
        """Run steps until cancelled. Each step begins when the step before was due to end, so that
        delays do not add up."""
        now = monotonic()
        while True:
            while (step := self.engine.schedule(now)) is None:
                self._arrival.clear()
                await self._arrival.wait()
                now = monotonic()
            await asyncio.sleep(max(0.0, step.ends_at - monotonic()))
            await self.working.wait()
            self._deliver(self.engine.complete(), step.ends_at - step.starts_at)
            self.lateness.delivered(max(monotonic() - step.ends_at, 0.0))
            now = max(step.ends_at, monotonic() - MAX_LAG_S)

    def _deliver(self, outcome: StepOutcome, duration: float) -> None:
        self._metrics.observe("inter_token_latency_seconds", duration, len(outcome.decoded))
        for sequence in (*outcome.decoded, *outcome.prefilled):
            if sequence.output_tokens:
                generation, index = self._owners[sequence.id]
                generation.add_tokens(index, 1 + outcome.accepted.get(sequence.id, 0))
        for sequence in outcome.first:
            self._metrics.first_token(sequence)
        for sequence in outcome.finished:
            answer = self._end(sequence)
            self._metrics.sequence_finished(sequence, answer.bound)

    def _end(self, sequence: Sequence) -> GeneratedAnswer:
        """End a sequence; the last one of a request adds the request's prompts to the metrics."""
        generation, index = self._owners.pop(sequence.id)
        generation.end()
        if generation.complete:
            for longest in generation.longest():
                self._metrics.observe("request_max_num_generation_tokens", longest)
                self._metrics.observe("request_params_n", generation.choices)
        return generation.answers[index]
