"""One decision: the fleet as it is, a prediction for every candidate, a policy's choice."""

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np

from extproc.fleet.fleet import Ended, Fleet
from extproc.fleet.lone_requests import Baseline
from extproc.predict.completion import Prediction, add_adapter, add_queue_wait, predict, work
from extproc.predict.correction import Margins
from extproc.predict.firsthand import Served
from extproc.predict.inputs import (
    NO_SEQUENCES,
    FleetView,
    Floats,
    Sequences,
    least,
    most,
    usual_step,
)
from extproc.request.prefix import NO_PREFIX
from extproc.request.profile import RequestProfile
from extproc.route.backlog import Backlog, Place
from extproc.route.order import due_at
from extproc.route.overrides import ByPolicy, Chooser, Holder, Session, Target, lateness
from extproc.route.policies import POLICIES, Choice, Situation, runner_up
from extproc.route.reasons import seconds
from extproc.route.room import SOONEST_S, room_wait_s

_SMALL = 0.2
"""Share of a completion that an unseen first token may have, by prediction: where it has more, and
the prefix cache brought it far sooner, there is no telling how long the request decoded."""

_STEPS, _SHARE = 2.0, 0.02  # tokens, and share of an answer, by which the ledger may fall short


@dataclass(slots=True)
class Forecast:
    """What a decision said of the replica chosen: all that is kept of it until its request ends.

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
    """Which replica gets a request, and everything the choice was made from."""

    policy: str
    situation: Situation
    choice: Choice
    made_by: Chooser
    p90_output_tokens: float  # nine of ten sequences like its own generate no more
    name: str = ""  # of its model on the replica chosen; empty: as the request has it
    retry: int | None = None  # index of the second choice
    news_age: float | None = None
    """Seconds since the newest news of other routers was sent; None where there are no others."""
    stale: bool = False  # news_age is too high for others' load to count

    @property
    def fallback(self) -> str:
        """Why others' requests did not count, in a few words; empty where they did."""
        if not self.stale or self.news_age is None:
            return ""
        return f"news of other routers is {seconds(self.news_age)} old and does not count"

    @property
    def why(self) -> str:
        """The reason for people, in words and figures; worked out anew each time."""
        reason = self.made_by.why(self.situation, self.choice)
        return f"{self.fallback}: {reason}" if self.stale else reason

    @property
    def replica(self) -> str:
        return self.situation.view.ids[self.choice.first]

    @property
    def second(self) -> str | None:
        return None if self.retry is None else self.situation.view.ids[self.retry]

    @property
    def profile(self) -> RequestProfile:
        return self.situation.profile

    @property
    def prediction(self) -> Prediction:
        return self.situation.prediction

    @property
    def wait_s(self) -> float:
        """Seconds that the request is expected to wait at the router; 0: the replica can start
        it."""
        return self.prediction.queue.item(self.choice.first)

    @property
    def among_others(self) -> bool:
        """True if other routers send to the same replicas."""
        return self.news_age is not None

    @property
    def cached(self) -> float:
        """Tokens of the prompt that it is believed to have in its prefix cache."""
        return self.prediction.cached.item(self.choice.first)

    @property
    def predicted_ttft(self) -> float:
        return self.prediction.ttft.item(self.choice.first)

    @property
    def predicted_completion(self) -> float:
        return self.prediction.completion.item(self.choice.first)

    def forget_what_is_large(self) -> None:
        """Once it is carried out: a decision is kept for long, and thousands of sequences in flight
        take 100 kB, as the token ids of a long prompt do."""
        self.situation.sequences = NO_SEQUENCES
        prefix = self.profile.prefix
        if len(prefix.ids):
            known = replace(prefix, ids=NO_PREFIX.ids)
            self.situation.profile = replace(self.profile, prefix=known)

    def forecast(self) -> Forecast:
        first, situation, adapter = self.choice.first, self.situation, self.situation.adapter
        wait = 0.0 if adapter is None else adapter.wait.item(first)
        stretch = situation.view.stretch.item(first)
        later = max(self.prediction.output_tokens - 1.0, 1.0)
        return Forecast(
            situation.profile,
            self.replica,
            self.predicted_ttft,
            self.predicted_completion,
            self.prediction.decode.item(first) / stretch / later,
            situation.held.expected.item(first),
            situation.held.depths.item(first),
            0.0 if adapter is None or wait else adapter.load.item(first),
            wait,
            1.0 if adapter is None else adapter.overrun,
            stretch,
            usual_step(situation.view, first),
            situation.view.decode_step.item(first),
            self._by_steps(),
        )

    def _by_steps(self) -> float | None:
        situation, prediction, first = self.situation, self.prediction, self.choice.first
        waits = situation.view.backlog.item(first) > 0.0 or prediction.admission.item(first) > 0.0
        if waits or situation.adapter is not None or self.profile.fetches:
            return None
        return self.predicted_ttft - prediction.beside.item(first)


