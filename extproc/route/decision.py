"""A decision: what it is made from, what was chosen, and what is kept until the request ends."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from extproc.fleet.prefixes import Held
from extproc.predict.completion import AdapterTimes, Prediction, work
from extproc.predict.inputs import NO_SEQUENCES, FleetView, Floats, Sequences, usual_step
from extproc.request.prefix import NO_PREFIX
from extproc.request.profile import RequestProfile


@dataclass(slots=True)
class Situation:
    """A request and the fleet at the moment of a decision."""

    profile: RequestProfile
    view: FleetView
    held: Held
    prediction: Prediction
    sequences: Sequences  # in flight on the candidates; good until the fleet changes
    random: Random
    turns: dict[int, int]  # round_robin numbers its choices here, by row of the fleet's table
    adapter: AdapterTimes | None = None  # for a request for a LoRA adapter
    late: Floats | None = None  # from lateness(); None: the request has no target

    @property
    def cached_share(self) -> Floats:
        """Share of the prompt that each candidate should have in its prefix cache, 0…1.

        By what was sent there alone, as other routers know it.
        """
        return self.held.expected / max(self.profile.prompt_tokens, 1)


@dataclass(slots=True)
class Choice:
    """Choice of a policy or of an override; indices are of the view."""

    policy: str
    first: int
    scores: Floats  # per candidate, lower is better; the policy defines the unit
    reason: Callable[["Choice"], str]  # for people; made only when somebody looks

    @property
    def second(self) -> int | None:
        return runner_up(self.scores, self.first)


def runner_up(scores: Floats, first: int) -> int | None:
    """The index of the lowest score but for ``first``; None where no other is finite."""
    others = scores.copy()
    others[first] = np.inf
    second = int(others.argmin())
    return second if others[second] < np.inf else None


@dataclass(slots=True)
class Forecast:
    """Part of a decision that is kept until its request ends: the figures of the replica chosen.

    The comparison of a thousand replicas takes a quarter of a megabyte, and thousands of requests
    may be in flight.
    """

    profile: RequestProfile
    replica: str  # ip:port
    predicted_ttft: float
    predicted_completion: float
    decode_time_per_token: float  # seconds, before the correction of its decode time
    expected_hits: float  # this and the next as in Held
    hits_depth: int
    adapter_load: float  # seconds to load its LoRA adapter, unless it waits for others before
    adapter_wait: float  # seconds until there is a place in the batch for it
    adapter_overrun: float  # as in AdapterTimes
    stretch: float  # correction of its decode time, in the completion
    usual_step: float  # seconds, as in usual_step()
    step: float  # seconds of a step with what decoded then
    first_step_s: float | None  # to the first token by steps alone; None where it waits for others


@dataclass(slots=True)
class Decision:
    """Replica that gets a request, and everything the choice was made from."""

    situation: Situation
    choice: Choice
    p90_output_tokens: float  # nine of ten sequences like its own generate no more
    second: str | None = None  # ip:port for a retry
    name: str = ""  # of its model on the replica chosen; empty: as the request has it
    news_age: float | None = None
    """Seconds since the newest news of other routers was sent; None where there are no others."""
    fallback: str = ""  # why others' requests did not count, in a few words

    @property
    def policy(self) -> str:
        return self.choice.policy

    @property
    def why(self) -> str:
        """The reason for people, in words and figures; worked out anew each time."""
        reason = self.choice.reason(self.choice)
        return f"{self.fallback}: {reason}" if self.fallback else reason

    @property
    def replica(self) -> str:
        return self.situation.view.ids[self.choice.first]

    @property
    def profile(self) -> RequestProfile:
        return self.situation.profile

    @property
    def prediction(self) -> Prediction:
        return self.situation.prediction

    @property
    def wait_s(self) -> float:
        """Seconds that the request is expected to wait at the router; 0: it can start now."""
        return self.prediction.queue.item(self.choice.first)

    @property
    def cached(self) -> float:
        """Tokens of the prompt that the replica should have in its prefix cache."""
        return self.prediction.cached.item(self.choice.first)

    @property
    def predicted_ttft(self) -> float:
        return self.prediction.ttft.item(self.choice.first)

    @property
    def predicted_completion(self) -> float:
        return self.prediction.completion.item(self.choice.first)

    @property
    def work_s(self) -> float:
        """Replica-seconds for which the request keeps the replica chosen busy by itself."""
        return work(self.profile, self.prediction, self.situation.view, self.choice.first)

    def drop_large_parts(self) -> None:
        """Drop what is of no use once the decision is carried out, for it is kept for long:
        thousands of sequences in flight take 100 kB, as the token ids of a long prompt do."""
        self.situation.sequences = NO_SEQUENCES
        prefix = self.profile.prefix
        if len(prefix.ids):
            known = replace(prefix, ids=NO_PREFIX.ids)
            self.situation.profile = replace(self.profile, prefix=known)

    def forecast(self) -> Forecast:
        first, situation, prediction = self.choice.first, self.situation, self.prediction
        view, adapter = situation.view, situation.adapter
        wait = 0.0 if adapter is None else adapter.wait.item(first)
        stretch = view.stretch.item(first)
        later = max(prediction.output_tokens - 1.0, 1.0)
        waits = view.backlog.item(first) > 0.0 or prediction.admission.item(first) > 0.0
        by_steps = not waits and adapter is None and not self.profile.fetches
        return Forecast(
            self.profile,
            self.replica,
            self.predicted_ttft,
            self.predicted_completion,
            prediction.decode.item(first) / stretch / later,
            situation.held.expected.item(first),
            situation.held.depths.item(first),
            0.0 if adapter is None or wait else adapter.load.item(first),
            wait,
            1.0 if adapter is None else adapter.overrun,
            stretch,
            usual_step(view, first),
            view.decode_step.item(first),
            self.predicted_ttft - prediction.beside.item(first) if by_steps else None,
        )
