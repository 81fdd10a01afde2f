"""Router: predicts when each candidate would finish a request, and lets a policy choose."""

from itertools import count
from math import inf
from random import Random

import numpy as np
from msgspec.structs import replace

from extproc.fleet.fleet import Fleet
from extproc.fleet.ledger import Generated
from extproc.predict.completion import add_queue_wait, predict, work
from extproc.predict.correction import ErrorQuantiles
from extproc.predict.inputs import FleetView, Floats, least, most
from extproc.request.profile import RequestProfile
from extproc.route.backlog import Backlog
from extproc.route.decision import Choice, Decision, Forecast, Situation
from extproc.route.overrides import by_owner, by_policy, by_session, by_target, lateness
from extproc.route.policies import POLICIES
from extproc.route.reasons import seconds
from extproc.route.room import SOONEST_S, RoomWait, room_wait
from extproc.route.waiting import Place

_SMALL = 0.2
"""If the first token was not observed, a decode time is learned only if the predicted TTFT is at
most 0.2 of the completion. Above, errors of the predicted TTFT would weigh too much."""

_LAST = 1e9  # puts a replica behind all others that the policy scores
_DEAR = 2.0
"""A request waits rather than gain a time of which others would lose this multiple. With 1 the
slowest first tokens of an overload of conversations come later; with 4 the mean completion of long
prompts (mooncake-synthetic ×3) is 5% longer."""
_SPARES_S = 30.0
"""Seconds in the queue after which a request no longer waits to spare others. Without the limit,
the p99 of a long overload with long prompts (mooncake-synthetic ×3) rises by 11%."""

_STEPS, _SHARE = 2.0, 0.02  # tokens, or share of the bound, by which the ledger's count may be low


