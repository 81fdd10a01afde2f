"""Admission: a request goes now, waits, is left to Envoy or is refused."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from extproc.predict.inputs import least
from extproc.proxy.exchange import Exchange
from extproc.proxy.headers import Asked
from extproc.proxy.services import Services
from extproc.request.errors import NoModel, NoReplica, Saturated
from extproc.request.inspect import inspect
from extproc.request.media import of_length
from extproc.request.objective import NO_OBJECTIVE, Objective, session_key
from extproc.request.profile import RequestProfile
from extproc.route.decision import Decision
from extproc.route.waiting import Place, Waiting

NONE_READY = "no replica is ready to serve this request"
Decide = Callable[..., Decision | None]


async def choose(
    exchange: Exchange, phase: str, asked: Asked, partial: bool = False, large_for: str = ""
) -> bytes:
    """Has a replica chosen by the headers and by what is held of the body, which then is what that
    replica gets; returns the reply to the phase.

    Args:
        exchange: the request.
        phase: which the reply is to.
        asked: the headers.
        partial: the body is longer than what is held.
        large_for: a model, where the body's length is to do, and Envoy keeps the body.

    Raises:
        Refusal: it is not to be served.
        Left: the client left while the request waited.
    """
    started = exchange.services.clock()
    profile = _profile(exchange, asked, partial, large_for)
    decision = await _dispatch(exchange, asked, profile, started)
    return exchange.reply(phase, decision, partial, leave_body=large_for != "")


def _profile(exchange: Exchange, asked: Asked, partial: bool, large_for: str) -> RequestProfile:
    services = exchange.services
    if large_for:
        profile = of_length(asked.endpoint, asked.length or 0, large_for, services.tokens)
    else:
        profile = inspect(
            asked.endpoint,
            exchange.body.data,
            services.tokens,
            partial=partial,
            content_length=asked.length,
            model_of=lambda name, previous: services.router.model(
                name, previous, exchange.subset, asked.session
            ),
        )
    objective = _objective(services, asked, profile)
    if asked.tenant or asked.session or objective is not NO_OBJECTIVE:
        session = session_key(asked.session, profile.model) if asked.session else ""
        return replace(profile, tenant=asked.tenant, session=session, objective=objective)
    return profile


def _objective(services: Services, asked: Asked, profile: RequestProfile) -> Objective:
    hold = services.config.hold
    found = hold.objective(asked.objective, asked.tenant, profile.asked, profile.model)
    if not (told := asked.targets):
        return found
    ttft_s, tpot_s = told.get("ttft_s", found.ttft_s), told.get("tpot_s", found.tpot_s)
    return found._replace(ttft_s=ttft_s, tpot_s=tpot_s)


async def _dispatch(
    exchange: Exchange, asked: Asked, profile: RequestProfile, started: float
) -> Decision | None:
    """Books the request on the replica that is best now, or after it waited; None: Envoy chooses.

    A body for which there is no memory does not wait. ``started``: when the router had all that it
    decides by.
    """
    services = exchange.services
    told, router = not exchange.unseen, services.router
    among = partial(router.decide, profile, asked.policy, exchange.subset, told)

    def decide(**when: Any) -> Decision | None:
        return None if _is_unserved(services, profile) else among(**when)

    decision, has_memory = decide(), services.body_memory.free >= 0
    if decision is not None:
        services.demand.came(decision)
        waits = _has_to_wait(services, decision) and has_memory
    else:
        waits = exchange.subset is None and has_memory and _is_awaited(services, profile)
        if not waits:
            _check_model(services, profile)
            _check_fallback(services, profile, exchange.has_fallback)
    if waits:
        return await _wait(exchange, asked, profile, decision, decide)
    exchange.book(asked, decision)
    services.metrics.decision_seconds.observe(services.clock() - started)
    return decision


async def _wait(
    exchange: Exchange,
    asked: Asked,
    profile: RequestProfile,
    decision: Decision | None,
    decide: Decide,
) -> Decision | None:
    """Has it wait for a replica; the queue books it there in the moment in which it may go."""
    services, since = exchange.services, exchange.services.clock()
    outcome: asyncio.Future[Decision | Exception | None]
    outcome = asyncio.get_running_loop().create_future()
    at_once = True

    def go(found: Decision | Exception | None) -> None:
        waited = 0.0 if at_once else services.clock() - since
        try:
            if found is None:
                raise NoReplica(NONE_READY)
            if not isinstance(found, Exception):
                exchange.book(asked, found, waited, one.why)
        except Exception as error:  # this request's alone
            found = error
        outcome.set_result(found)

    def decide_anew(place: Place) -> Decision | None:
        decision = decide(place=place)
        if decision is not None:
            _refuse_late(services, decision)
        return decision

    one = Waiting(profile, decision, since, decide_anew, go)
    services.queue.enter(one)
    at_once = False
    try:
        if not outcome.done():
            await exchange.waits(outcome, one.why)
    finally:
        if not outcome.done():
            services.queue.abandon(one)
            exchange.ends_here("gave_up")
    found = outcome.result()
    if isinstance(found, Exception):
        raise found
    return found


def _is_unserved(services: Services, profile: RequestProfile) -> bool:
    """Return True if every replica tells which models it serves, and none serves this one."""
    fleet = services.fleet
    listed = services.config.route.listed_models_only and fleet.known.is_set()
    return listed and profile.asked != "" and fleet.eligibility.candidates(profile.model).unknown


def _is_awaited(services: Services, profile: RequestProfile) -> bool:
    """Return True if a request waits for a replica to come back: one served its model lately."""
    hold, fleet = services.config.hold, services.fleet
    if min(hold.longest_s, hold.empty_s) <= 0.0 or not fleet.known.is_set() or not profile.asked:
        return False
    return fleet.members.served_lately(profile.model, services.clock())


def _check_model(services: Services, profile: RequestProfile) -> None:
    """Nothing, where any replica may know the model.

    Raises:
        NoModel: none does.
    """
    if _is_unserved(services, profile):
        raise NoModel(profile.asked, services.fleet.members.models)


def _check_fallback(services: Services, profile: RequestProfile, has_one: bool) -> None:
    """Nothing, where Envoy may choose.

    ``has_one``: it has a choice of its own, among all replicas.

    Raises:
        NoReplica: it has none, or knows none that serves this.
    """
    fleet = services.fleet
    served = fleet.members.names.served(profile.model)
    apart = profile.asked != "" and served != (profile.asked,)
    apart |= fleet.eligibility.candidates(profile.model).only_some
    if apart or not has_one:
        raise NoReplica(NONE_READY)


def _has_to_wait(services: Services, decision: Decision) -> bool:
    """Return True if the request has to wait.

    Raises:
        Saturated: its first token would come too late, or it is to be refused where it is late.
    """
    most = services.config.route.max_ttft_s
    if most is not None and (soonest := least(decision.prediction.ttft)) > most:
        late = f"the first token would come in {soonest:.0f} s"
        raise Saturated(f"every replica is busy: {late}", "saturated", soonest - most)
    _refuse_late(services, decision)
    return services.queue.must_wait(decision)


def _refuse_late(services: Services, decision: Decision) -> None:
    """Refuse a sheddable request that would miss its target.

    Raises:
        Saturated: it would.
    """
    lateness = decision.situation.late
    if lateness is None or not decision.profile.objective.sheddable:
        return
    if (late := least(lateness)) > 0.0:
        message = f"on every replica it would miss its target, by {late:.2f} s at least"
        raise Saturated(message, "too_late", max(services.queue.retry_after_s(), late))
