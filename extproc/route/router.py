"""One decision: the fleet as it is, a prediction for every candidate, a policy's choice."""

from dataclasses import replace
from random import Random

import numpy as np

from extproc.fleet.fleet import Ended, Fleet
from extproc.predict.completion import Prediction, add_adapter, add_queue_wait, predict, work
from extproc.predict.correction import Margins
from extproc.predict.inputs import FleetView, Floats, Sequences, least, most
from extproc.request.profile import RequestProfile
from extproc.route.backlog import Backlog
from extproc.route.decision import Choice, Decision, Forecast, Situation, runner_up
from extproc.route.overrides import by_owner, by_policy, by_session, by_target, lateness
from extproc.route.policies import POLICIES
from extproc.route.reasons import seconds
from extproc.route.room import SOONEST_S, room_wait_s
from extproc.route.waiting import Place

_SMALL = 0.2
"""Share of a completion that an unseen first token may have, by prediction: where it has more, and
the prefix cache brought it far sooner, there is no telling how long the request decoded."""

_STEPS, _SHARE = 2.0, 0.02  # tokens, and share of an answer, by which the ledger may fall short


class Router:
    """Chooses replicas with one policy, or with another that a request asks for."""

    def __init__(
        self,
        fleet: Fleet,
        policy: str,
        random: Random,
        session_cost_s: float = 0.0,
        backlog: Backlog | None = None,
    ) -> None:
        """``session_cost_s``: by which a request may be finished later to stay with its session;
        ``backlog``: what waits at the router; None: nothing ever does."""
        self.fleet = fleet
        self.margins = Margins()
        self._session_cost_s = session_cost_s
        self._backlog = backlog
        self._default = policy
        self._random = random
        self._turns: dict[int, int] = {}

    def decide(
        self,
        profile: RequestProfile,
        policy: str = "",
        among: frozenset[str] | None = None,
        response_visible: bool = True,
        place: Place | None = None,
    ) -> Decision | None:
        """The decision for a request; None where no healthy replica is known.

        Args:
            profile: the request.
            policy: name of a policy for this request alone; one that does not exist is passed over.
            among: the only replicas that may be chosen, ``ip:port``; None: all.
            response_visible: Envoy forwards the response to the router, so that the request may be
                the trial of a replica that failed.
            place: among those that wait; None: the request has come just now.
        """
        fleet = self.fleet
        view = fleet.view(profile.model, among, response_visible, profile.priority)
        owner = fleet.holder(profile.previous_response) if profile.previous_response else None
        if owner is not None and owner not in view.ids:
            view = self._with_owner(owner, profile, view, among, response_visible)
        if not len(view):
            return None
        expected, p90 = self._output(profile, view)
        held = fleet.held(profile.prefix, view)
        sequences = fleet.sequences(view)
        prediction = predict(profile, expected, view, sequences, held.cached)
        adapter = fleet.adapter_times(view)
        if adapter is not None:
            add_adapter(prediction, adapter)
        waits = self._add_wait(profile, prediction, p90, view, sequences, place)
        situation = Situation(
            profile, view, held, prediction, sequences, self._random, self._turns, adapter
        )
        if profile.objective.has_target:
            waited = fleet.now - place.since if place else 0.0
            situation.late = lateness(profile.objective, prediction, self.margins, waited)
        if owner is not None and owner in view.ids:
            choice = by_owner(owner, situation)
        else:
            choice = self._chosen(situation, policy)
            if waits:
                choice = _without_idle_wait(choice, prediction, place)
        name = fleet.members.name_on(view.ids[choice.first], profile.model)
        retry, peers = self._retry(situation, choice, name), fleet.peers
        return Decision(
            situation,
            choice,
            p90,
            None if retry is None else view.ids[retry],
            name,
            peers.news_age,
            self._fallback(),
        )

    def _add_wait(
        self,
        profile: RequestProfile,
        prediction: Prediction,
        p90: float,
        view: FleetView,
        sequences: Sequences,
        place: Place | None,
    ) -> bool:
        """Add to a prediction how long the request would wait at the router for each candidate:
        until there is room for it, after those that go before. False: each can start it now."""
        backlog, peers = self._backlog, self.fleet.peers
        queued: Floats | float = 0.0
        if backlog is None or peers.stale:
            return False
        among_others = peers.news_age is not None
        wait = room_wait_s(profile, prediction, p90, view, sequences, among_others)
        if wait is not None:
            wait *= self.fleet.tells_room(view.rows)
        if backlog:
            place = place or self._newest(profile, prediction, view)
            wait = np.zeros(len(view)) if wait is None else wait
            for at in (wait <= 0.0).nonzero()[0].tolist():
                if backlog.reserves(view.rows.item(at), place):
                    wait[at] = SOONEST_S
            queued, ahead_s = backlog.ahead(view, place)
            wait += ahead_s * (wait > 0.0)
        if wait is None:
            return False
        add_queue_wait(prediction, wait, queued, view.batch)
        return True

    def _newest(self, profile: RequestProfile, prediction: Prediction, view: FleetView) -> Place:
        best = int(prediction.completion.argmin())
        cost = work(profile, prediction, view, best)
        return Place(profile, self.fleet.now, prediction.decode.item(best), cost)

    def _with_owner(
        self,
        owner: str,
        profile: RequestProfile,
        view: FleetView,
        among: frozenset[str] | None,
        response_visible: bool,
    ) -> FleetView:
        """A view of the replica alone that holds the response that the request goes on from, where
        that is only held up: any other would answer 404. Else the same view."""
        state = self.fleet.members.get(owner)
        if state is None or state.draining:
            return view
        only = frozenset({owner}) if among is None else among & {owner}
        alone = self.fleet.view(profile.model, only, response_visible, profile.priority)
        return alone if len(alone) else view

    def _chosen(self, situation: Situation, policy: str) -> Choice:
        choice = by_policy(policy if policy in POLICIES else self._default, situation)
        if situation.late is not None:
            choice = by_target(situation.late, situation, choice)
        session = situation.profile.session
        home = self.fleet.sessions.holder(session) if session else None
        return choice if home is None else by_session(home, self._session_cost_s, situation, choice)

    def _retry(self, situation: Situation, choice: Choice, name: str) -> int | None:
        """The next best replica of those that know the model by the name that is sent."""
        fleet, model = self.fleet, situation.profile.model
        if fleet.members.names.served(model) == (model,):
            return choice.second
        alike = [name in fleet.members.models_on(one) for one in situation.view.ids]
        return runner_up(np.where(alike, choice.scores, np.inf), choice.first)

    def _fallback(self) -> str:
        age = self.fleet.peers.news_age
        if age is None or not self.fleet.peers.stale:
            return ""
        return f"news of other routers is {seconds(age)} old and does not count"

    def model(
        self, asked: str, previous_response: str, among: frozenset[str] | None, session: str = ""
    ) -> str:
        """The model that a request for the name ``asked`` is for; empty where neither the request
        nor the fleet says which.

        Of several, one is drawn by their weights: of those that the replica serves that holds the
        response the request goes on from, or else of those that any replica does, now or when it is
        well again. For a session it is always the same. ``among``: as in :meth:`decide`.
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

    def learn(
        self,
        forecast: Forecast,
        replica: str,
        tokens: float,
        seconds: float,
        ttft: float | None = None,
    ) -> None:
        """Learn how long answers are, and how fast the replica is, from an answer with its usage.

        Args:
            forecast: of the request when it was sent.
            replica: ``ip:port`` that served it.
            tokens: generated by each of its sequences.
            seconds: from the decision to the last token.
            ttft: from the decision to the first token; None where that was not seen.
        """
        profile = forecast.profile
        if profile.sequences:
            self.fleet.lengths.observe(profile, tokens)
        self._learn_first_token(forecast, replica, ttft)
        if ttft is None and forecast.predicted_ttft <= _SMALL * seconds:
            ttft = forecast.predicted_ttft
        if ttft is not None:
            self._learn_pace(forecast, replica, tokens, max(seconds - ttft, 0.0))

    def learn_counted(
        self, forecast: Forecast, replica: str, ended: Ended, ttft: float | None
    ) -> None:
        """Learn from the ledger's count of tokens, where the answer was not read or told no usage.

        The count of several sequences is the longest one's, and after a retry it began late: such
        teach no lengths.
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
        if began:
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


def _without_idle_wait(choice: Choice, prediction: Prediction, place: Place | None) -> Choice:
    """The choice; or, where the request would wait and end no sooner than on a replica that could
    start it now, the best of those. At its last chance the best of those even so."""
    starts, ends = prediction.queue <= 0.0, prediction.completion
    if starts[choice.first]:
        return choice
    ends_there = np.where(starts, ends, np.inf)
    soonest = least(ends_there)
    last_chance = place is not None and place.last_chance
    if soonest == np.inf or (ends[choice.first] < soonest and not last_chance):
        return choice
    scores = np.where(starts & (ends < np.inf), choice.scores, np.inf)
    best = int((scores if least(scores) < np.inf else ends_there).argmin())
    return replace(choice, first=best)