class Router:
    """Chooses replicas by a policy, or by another policy that a request names."""

    def __init__(
        self,
        fleet: Fleet,
        policy: str,
        random: Random,
        session_cost_s: float = 0.0,
        backlog: Backlog | None = None,
    ) -> None:
        """``session_cost_s``: longest delay, in seconds, that a request accepts to stay on its
        session's replica. ``backlog``: requests queued at this router; None: no queue."""
        self.fleet = fleet
        self.error_quantiles = ErrorQuantiles()
        self._session_cost_s = session_cost_s
        self._backlog = backlog
        self._default = policy
        self._random = random
        self._turns: dict[int, int] = {}
        self._numbers = count(1)

    def decide(
        self,
        profile: RequestProfile,
        policy: str = "",
        among: frozenset[str] | None = None,
        response_visible: bool = True,
        place: Place | None = None,
    ) -> Decision | None:
        """Decide on a replica; None if no replica may serve the request.

        Args:
            policy: name of a policy for this request alone; an unknown name is ignored.
            among: the only replicas that may be chosen; None: all.
            response_visible: Envoy forwards the response to the router, so that the request may
                try a replica that was ejected.
            place: place of the request in the queue; None: the request has just arrived.
        """
        fleet = self.fleet
        view, owner = self._candidates(profile, among, response_visible)
        if not len(view):
            return None
        expected, p90 = self._output(profile, view)
        held = fleet.prefix_hits(profile.prefix, view)
        sequences = fleet.sequences(view)
        adapter = fleet.adapters.times(view, fleet.now) if view.adapters else None
        prediction = predict(profile, expected, view, sequences, held.cached, adapter)
        age, fallback = fleet.peers.digest_age, ""
        situation = Situation(
            *(profile, view, held, prediction, p90, sequences, self._random, self._turns, adapter),
            peers_age_s=age,
            waited=fleet.now - place.since if place else 0.0,
        )
        self._add_wait(situation, place)
        if profile.objective.has_target:
            situation.late = lateness(situation, self.error_quantiles)
        if owner is not None:
            choice = by_owner(owner, situation)
        else:
            choice = self._choose(situation, policy, place)
        name = view.candidates.models[choice.first]
        self._turns[view.rows.item(choice.first)] = next(self._numbers)
        second = self._second(situation, choice, name)
        if age is not None and fleet.peers.stale:
            fallback = f"load of other routers ignored (newest digest {seconds(age)} old)"
        return Decision(situation, choice, second, name, fallback)

    def _candidates(
        self, profile: RequestProfile, among: frozenset[str] | None, response_visible: bool
    ) -> tuple[FleetView, str | None]:
        """Return the candidates, and the owner of the response that the request continues.

        An owner that is excluded for a while, but healthy and not draining, becomes the only
        candidate: any other replica would answer 404.
        """
        fleet = self.fleet
        view = fleet.view(profile.model, among, response_visible, profile.priority)
        owner = fleet.response_owner(profile.previous_response)
        if owner is None or owner in view.ids:
            return view, owner
        state = fleet.members.get(owner)
        if state is not None and not state.draining:
            only = frozenset({owner}) if among is None else among & {owner}
            alone = fleet.view(profile.model, only, response_visible, profile.priority)
            if len(alone):
                return alone, owner
        return view, None

    def _output(self, profile: RequestProfile, view: FleetView) -> tuple[float, float]:
        """Mean and p90 of the tokens that a sequence of the request generates if nothing interrupts
        it."""
        if not profile.sequences:
            return 0.0, 0.0
        lengths = self.fleet.lengths
        bound = profile.most_output(most(view.longest_prompt))
        fewest = min(float(profile.least_output), bound)
        row = lengths.row(profile)
        return max(lengths.expected(row, bound), fewest), max(lengths.p90(row, bound), fewest)

    def _add_wait(self, situation: Situation, place: Place | None) -> None:
        """Add to the prediction for each candidate the wait at the router: for room there, and for
        the queued requests ahead."""
        if (backlog := self._backlog) is None:
            return
        view, prediction = situation.view, situation.prediction
        room = room_wait(situation)
        if room is None and not backlog:
            return
        wait, optional = room or RoomWait(np.zeros(len(view)), np.zeros(len(view), dtype=bool))
        wait *= self.fleet.reports_capacity(view.rows)
        wait[self.fleet.eligibility.on_trial(view.ids)] = 0.0  # nothing may ever end there
        queued: Floats | float = 0.0
        if backlog:
            if place is None:
                best, profile = int(prediction.completion.argmin()), situation.profile
                cost = work(profile, prediction, view, best)
                place = Place(profile, self.fleet.now, prediction.decode.item(best), cost)
            for at in ((wait <= 0.0) | optional).nonzero()[0].tolist():
                if backlog.reserves(view.rows.item(at), place):
                    wait[at], optional[at] = max(wait.item(at), SOONEST_S), False
            queued, ahead_s = backlog.ahead(view, place, self.fleet.peers.queued)
            wait += ahead_s * (wait > 0.0)
        add_queue_wait(prediction, view, wait, queued)
        situation.optional = optional

    def _choose(self, situation: Situation, policy: str, place: Place | None) -> Choice:
        last_chance = place is not None and place.last_chance
        choice = by_policy(policy if policy in POLICIES else self._default, situation)
        if situation.late is not None:
            choice = by_target(situation.late, situation, choice)
        choice = _without_idle_wait(choice, situation, last_chance)
        if situation.late is not None and situation.optional is not None:
            situation.late[:] = lateness(situation, self.error_quantiles)  # may start now
        session = situation.profile.session
        home = self.fleet.sessions.owner(session) if session else None
        if home is None or last_chance:
            return choice
        choice = by_session(home, self._session_cost_s, situation, choice)
        if situation.optional is not None and situation.optional[choice.first]:
            situation.prediction.start_now(choice.first)
        return choice

    def _second(self, situation: Situation, choice: Choice, name: str) -> str | None:
        """Return the next best replica that knows the model by the name that the request will
        carry. Of the replicas that the policy scores, those whose last answer was from 400 to 499
        come last: if the chosen replica has another key than the others, only a retry elsewhere
        shows that the replica fails."""
        ids, scores, model = situation.view.ids, choice.scores, situation.profile.model
        if self.fleet.members.names.served(model) != (model,):
            conditions = self.fleet.eligibility.conditions
            alike = [name in conditions[candidate].models for candidate in ids]
            scores = np.where(alike, scores, np.inf)
        if rejecting := self.fleet.eligibility.rejecting:
            scores = scores + [_LAST * (candidate in rejecting) for candidate in ids]
        second = replace(choice, scores=scores).second
        return None if second is None else ids[second]

    def model(
        self,
        requested: str,
        previous_response: str,
        among: frozenset[str] | None,
        session: str = "",
    ) -> str:
        """Return the model that serves a request for the name ``requested``; empty if not known.

        If the name stands for several models, one of them is drawn by their weights, and always the
        same one for a session. The draw is among the models on the replica that owns the previous
        response. Without such a replica, the draw is among the models that some replica serves now;
        else among those that some replica lists or listed lately. ``among``: as in :meth:`decide`.
        """
        fleet, members = self.fleet, self.fleet.members
        if not requested:
            return members.only_model or ""
        models = members.names.models(requested)
        if len(models) == 1:
            return models[0]
        held = members.models_on(fleet.response_owner(previous_response) or "")
        served = [model for model in models if members.names.known(model, held)]
        served = served or [name for name in models if fleet.eligibility.can_serve(name, among)]
        served = served or [name for name in models if members.served_lately(name, fleet.now)]
        draws = Random(session) if session else self._random
        return members.names.draw(requested, served, draws)

    def learn(
        self, forecast: Forecast, replica: str, tokens: float, seconds: float, ttft: float | None
    ) -> None:
        """Learn output length, and the replica's speed, from an answer that reported its usage.

        ``replica``: address of the replica that served. ``tokens``: generated by each sequence.
        ``seconds`` and ``ttft``: from the decision to the last and to the first token; None: the
        first token was not observed.
        """
        profile = forecast.profile
        if profile.sequences:
            self.fleet.lengths.observe(profile, tokens)
        if ttft is None and forecast.predicted_ttft <= _SMALL * seconds:
            ttft = forecast.predicted_ttft
        if ttft is not None:
            self._learn_decode(forecast, replica, tokens, max(seconds - ttft, 0.0))

    def learn_counted(
        self, forecast: Forecast, replica: str, generated: Generated, ttft: float | None
    ) -> None:
        """Learn from the ledger's token count if the answer was not read or had no usage.

        No length is learned from requests of several sequences, because the count is that of the
        longest sequence, and none from retried requests, because their count began late.
        """
        profile, tokens = forecast.profile, generated.tokens
        if replica == forecast.replica and profile.sequences == 1 and tokens >= 1.0:
            bound = profile.output_bound
            cut = bound is not None and tokens >= bound - max(_STEPS, _SHARE * bound)
            self.fleet.lengths.observe(profile, bound if bound is not None and cut else tokens)
        # If the first token was not observed, its time is inexact after a long wait.
        wait = forecast.predicted_ttft
        if ttft is not None or wait <= _SMALL * (wait + generated.seconds):
            self._learn_decode(forecast, replica, tokens, generated.seconds)

    def learn_first_token(self, forecast: Forecast, replica: str, ttft: float) -> None:
        """Learn from a first token that came ``ttft`` seconds after the decision."""
        if replica != forecast.replica or forecast.predicted_ttft == inf:
            return  # infinite: the prompt was estimated too long for the replica
        self.error_quantiles.ttft.observe(forecast.predicted_ttft, ttft)
        if not forecast.profile.fetches:
            usual_steps = forecast.predicted_ttft / forecast.usual_step
            self.fleet.speeds.learn_first_token(replica, usual_steps, ttft)
        if load := forecast.adapter_load:
            self.fleet.adapters.load_measured(replica, load + ttft - forecast.predicted_ttft)
        if (steps_s := forecast.first_step_s) is not None:
            prompt = forecast.profile.prompt_tokens
            self.fleet.speeds.first_tokens.observe(forecast.step, prompt, steps_s, ttft)

    def _learn_decode(
        self, forecast: Forecast, replica: str, tokens: float, seconds: float
    ) -> None:
        """Learn the decode time; ``seconds``: from the first token to the last."""
        if replica == forecast.replica and tokens > 1:
            predicted = forecast.decode_time_per_token * (tokens - 1)
            self.fleet.speeds.learn_decode(replica, predicted, seconds, forecast.usual_step)
            self.error_quantiles.tpot.observe(predicted * forecast.stretch, seconds)


