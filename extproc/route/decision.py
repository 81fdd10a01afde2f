"""Decision: its inputs, the choice, and the forecast that is kept until the request ends."""

from collections.abc import Callable
from functools import cached_property
from random import Random

import numpy as np
from msgspec import Struct, structs
from numpy.typing import NDArray

from extproc.fleet.prefix_index import PrefixHits
from extproc.predict.completion import AdapterTimes, Prediction, work
from extproc.predict.inputs import NO_SEQUENCES, FleetView, Floats, Sequences, usual_step
from extproc.request.prefix import NO_PREFIX
from extproc.request.profile import RequestProfile


class Situation(Struct, eq=False):
    """A request and the fleet at the moment of a decision."""

    profile: RequestProfile
    view: FleetView
    held: PrefixHits
    prediction: Prediction
    p90_output_tokens: float  # 90th percentile of the output tokens of one sequence of the request
    sequences: Sequences  # in flight on the candidates; valid until the fleet changes
    random: Random
    turns: dict[int, int]  # row of the fleet's table → number of the last decision for it
    adapter: AdapterTimes | None = None  # for a request for a LoRA adapter
    peers_age_s: float | None = None  # age of other routers' newest digest; None: no other routers
    waited: float = 0.0  # seconds in the queue so far
    optional: NDArray[np.bool_] | None = None  # as in RoomWait; None: no wait was predicted
    late: Floats | None = None  # from lateness(); None: the request has no targets

    @property
    def among_others(self) -> bool:
        """True if another router of the pool is known."""
        return self.peers_age_s is not None

    @property
    def cached_share(self) -> Floats:
        """Share of the prompt, 0…1, that each candidate should have in its prefix cache.

        The share is not multiplied by the trust in the prefix index, because the routers from which
        the policies come know no such factor.
        """
        return self.held.expected / max(self.profile.prompt_tokens, 1)

    @property
    def lost_by_its_rank(self) -> Floats:
        """Seconds that other requests lose on each candidate, without those of lower priority."""
        sequences, count = self.sequences, len(self.view)
        ranked = sequences.weight * (sequences.priority >= self.profile.priority)
        every = np.bincount(sequences.replica, sequences.weight, count)
        share = np.bincount(sequences.replica, ranked, count) / np.maximum(every, 1.0)
        return self.prediction.lost_by_others * share


class Choice(Struct, eq=False):
    """Choice of a policy or of an override: indices of candidates in the view."""

    policy: str
    first: int
    scores: Floats  # per candidate, lower is better; the policy defines the unit
    reason: Callable[["Choice"], str]  # for people; called only when somebody reads the reason
    bound: bool = False  # if the candidate has no room, the request waits for it alone

    @property
    def second(self) -> int | None:
        """Candidate with the lowest score except ``first``; None: no other score is finite."""
        others = self.scores.copy()
        others[self.first] = np.inf
        second = int(others.argmin())
        return second if others[second] < np.inf else None


class Forecast(Struct, eq=False):
    """Figures of the chosen replica, kept until the request ends.

    The decision itself is too large to keep for thousands of requests in flight: the figures of a
    thousand replicas take a quarter of a megabyte.
    """

    profile: RequestProfile
    replica: str  # ip:port
    predicted_ttft: float
    predicted_completion: float
    work_s: float  # seconds of the replica's time that the request uses up
    decode_time_per_token: float  # seconds, without ``stretch``
    expected_hits: float  # ``expected`` of PrefixHits
    predicts_hits: bool  # True: the index estimated the hits of one sequence: they test it
    adapter_load: float  # seconds to load the LoRA adapter; 0 if the adapter waits for a slot
    stretch: float  # learned ratio of actual to predicted decode time
    usual_step: float  # seconds, as in usual_step()
    step: float  # seconds of a decode step with the batch at the decision
    first_step_s: float | None  # seconds to the first token by steps; None: other causes delay it


class Decision(Struct, eq=False, dict=True):  # `cached_property` needs the dictionary
    """Chosen replica of a request, with all inputs of the choice."""

    situation: Situation
    choice: Choice
    second: str | None = None  # ip:port for a retry
    name: str = ""  # of the model on the chosen replica; empty: as requested
    fallback: str = ""  # why the load of other routers did not count

    @property
    def replica(self) -> str:
        """Address of the chosen replica, ``ip:port``."""
        return self.situation.view.ids[self.choice.first]

    @property
    def why(self) -> str:
        """Reason for the choice as text; composed anew at each access."""
        reason = self.choice.reason(self.choice)
        return f"{self.fallback}: {reason}" if self.fallback else reason

    @property
    def profile(self) -> RequestProfile:
        return self.situation.profile

    @property
    def prediction(self) -> Prediction:
        return self.situation.prediction

    @property
    def wait_s(self) -> float:
        """Seconds that the request is expected to wait at the router; 0: the request can start."""
        return self.prediction.queue.item(self.choice.first)

    @property
    def cached(self) -> float:
        """Tokens of the prompt that the chosen replica should have in its prefix cache."""
        return self.prediction.cached.item(self.choice.first)

    @property
    def predicted_ttft(self) -> float:
        """Seconds to the first token on the chosen replica."""
        return self.prediction.ttft.item(self.choice.first)

    @property
    def predicted_completion(self) -> float:
        """Seconds to the last token on the chosen replica."""
        return self.prediction.completion.item(self.choice.first)

    @cached_property
    def work_s(self) -> float:
        """Seconds of the chosen replica's time that the request uses up."""
        return work(self.profile, self.prediction, self.situation.view, self.choice.first)

    def on(self, replica: str) -> "Decision | None":
        """Return the decision as if the replica were chosen; None if it is no candidate."""
        ids = self.situation.view.ids
        if replica not in ids:
            return None
        choice = structs.replace(self.choice, first=ids.index(replica))
        return structs.replace(self, choice=choice)

    def drop_large_parts(self) -> None:
        """Drop large parts that nothing needs after the dispatch, because decisions and profiles
        are kept for long. A thousand sequences in flight take 100 kB, and so do the token ids of a
        long prompt."""
        self.situation.sequences = NO_SEQUENCES
        self.profile.prefix.ids = NO_PREFIX.ids

    def forecast(self) -> Forecast:
        first, situation = self.choice.first, self.situation
        view, prediction, adapter = situation.view, situation.prediction, situation.adapter
        ttft = prediction.ttft.item(first)
        load = 0.0
        if adapter is not None and not adapter.wait.item(first):
            load = adapter.load.item(first)
        stretch = view.stretch.item(first)
        later = max(prediction.output_tokens - 1.0, 1.0)
        waits = view.backlog.item(first) > 0.0 or prediction.admission.item(first) > 0.0
        by_steps = not waits and adapter is None and not situation.profile.fetches
        return Forecast(
            situation.profile,
            self.replica,
            ttft,
            prediction.completion.item(first),
            self.work_s,
            prediction.decode.item(first) / stretch / later,
            situation.held.expected.item(first),
            situation.held.estimated.item(first) and self.profile.sequences == 1,
            load,
            stretch,
            usual_step(view, first),
            view.decode_step.item(first),
            ttft - prediction.outside_steps.item(first) if by_steps else None,
        )
