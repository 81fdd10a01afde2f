"""Admission: the router dispatches a request, queues it, leaves it to Envoy, or refuses it."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from extproc.predict.inputs import least, most
from extproc.proxy.exchange import NONE_READY, Exchange
from extproc.proxy.headers import RequestHeaders
from extproc.proxy.services import Services
from extproc.request.errors import NoModel, NoReplica, Refusal, Saturated
from extproc.request.inspect import inspect
from extproc.request.media import of_length
from extproc.request.objective import Objective, session_key
from extproc.request.profile import RequestProfile
from extproc.route.decision import Decision
from extproc.route.waiting import Place, Waiting


def observe(exchange: Exchange) -> None:
    """Records how the router would have decided on a request that Envoy alone handles."""
    services, started = exchange.services, exchange.services.clock()
    with suppress(Refusal):  # the replica will answer with an error
        profile = _profile(exchange)
        decision = services.router.decide(profile, exchange.headers.policy, exchange.subset)
        if decision is not None:
            services.demand.arrived(decision)
            exchange.observe(decision)
    exchange.undispatched("observed")
    services.metrics.decision_seconds.observe(services.clock() - started)


async def admit(exchange: Exchange, phase: str) -> bytes:
    """Dispatches the request to the best replica, now or after a wait in the queue; returns the
    reply to Envoy's message of this ``phase``, such as ``request_body``.

    If no replica is usable and Envoy has a fallback, the reply leaves the choice to Envoy.

    Raises:
        Refusal: the request is refused.
        Left: the stream ended while the request was queued.
    """
    services, started = exchange.services, exchange.services.clock()
    profile = exchange.profile = _profile(exchange)
    if not exchange.headers.endpoint.computes:
        return exchange.reply(phase, _forward(exchange, profile))

    def decide(place: Place | None = None) -> Decision | None:
        if _is_unserved(services, profile):
            return None
        decision = services.router.decide(
            profile, exchange.headers.policy, exchange.subset, exchange.response_visible, place
        )
        if decision is not None:
            if place is None:
                services.demand.arrived(decision)
            _refuse_late(services, decision, arrives=place is None)
        return decision

    decision = decide()
    if decision is not None:
        queues = not services.queue.admit(decision)
    else:
        queues = exchange.subset is None and _may_be_served_soon(services, profile)
    if queues and services.body_memory.free >= 0:  # a queued request holds its body for long
        waits = _queue(exchange, profile, decision, decide)
        del decision  # the arrays of a thousand replicas take half a megabyte
        decision = await waits
    else:
        if decision is None:
            _leave_to_envoy(exchange, profile)
        else:
            exchange.dispatch(decision)
        services.metrics.decision_seconds.observe(services.clock() - started)
    return exchange.reply(phase, decision)


def _forward(exchange: Exchange, profile: RequestProfile) -> Decision | None:
    """Forwards a request that only tokenizes, without an entry in the ledger, because the engine
    does not work on the request. Returns None if Envoy has to choose the replica."""
    services, decision = exchange.services, None
    if not _is_unserved(services, profile):
        # ``response_visible=False``: no ejected replica may be chosen in order to test it.
        decision = services.router.decide(profile, "", exchange.subset, response_visible=False)
    if decision is None:
        _leave_to_envoy(exchange, profile)
    else:
        services.metrics.requests.add("passed")
    return decision


def _profile(exchange: Exchange) -> RequestProfile:
    services, headers, model = exchange.services, exchange.headers, exchange.unread_model
    if model:
        profile = of_length(headers.endpoint, headers.length or 0, model, services.tokens)
    else:
        profile = inspect(
            headers.endpoint,
            exchange.body.data,
            services.tokens,
            partial=not exchange.body.whole,
            content_length=headers.length,
            model_of=lambda name, previous: services.router.model(
                name, previous, exchange.subset, headers.session
            ),
        )
    profile.tenant, profile.objective = headers.tenant, _objective(services, headers, profile)
    if headers.session:
        profile.session = session_key(headers.session, profile.model)
    return profile


def _objective(services: Services, headers: RequestHeaders, profile: RequestProfile) -> Objective:
    named = services.config.hold.objective(
        headers.objective, headers.tenant, profile.requested_model, profile.model
    )
    if not (targets := headers.targets):
        return named
    return named._replace(
        ttft_s=targets.get("ttft_s", named.ttft_s), tpot_s=targets.get("tpot_s", named.tpot_s)
    )


async def _queue(
    exchange: Exchange,
    profile: RequestProfile,
    decision: Decision | None,
    decide: Callable[[Place], Decision | None],
) -> Decision:
    """Queues the request until it is dispatched; returns the decision, or raises a Refusal."""
    services, since = exchange.services, exchange.services.clock()
    outcome: asyncio.Future[Decision | Exception] = asyncio.get_running_loop().create_future()
    entering = True  # a request that the queue dispatches at once has not waited

    def finish(result: Decision | Exception | None) -> None:
        waited = 0.0 if entering else services.clock() - since
        result = result or NoReplica(NONE_READY)
        if not isinstance(result, Exception):
            try:
                exchange.dispatch(result, waited, why)
            except Exception as error:  # fails this request, not the queue
                result = error
        outcome.set_result(result)

    waiting = Waiting(profile, decision, since, decide, finish)
    why = waiting.why  # ``finish`` must not name ``waiting``: a cycle would outlive the request
    del decision
    services.queue.enter(waiting)
    entering = False
    try:
        if not outcome.done():
            await exchange.wait_in_queue(outcome, why)
    finally:
        if not outcome.done():
            services.queue.abandon(waiting)
            exchange.undispatched("gave_up")
    result = outcome.result()
    if isinstance(result, Exception):
        raise result
    return result


def _is_unserved(services: Services, profile: RequestProfile) -> bool:
    """True if every replica lists its models, and none lists the requested model."""
    fleet, named = services.fleet, profile.requested_model != ""
    listed = services.config.route.listed_models_only and fleet.members_known.is_set()
    return listed and named and fleet.members.unknown(profile.model)


def _may_be_served_soon(services: Services, profile: RequestProfile) -> bool:
    """True if the request may wait for a new replica, because its model was served lately."""
    hold, fleet = services.config.hold, services.fleet
    waits = min(hold.longest_s, hold.empty_s) > 0.0
    return waits and fleet.members.served_lately(profile.model, services.clock())


def _leave_to_envoy(exchange: Exchange, profile: RequestProfile) -> None:
    """Leaves the request to Envoy's fallback, or refuses it, because no replica is usable.

    The fallback may choose any replica. So the router refuses the request unless all replicas know
    the model under the requested name.

    Raises:
        NoModel: no replica lists the model, or listed it lately.
        NoReplica: no replica is ready.
    """
    services, fleet = exchange.services, exchange.services.fleet
    unserved = _is_unserved(services, profile)
    if unserved and not fleet.members.served_lately(profile.model, services.clock()):
        raise NoModel(profile.requested_model, fleet.members.models)
    renamed = fleet.members.names.served(profile.model) != (profile.requested_model,)
    only_some = fleet.eligibility.candidates(profile.model).only_some
    no_fallback = exchange.full_duplex or exchange.subset is not None  # a gateway has none
    if (profile.requested_model and renamed) or only_some or unserved or no_fallback:
        raise NoReplica(NONE_READY)
    exchange.undispatched("unrouted")


def _refuse_late(services: Services, decision: Decision, arrives: bool) -> None:
    """Raises Saturated if the request would be late on every replica: if the first token of a
    request that ``arrives`` would come after ``route.max_ttft_s``, or if a sheddable request would
    miss its target.

    While a replica is untried, no request is refused: only a request can show the replica's speed.
    Nor is a prompt that is too long for every replica: a replica refuses it.
    """
    profile, view = decision.profile, decision.situation.view
    limit = services.config.route.max_ttft_s if arrives else None
    lateness = decision.situation.late if profile.objective.sheddable else None
    if limit is None and lateness is None:
        return
    if profile.longest_prompt > most(view.longest_prompt) or services.fleet.speeds.untried(view):
        return
    if limit is not None and (soonest := least(decision.prediction.ttft)) > limit:
        message = f"every replica is busy: the first token would come in {soonest:.2f} s"
        raise Saturated(message, code="saturated", retry_after=soonest - limit)
    if lateness is not None and (late := least(lateness)) > 0.0:
        message = f"on every replica the request would miss its target, by {late:.2f} s at least"
        retry_after = max(services.queue.retry_after_s(), late)
        raise Saturated(message, code="too_late", retry_after=retry_after)
