"""Admission: a request goes now, waits, is left to Envoy or is refused."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from extproc.predict.inputs import least
from extproc.proxy.exchange import Exchange
from extproc.proxy.headers import RequestHeaders
from extproc.proxy.services import Services
from extproc.request.errors import NoModel, NoReplica, Saturated
from extproc.request.inspect import inspect
from extproc.request.media import of_length
from extproc.request.objective import NO_OBJECTIVE, Objective, session_key
from extproc.request.profile import RequestProfile
from extproc.route.decision import Decision
from extproc.route.waiting import Place, Waiting

NONE_READY = "no replica is ready to serve this request"


async def choose(
    exchange: Exchange,
    phase: str,
    asked: RequestHeaders,
    partial: bool = False,
    large_for: str = "",
) -> bytes:
    """Sends the request to the replica that is best now, or after it waited, or leaves it to Envoy;
    returns the reply to the phase.

    Args:
        exchange: the request; the body that it holds becomes what the replica gets.
        phase: which the reply is to.
        asked: the headers.
        partial: the body is longer than what is held.
        large_for: a model, where the body's length is to do, and Envoy keeps the body.

    Raises:
        Refusal: it is not to be served.
        Left: the client left while the request waited.
    """
    services, started = exchange.services, exchange.services.clock()
    profile = _profile(exchange, asked, partial, large_for)

    def decide(place: Place | None = None) -> Decision | None:
        if _is_unserved(services, profile):
            return None
        visible = not exchange.unseen
        decision = services.router.decide(profile, asked.policy, exchange.subset, visible, place)
        if decision is not None:
            if place is None:
                services.demand.arrived(decision)
                _refuse_busy(services, decision)
            _refuse_late(services, decision)
        return decision

    decision = decide()
    if decision is not None:
        waits = not services.queue.admit(decision)
    else:
        waits = exchange.subset is None and _is_awaited(services, profile)
    if waits and services.body_memory.free >= 0:  # else the body is not kept for long
        decision = await _wait(exchange, asked, profile, decision, decide)
    else:
        if decision is None:
            _refuse_unserved(services, profile, exchange.has_fallback)
        exchange.book(asked, decision)
        services.metrics.decision_seconds.observe(services.clock() - started)
    return exchange.reply(phase, decision, partial, leave_body=large_for != "")


def _profile(
    exchange: Exchange, asked: RequestHeaders, partial: bool, large_for: str
) -> RequestProfile:
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


def _objective(services: Services, asked: RequestHeaders, profile: RequestProfile) -> Objective:
    hold = services.config.hold
    found = hold.objective(asked.objective, asked.tenant, profile.requested_model, profile.model)
    if not (told := asked.targets):
        return found
    ttft_s, tpot_s = told.get("ttft_s", found.ttft_s), told.get("tpot_s", found.tpot_s)
    return found._replace(ttft_s=ttft_s, tpot_s=tpot_s)


async def _wait(
    exchange: Exchange,
    asked: RequestHeaders,
    profile: RequestProfile,
    decision: Decision | None,
    decide: Callable[[Place], Decision | None],
) -> Decision:
    """Has it wait for a replica; the queue books it there in the moment in which it may go."""
    services, since = exchange.services, exchange.services.clock()
    outcome: asyncio.Future[Decision | Exception] = asyncio.get_running_loop().create_future()
    at_once = True

    def go(found: Decision | Exception | None) -> None:
        waited = 0.0 if at_once else services.clock() - since
        found = found or NoReplica(NONE_READY)
        if not isinstance(found, Exception):
            try:
                exchange.book(asked, found, waited, one.why)
            except Exception as error:  # this request's alone
                found = error
        outcome.set_result(found)

    one = Waiting(profile, decision, since, decide, go)
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
    listed = services.config.route.listed_models_only and fleet.members_known.is_set()
    return (
        listed
        and profile.requested_model != ""
        and fleet.eligibility.candidates(profile.model).unknown
    )


def _is_awaited(services: Services, profile: RequestProfile) -> bool:
    """Return True if a request waits for a replica to come back: one served its model lately."""
    hold, fleet = services.config.hold, services.fleet
    if (
        min(hold.longest_s, hold.empty_s) <= 0.0
        or not fleet.members_known.is_set()
        or not profile.requested_model
    ):
        return False
    return fleet.members.served_lately(profile.model, services.clock())


def _refuse_unserved(services: Services, profile: RequestProfile, has_fallback: bool) -> None:
    """Refuse a request that no replica can take now, unless any may know its model and Envoy may
    choose one.

    Raises:
        NoModel: no replica knows it.
        NoReplica: none is ready.
    """
    fleet = services.fleet
    if _is_unserved(services, profile):
        raise NoModel(profile.requested_model, fleet.members.models)
    renamed = fleet.members.names.served(profile.model) != (profile.requested_model,)
    only_some = fleet.eligibility.candidates(profile.model).only_some
    if (profile.requested_model and renamed) or only_some or not has_fallback:
        raise NoReplica(NONE_READY)


def _refuse_busy(services: Services, decision: Decision) -> None:
    """Refuse a request whose first token would come later than ``route.max_ttft_s``.

    Raises:
        Saturated: it would.
    """
    most = services.config.route.max_ttft_s
    if most is not None and (soonest := least(decision.prediction.ttft)) > most:
        late = f"the first token would come in {soonest:.0f} s"
        raise Saturated(f"every replica is busy: {late}", "saturated", soonest - most)


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
