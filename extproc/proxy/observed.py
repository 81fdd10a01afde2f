"""A request that Envoy alone handles: its prediction, and the router's choice beside Envoy's."""

from math import isfinite

from extproc.proxy import messages
from extproc.proxy.in_flight import InFlight
from extproc.proxy.proto.ext_proc_pb2 import HttpBody, ProcessingRequest
from extproc.proxy.services import Services
from extproc.route.decision import Decision


class Observed:
    """Learns Envoy's choice from the response's headers; from then on the request is in flight.

    Until then the router does not know which replica has the request, and polls show the request as
    external load. Has the methods of :class:`InFlight`.
    """

    def __init__(
        self, services: Services, decision: Decision, request_id: str, envoy_samples: bool
    ) -> None:
        """``decision``: what the router would have chosen; ``envoy_samples``: see InFlight."""
        decision.drop_large_parts()
        self._services = services
        self._decision = decision
        self._began_at = services.clock()
        self._envoy_samples = envoy_samples
        self.served_by = ""  # ``ip:port``; empty: not known yet
        self._as_chosen_by_envoy: Decision | None = None
        self._in_flight: InFlight | None = None  # None: no candidate has answered yet
        pool, log = services.config.pool, services.log
        self.outcome = log.add(request_id, services.wall(), decision, pool, observed=True).outcome

    def response_headers(self, request: ProcessingRequest) -> bool:
        """Takes the response's headers; returns whether the router is to read the body."""
        replica, services = messages.upstream_of(request).address, self._services
        self.outcome.status = messages.status_of(request.response_headers)
        if replica not in services.fleet.members:  # Envoy answered itself, or a tunnel did
            services.metrics.observed.add("unknown")
            return False
        self.served_by = self.outcome.served_by = replica
        agrees = replica == self._decision.replica
        services.metrics.observed.add("same" if agrees else "other")
        self._as_chosen_by_envoy = self._decision.on(replica)
        if self._as_chosen_by_envoy is None:  # the router had excluded the replica
            return False
        self._in_flight = InFlight(
            services,
            self._as_chosen_by_envoy,
            replica,
            self.outcome,
            sent_at=self._began_at,
            envoy_samples=self._envoy_samples,
        )
        return self._in_flight.response_headers(request)

    def response_chunk(self, message: HttpBody) -> None:
        if self._in_flight is not None:
            self._in_flight.response_chunk(message)

    def end(self, lost: bool = False) -> None:
        """``lost`` is never true: the router ends no request that it only observes."""
        if self._in_flight is None or self._as_chosen_by_envoy is None:
            return
        self._in_flight.end(lost)
        actual = self.outcome.completion_s
        by_router = self._decision.predicted_completion
        by_envoy = self._as_chosen_by_envoy.predicted_completion
        if actual is not None and isfinite(by_router) and isfinite(by_envoy):
            seconds = self._services.metrics.observed_seconds
            seconds.add("predicted_router", by=by_router)
            seconds.add("predicted_envoy", by=by_envoy)
            seconds.add("actual", by=actual)