class Router:
    """Chooses replicas with one policy, or with another that a request asks for."""

    def __init__(
        self,
        fleet: Fleet,
        policy: str,
        random: Random,
        session_cost_s: float = 0.0,
        backlog: "Backlog[Any] | None" = None,
    ) -> None:
        """Start without a request.

        Args:
            fleet: what it chooses from.
            policy: name of the policy.
            random: breaks ties, and draws.
            session_cost_s: seconds by which a request may be finished later for staying with its
                session.
            backlog: what waits at the router; None: nothing ever does.
        """
        self.fleet = fleet
        self.margins = Margins()
        self._session_cost_s = session_cost_s
        self._backlog = backlog
        self._default = policy
        self._random = random
        self._policies = {name: ByPolicy(name) for name in POLICIES}
        self._turns = np.zeros(0)

    def decide(
        self,
        profile: RequestProfile,
        policy: str = "",
        among: frozenset[str] | None = None,
        told: bool = True,
        waited: float = 0.0,
        place: Place | None = None,
    ) -> Decision | None:
        """The decision for a request; None where no healthy replica is known.

        Args:
            profile: the request.
            policy: name of a policy for this request alone; one that does not exist is passed over.
            among: the only replicas that may be chosen, ``ip:port``; None: all.
            told: Envoy tells of its response, so that it may try a replica that failed.
            waited: seconds since it came, by which its targets are nearer.
            place: among those that wait; None: the last one of its tenant.
        """
        fleet = self.fleet
        view = fleet.view(profile.model, among, told, profile.priority)
        if profile.previous_response:
            view = self._with_holder(profile, view, among, told)
        if not len(view):
            return None
        expected, p90 = self._output(profile, view)
        held = fleet.held(profile.prefix, view)
        sequences = fleet.sequences(view)
        prediction = predict(profile, expected, view, sequences, held.cached)
        adapter = fleet.adapter_times(view)
        if adapter is not None:
            add_adapter(prediction, adapter)
        wait = self._wait_s(profile, prediction, p90, view, sequences, place)
        if wait is not None:
            add_queue_wait(prediction, wait, self._queued(view), view.batch)
        missing = len(fleet.members.by_row) - len(self._turns)
        if missing > 0:
            self._turns = np.append(self._turns, np.zeros(missing))
        situation = Situation(
            profile, view, held, prediction, sequences, self._random, self._turns, adapter
        )
        chooser = self._chooser(situation, policy, waited)
        choice = chooser.choose(situation)
        if wait is not None and not isinstance(chooser, Holder):
            at_once = place is not None and place.last_chance
            choice = _without_idle_wait(choice, prediction, at_once)
        model = fleet.members.name_on(view.ids[choice.first], profile.model)
        return Decision(
            chooser.name,
            situation,
            choice,
            chooser,
            p90,
            model,
            self._retry(situation, choice, model),
            fleet.peers.news_age,
            fleet.peers.stale,
        )

    def _wait_s(
        self,
        profile: RequestProfile,
        prediction: Prediction,
        p90: float,
        view: FleetView,
        sequences: Sequences,
        place: Place | None,
    ) -> Floats | None:
        """Seconds that the request would wait at the router for each candidate: until there is room
        for it, after those that go before; None where each can start it now."""
        backlog, peers = self._backlog, self.fleet.peers
        if backlog is None or peers.stale:
            return None
        among_others = peers.news_age is not None
        wait = room_wait_s(profile, prediction, p90, view, sequences, among_others)
        if wait is not None:
            wait *= self.fleet.tells_room(view.rows)
        if not backlog:
            return wait
        place = place or self._newest(profile, prediction, view)
        if wait is None:
            wait = np.zeros(len(view))
        for at in (wait <= 0.0).nonzero()[0].tolist():
            if backlog.reserves(view.rows.item(at), place):
                wait[at] = SOONEST_S
        return wait + backlog.ahead_s(view.rows, place) * (wait > 0.0)

    def _queued(self, view: FleetView) -> Floats | float:
        """Requests that wait at the router for each candidate."""
        return self._backlog.requests(view.rows) if self._backlog else 0.0

    def _newest(self, profile: RequestProfile, prediction: Prediction, view: FleetView) -> Place:
        objective, now = profile.objective, self.fleet.now
        best = int(prediction.completion.argmin())
        due_s = objective.due_s(prediction.decode.item(best))
        due = due_at(now, due_s, work(profile, prediction, view, best))
        return Place(profile.model, objective.priority, profile.tenant, now, due)

    def _with_holder(
        self, profile: RequestProfile, view: FleetView, among: frozenset[str] | None, told: bool
    ) -> FleetView:
        """The view; or one of the replica alone that holds the response that the request goes on
        from, where that is only held up: any other would answer 404."""
        holder = self.fleet.holder(profile.previous_response) or ""
        state = self.fleet.members.get(holder)
        if holder in view.ids or state is None or state.draining:
            return view
        only = frozenset({holder}) if among is None else among & {holder}
        alone = self.fleet.view(profile.model, only, told, profile.priority)
        return alone if len(alone) else view

    def late(self, decision: Decision, waited: float) -> float:
        """Seconds by which a request misses its targets at the least, if it is sent ``waited``
        seconds after it came; below zero: to spare."""
        objective = decision.profile.objective
        return least(lateness(objective, decision.prediction, self.margins, waited))

    def model(
        self, asked: str, previous_response: str, among: frozenset[str] | None, session: str = ""
    ) -> str:
        """The model that a request is for; empty where neither it nor the fleet says which.

        Of several, one is drawn by their weights: of those that the replica serves that holds the
        response it goes on from, or else of those that any replica does, now or when it is well
        again. For a session it is always the same.

        Args:
            asked: the name in the request.
            previous_response: its id; empty: there is none.
            among: as in :meth:`decide`.
            session: its id; empty: it has none.
        """
        fleet = self.fleet
        if not asked:
            return fleet.members.only_model or ""
        models = fleet.members.names.models(asked)
        if len(models) == 1:
            return models[0]
        held = fleet.members.models_on(fleet.holder(previous_response) or "")
        served = [one for one in models if fleet.members.names.known(one, held)]
        served = served or [one for one in models if fleet.eligibility.can_serve(one, among)]
        served = served or [one for one in models if one in fleet.members.models]
        draws = Random(session) if session else self._random
        return fleet.members.names.draw(asked, served, draws)

    def _retry(self, situation: Situation, choice: Choice, name: str) -> int | None:
        """The next best replica of those that know the model by the name that is sent."""
        fleet, model = self.fleet, situation.profile.model
        if fleet.members.names.served(model) == (model,):
            return choice.second
        alike = [name in fleet.members.models_on(one) for one in situation.view.ids]
        return runner_up(np.where(alike, choice.scores, np.inf), choice.first)

    def _chooser(self, situation: Situation, policy: str, waited: float) -> Chooser:
        profile = situation.profile
        if profile.previous_response:
            holder = self.fleet.holder(profile.previous_response)
            if holder in situation.view.ids:
                return Holder(holder)
        chooser: Chooser = self._policies.get(policy) or self._policies[self._default]
        if (objective := profile.objective).has_target:
            late = lateness(objective, situation.prediction, self.margins, waited)
            chooser = Target(late, chooser)
        home = self.fleet.sessions.holder(profile.session) if profile.session else None
        return chooser if home is None else Session(home, self._session_cost_s, chooser)

    def learn(
        self,
        forecast: Forecast,
        replica: str,
        tokens: float,
        seconds: float,
        ttft: float | None = None,
        baseline: Baseline | None = None,
        prompt_tokens: int | None = None,
    ) -> None:
        """A request ended, and its answer told its usage: learns how long answers are, and how fast
        the replica is.

        Args:
            forecast: what was said when it was sent.
            replica: ``ip:port`` that served it.
            tokens: generated by each of its sequences.
            seconds: from the decision to the last token.
            ttft: from the decision to the first token; None where that was not seen.
            baseline: from :meth:`~extproc.fleet.fleet.Fleet.release`, if it may have been alone.
            prompt_tokens: as reported; None: as estimated.
        """
        profile = forecast.profile
        if profile.sequences:
            self.fleet.lengths.observe(profile, tokens)
        self._learn_first_token(forecast, replica, ttft)
        if baseline is not None and _teaches_alone(forecast):
            prompt = profile.prompt_tokens if prompt_tokens is None else prompt_tokens
            self.fleet.lone.served(replica, baseline, Served(prompt, tokens, seconds, ttft))
            return
        if ttft is None and forecast.predicted_ttft <= _SMALL * seconds:
            ttft = forecast.predicted_ttft
        if ttft is not None:
            self._learn_pace(forecast, replica, tokens, max(seconds - ttft, 0.0))

    def learn_counted(
        self, forecast: Forecast, replica: str, ended: Ended, ttft: float | None
    ) -> None:
        """A request ended whose answer was not read, or told no usage: replicas count their steps,
        so the ledger knows what it had when its stream closed.

        The count of several sequences is the longest one's, and after a retry it began late: such
        teach no lengths. ``ended`` is from :meth:`~extproc.fleet.fleet.Fleet.release`, all else as
        for :meth:`learn`.
        """
        profile, tokens = forecast.profile, ended.tokens
        if replica == forecast.replica and profile.sequences == 1 and tokens >= 1.0:
            bound = profile.output_bound
            cut = bound is not None and tokens >= bound - max(_STEPS, _SHARE * bound)
            self.fleet.lengths.observe(profile, bound if bound is not None and cut else tokens)
        self._learn_first_token(forecast, replica, ttft)
        # When the first token came is only known from the counters: a long wait blurs it.
        wait, seconds = forecast.predicted_ttft, ended.seconds
        began = ttft is not None or wait <= _SMALL * (wait + seconds)
        if began and (ended.alone is None or not _teaches_alone(forecast)):
            self._learn_pace(forecast, replica, tokens, seconds)

    def _learn_first_token(self, forecast: Forecast, replica: str, ttft: float | None) -> None:
        if ttft is None or replica != forecast.replica:
            return
        self.margins.ttft.observe(forecast.predicted_ttft, ttft)
        load, wait = forecast.adapter_load, forecast.adapter_wait
        later = ttft - forecast.predicted_ttft
        if load:
            self.fleet.adapters.took(replica, load + later)
        if wait:
            self.fleet.adapters.waited(forecast.adapter_overrun * (1.0 + later / wait))
        if (steps_s := forecast.first_step_s) is not None:
            prompt = forecast.profile.prompt_tokens
            self.fleet.first_tokens.observe(forecast.step, prompt, steps_s, ttft)

    def _learn_pace(self, forecast: Forecast, replica: str, tokens: float, seconds: float) -> None:
        """``seconds`` from the first of its tokens to the last."""
        if replica == forecast.replica and tokens > 1:
            predicted = forecast.decode_time_per_token * (tokens - 1)
            self.fleet.decoded(replica, predicted, seconds, forecast.usual_step)
            self.margins.tpot.observe(predicted * forecast.stretch, seconds)

    def _output(self, profile: RequestProfile, view: FleetView) -> tuple[float, float]:
        """Tokens a sequence of it is expected to generate, with the most room; and their p90."""
        if not profile.sequences:
            return 0.0, 0.0
        lengths = self.fleet.lengths
        bound = profile.most_output(most(view.longest_prompt))
        fewest = min(float(profile.least_output), bound)
        row = lengths.row(profile)
        return max(lengths.expected(row, bound), fewest), max(lengths.p90(row, bound), fewest)


def _teaches_alone(forecast: Forecast) -> bool:
    """Whether the request, alone on its replica, shows that one's step times."""
    return forecast.profile.sequences <= 1 and not forecast.adapter_load


def _without_idle_wait(choice: Choice, prediction: Prediction, at_once: bool) -> Choice:
    """The choice; or, where the request would wait and end no sooner than on a replica that could
    start it now, the best of those. ``at_once``: the best of those even if waiting ends sooner."""
    starts, ends = prediction.queue <= 0.0, prediction.completion
    if starts[choice.first]:
        return choice
    ends_there = np.where(starts, ends, np.inf)
    soonest = least(ends_there)
    if soonest == np.inf or (ends[choice.first] < soonest and not at_once):
        return choice
    scores = np.where(starts & (ends < np.inf), choice.scores, np.inf)
    best = int((scores if least(scores) < np.inf else ends_there).argmin())
    return Choice(best, choice.scores)