def _without_idle_wait(choice: Choice, situation: Situation, last_chance: bool) -> Choice:
    """Replace a choice for which the request would wait at the router in vain, according to *No
    idle waiting* in :mod:`extproc.route.queue`.

    If the wait is optional, the choice stays, and the request starts now: the policy has reasons
    for it, such as a cached prompt. Otherwise the new choice is the best candidate that can start
    the request now. On its last chance before a refusal, the request takes such a candidate even if
    it ends later there.
    """
    prediction, optional, first = situation.prediction, situation.optional, choice.first
    if optional is None or prediction.queue[first] <= 0.0:
        return choice
    starts, ends = prediction.queue <= 0.0, prediction.completion
    if situation.waited < _SPARES_S and not (optional[first] or last_chance):
        weighed = _DEAR * ends + situation.lost_by_its_rank
        starts &= weighed < weighed[first]
    ends_there = np.where(starts, ends, np.inf)
    soonest = least(ends_there)
    if soonest == np.inf or (ends[first] < soonest and not last_chance):
        return choice
    if optional[first]:
        prediction.start_now(first)
        return choice
    scores = np.where(starts & (ends < np.inf), choice.scores, np.inf)
    best = int((scores if least(scores) < np.inf else ends_there).argmin())
    return replace(choice, first=best)
