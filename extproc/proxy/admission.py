"""Admission: a request goes now, waits, is left to Envoy or is refused."""

from extproc.predict.inputs import least
from extproc.proxy.services import Services
from extproc.request.errors import NoModel, NoReplica, Saturated
from extproc.request.profile import RequestProfile
from extproc.route.router import Decision

NONE_READY = "no replica is ready to serve this request"


def check_model(services: Services, profile: RequestProfile) -> None:
    """Nothing, where any replica may know the model.

    Raises:
        NoModel: none does.
    """
    fleet = services.fleet
    listed = services.config.route.listed_models_only and fleet.known.is_set()
    unknown = fleet.eligibility.candidates(profile.model).unknown
    if listed and unknown and profile.asked:
        raise NoModel(profile.asked, fleet.members.models)


def check_fallback(services: Services, profile: RequestProfile, has_one: bool) -> None:
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


def has_to_wait(services: Services, decision: Decision) -> bool:
    """Whether it has to wait.

    Raises:
        Saturated: its first token would come too late, or it is to be refused where it is late.
    """
    queue, most = services.queue, services.config.route.max_ttft_s
    waits, sheddable = queue.keeps(decision), decision.profile.objective.sheddable
    wait = _wait_s(services, decision) if waits and (sheddable or most is not None) else 0.0
    if most is not None and (soonest := wait + least(decision.prediction.ttft)) > most:
        late = f"the first token would come in {soonest:.0f} s"
        raise Saturated(f"every replica is busy: {late}", "saturated", max(wait, soonest - most))
    refuse_late(services, decision, wait)
    return waits


def refuse_late(services: Services, decision: Decision, waited: float) -> None:
    """Nothing, unless it is to be refused where it misses a target, and would if it were sent so
    many seconds after it came.

    Raises:
        Saturated: it would.
    """
    objective = decision.profile.objective
    if not (objective.sheddable and objective.has_target):
        return
    if (late := services.router.late(decision, waited)) > 0.0:
        message = f"on every replica it would miss its target, by {late:.2f} s at least"
        raise Saturated(message, "too_late", max(_wait_s(services, decision), late))


def _wait_s(services: Services, decision: Decision) -> float:
    """Seconds that one like it would wait that comes now."""
    profile, replicas = decision.profile, len(decision.situation.view)
    return services.queue.wait_s(profile.model, profile.objective.priority, replicas)
