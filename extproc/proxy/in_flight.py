"""A request in flight, dispatched by the router or by Envoy alone, until its stream ends."""

import logging
from math import isfinite
from typing import NamedTuple

from extproc.observe.decision import NotFollowed, RequestOutcome
from extproc.observe.decision_log import OVERLOADED, PredictionResult
from extproc.proxy import messages
from extproc.proxy.messages import Upstream
from extproc.proxy.proto.ext_proc_pb2 import ProcessingRequest
from extproc.proxy.services import RESERVED_FOR_ADAPTERS, Services
from extproc.request.errors import NoReplica
from extproc.request.usage import HEAD_BYTES, ReportedUsage, UsageReader, response_id
from extproc.route.decision import Decision

logger = logging.getLogger(__name__)

_OVERLOADED = "x-envoy-overloaded"  # in answers of Envoy itself while a circuit breaker is full
_OK, _TOO_MANY, _UNAVAILABLE = 200, 429, 503
_BY_CHOICE = 2  # attempts that follow the choice; Envoy's fallback policy places further retries
_RETRIED = "no connection, a reset or an error status: Envoy retried elsewhere"
"""Reason of a retry; Envoy does not report which of the three occurred."""
_RESPONSE_HEADERS = frozenset({":status", "content-type", _OVERLOADED})


class InFlight:
    """Keeps the request's entry in the ledger, records which replica serves the request, and learns
    from the response.

    If Envoy does not forward the response, the router learns only that the request has ended.
    """

    def __init__(
        self,
        services: Services,
        decision: Decision,
        destination: str,
        outcome: RequestOutcome,
        response_visible: bool = True,
        observed: "Observed | None" = None,
    ) -> None:
        """Adds the request to the ledger of the replica that ``decision`` names. ``destination``:
        the choice that Envoy got, ``ip:port[,ip:port]``. ``outcome`` is filled in later.
        ``observed``: the observed request, if Envoy alone chose the replica."""
        self._services = services
        self._destination = destination
        self._response_visible = response_visible  # Envoy forwards the response to the router
        self._observed = observed
        self._sent_at = services.clock() if observed is None else observed.sent_at
        self._envoy_samples = observed is not None and observed.envoy_samples
        self.outcome = outcome
        self.served_by = decision.replica
        """Replica (``ip:port``) that has the request, as far as the router knows."""
        self._ticket = services.fleet.dispatch(
            decision.replica, decision.profile, decision.cached, response_visible=response_visible
        )
        services.fleet.sessions.record(decision.profile.session, decision.replica)
        decision.drop_large_parts()
        self._forecast = decision.forecast()
        self._expected_chunks = decision.prediction.output_tokens * decision.profile.sequences
        self._usage: UsageReader | None = None  # None: the response's body is not read
        self._chunks: int | None = None  # received so far; None: not counted
        self._head = b"" if decision.profile.stored else None  # of the response; None: no id comes
        self.response_ended = False

    def response_headers(self, request: ProcessingRequest) -> bool:
        """Reads the response's headers; returns True if the router needs the body, too."""
        message = request.response_headers
        headers = messages.headers_of(message, _RESPONSE_HEADERS)
        self.outcome.status = messages.status_of(headers)
        self._served(messages.upstream_of(request), _OVERLOADED in headers)
        if message.end_of_stream or self._envoy_samples:
            return False
        if reads := self._reads_body(headers.get("content-type", "")):
            self._usage = UsageReader(self._forecast.profile.endpoint)
        return reads

    def response_chunk(self, chunk: bytes) -> None:
        self._services.fleet.eligibility.response_seen(self.served_by)
        if self._usage is None and self._envoy_samples and self.outcome.status == _OK:
            self._usage = UsageReader(self._forecast.profile.endpoint)
        if self._usage is None or not chunk:
            return
        if self._chunks is not None:
            self._chunks += 1
        self._usage.feed(chunk)
        first = self.outcome.ttft_s is None and self._usage.generating
        if first and self._forecast.profile.stream:
            ttft = self.outcome.ttft_s = self._services.clock() - self._sent_at
            if self._served_by_member:
                self._services.fleet.first_token(self._ticket)
            self._services.router.learn_first_token(self._forecast, self.served_by, ttft)
        if self._head is not None:
            self._head += chunk[: HEAD_BYTES - len(self._head)]
            if found := response_id(self._head):
                self._services.fleet.responses.record(found, self.served_by)
            if found or len(self._head) >= HEAD_BYTES:
                self._head = None

    def end(self, lost: bool = False) -> None:
        """Ends the request: the response is complete, or the client or Envoy has given up.

        ``lost``: the router gives the request up, because its replica is hung.
        """
        services, outcome, profile = self._services, self.outcome, self._forecast.profile
        unanswered = outcome.status is None
        if unanswered and self._response_visible:
            if lost:
                outcome.status = NoReplica.status
            else:
                services.metrics.requests.add("unanswered")
        if self._chunks is not None:
            services.chunks.spend(self._chunks - self._expected_chunks)
        # A response that was cut off or runs on in the background has no known length.
        unusable = lost or profile.in_background or (self._usage and self._usage.failed)
        succeeded = outcome.status is not None and outcome.status < 400 and not unusable
        # Envoy closes the stream in the same way when a response ends and when a client hangs up:
        # only the last chunk, or trailers, show that the response is complete.
        complete = succeeded and self.response_ended
        # An observed request entered the ledger late: earlier prompts may not be prefilled yet.
        prefilled = complete and not profile.stream and self._observed is None
        prefilled |= outcome.ttft_s is not None
        generated = services.fleet.release(self._ticket, prefilled and self._served_by_member)
        seconds = services.clock() - self._sent_at
        usage = None
        if self._usage is not None and complete:
            server = services.fleet.members.get(self.served_by)
            per_step = server.tokens_per_step if server else 1.0
            usage = self._usage.usage(per_step, generated.counted, generated.tokens)
        if usage is not None:
            self._learn(usage, seconds)
        # Not in observability mode: there Envoy closes streams late (deferred_close_timeout).
        elif complete or (succeeded and self._usage is None and not self._envoy_samples):
            services.router.learn_counted(self._forecast, self.served_by, generated, outcome.ttft_s)
        if complete:
            outcome.completion_s = seconds
            self._measure(seconds)
        if services.recorder:
            skipped = unanswered and not lost and not self._response_visible
            services.recorder.ended(
                profile,
                outcome,
                self.served_by,
                seconds,
                generated.tokens,
                failed=not (succeeded or (skipped and not profile.in_background)),
                cut=self._usage is not None and not self.response_ended,
            )
        services.queue.request_ended(self.served_by)

    def _served(self, upstream: Upstream, overloaded: bool) -> None:
        """Records which replica answered and, if this is not the chosen replica, why.
        ``overloaded``: Envoy itself answered, because a circuit breaker was full."""
        services, chosen, address = self._services, self.served_by, upstream.address
        reason = self._not_followed(upstream)
        if reason is not None:
            self.outcome.not_followed = reason
            services.metrics.not_followed.add(reason)
            services.envoy_faults[reason] = services.clock()
        if overloaded:
            services.envoy_faults[OVERLOADED] = services.clock()
        if address != chosen and address in services.fleet.members:
            services.fleet.move(self._ticket, address, self._forecast.profile.prefix)
            services.fleet.sessions.record(self._forecast.profile.session, address)
            self.served_by = address
        self.outcome.served_by = self.served_by if reason is None else address
        status = self.outcome.status or 0
        services.metrics.responses.add(f"{status // 100}xx")
        retried = reason is NotFollowed.RETRY
        failed = status >= 500 and not overloaded
        if reason is not None and self.served_by == chosen:
            return  # a server that no poller knows answered
        if 400 <= status < 500:
            # The request may be the cause: the answer is no success, and if Envoy retried the
            # request, the first replica did not fail.
            services.fleet.eligibility.rejected(self.served_by)
            if status != _TOO_MANY:  # a proxy in front of a full replica may answer 429
                services.demand.refused(self._forecast.work_s)
            return
        # A request that fails on two replicas may itself be the cause: neither failure counts.
        # Without a connection to the second replica, both failures count.
        counts = upstream.is_unsent or not (retried and failed)
        if retried:
            self._failed(chosen, _RETRIED, unavailable=True, counts=counts)
        if failed:
            unavailable = status == _UNAVAILABLE and not upstream.is_unsent
            why = "no connection" if upstream.is_unsent else f"status {status}"
            self._failed(self.served_by, why, unavailable, counts)
        elif not overloaded and services.fleet.eligibility.succeeded(self.served_by):
            title = services.fleet.members.title(self.served_by)
            logger.info(f"replica {title} recovered: a request succeeded")

    @property
    def _served_by_member(self) -> bool:
        """True if a poller knows the server that answered."""
        return self.outcome.served_by == self.served_by

    def _not_followed(self, upstream: Upstream) -> NotFollowed | None:
        """Returns why a replica other than the chosen one answered; None: the chosen replica did.

        An address of no replica is a tunnel's or a sidecar's. The choice then counts as followed,
        unless Envoy reports attempts without the router's choice.
        """
        address, attempts, held = upstream.address, upstream.attempts, upstream.destination
        chosen, _, second = self._destination.partition(",")
        if address in ("", chosen):
            return None
        if held not in ("", self._destination):
            return NotFollowed.OTHER_FILTER
        if address not in self._services.fleet.members and (held or not attempts):
            return None
        if (attempts != 1 and second in ("", address)) or (held and attempts > _BY_CHOICE):
            return NotFollowed.RETRY
        return NotFollowed.UNKNOWN_ADDRESS if held and second == address else NotFollowed.FALLBACK

    def _failed(self, replica: str, why: str, unavailable: bool, counts: bool) -> None:
        fleet = self._services.fleet
        if counts:
            others = fleet.in_flight_on(replica) - (replica == self.served_by)
            full = unavailable and others > 0  # a replica without other requests is not full
            if seconds := fleet.eligibility.failed(replica, full):
                title = fleet.members.title(replica)
                logger.warning(
                    f"replica {title} ejected for {seconds:g} s: consecutive failures",
                    extra={"last": why},
                )
        self._services.metrics.failures.add(replica)

    def _reads_body(self, content_type: str) -> bool:
        """Decides whether to read the response's body. The router reads a body that comes in one
        message, or has the id of a stored response. It reads a stream if the budget of chunks
        allows, or if the stream is among the first of a replica that no poll has measured."""
        if self.outcome.status != _OK:
            return False
        if self._head is not None or not content_type.startswith("text/event-stream"):
            return True
        # Only the first token shows how fast a replica loads an adapter.
        reserved = 0.0 if self._forecast.adapter_load else RESERVED_FOR_ADAPTERS
        services = self._services
        if services.chunks.takes(services.clock(), self._expected_chunks, reserved):
            self._chunks = 0
            return True
        return services.fleet.speeds.takes_stream(self.served_by)

    def _learn(self, usage: ReportedUsage, seconds: float) -> None:
        services, forecast, outcome = self._services, self._forecast, self.outcome
        profile, cached = forecast.profile, usage.cached_tokens
        outcome.prompt_tokens, outcome.cached_tokens = usage.prompt_tokens, cached
        outcome.output_tokens = usage.completion_tokens
        if self.served_by == forecast.replica and forecast.predicts_hits and cached is not None:
            prompt = usage.prompt_tokens or profile.prompt_tokens
            services.fleet.reported(forecast.replica, forecast.expected_hits, prompt, cached)
        if usage.prompt_tokens and profile.prompt_bytes:
            services.tokens.learn(profile.model, profile.prompt_bytes, usage.prompt_tokens)
        if usage.prompt_tokens and profile.images:
            of_images = usage.prompt_tokens - (profile.prompt_tokens - profile.image_tokens)
            services.tokens.learn_images(profile.model, profile.images, of_images)
        if usage.completion_tokens or not profile.sequences:
            each = usage.completion_tokens / max(profile.sequences, 1)
            services.router.learn(forecast, self.served_by, each, seconds, outcome.ttft_s)

    def _measure(self, seconds: float) -> None:
        """Updates the metrics that compare predicted and actual times of a complete response."""
        services, forecast, metrics = self._services, self._forecast, self._services.metrics
        profile, replica = forecast.profile, forecast.replica
        predicted, hits = forecast.predicted_completion, forecast.expected_hits
        outcome, cached = self.outcome, self.outcome.cached_tokens
        as_chosen = replica == self.served_by
        by = profile.model, profile.objective.name
        metrics.completion.observe(seconds, predicted if as_chosen else None, *by)
        if (ttft := outcome.ttft_s) is not None:
            metrics.ttft.observe(ttft, forecast.predicted_ttft if as_chosen else None, *by)
            later = (outcome.output_tokens or 0) / max(profile.sequences, 1) - 1.0
            if later > 0.0:
                tpot = forecast.decode_time_per_token * forecast.stretch
                metrics.tpot.observe((seconds - ttft) / later, tpot if as_chosen else None, *by)
        if as_chosen:
            if seconds > 0 and isfinite(predicted):
                metrics.prediction_error.observe(abs(predicted - seconds) / seconds)
            services.router.error_quantiles.completion.observe(predicted, seconds)
            reported = cached if forecast.predicts_hits else None
            services.results.append(
                PredictionResult(
                    services.clock(), replica, predicted, seconds, ttft, hits, reported
                )
            )
            if cached is not None:
                metrics.hits_expected.add(replica, by=hits)
                metrics.hits_reported.add(replica, by=cached)
        if self._observed is not None:
            by_router = self._observed.decision.predicted_completion
            if isfinite(by_router) and isfinite(predicted):
                metrics.observed_seconds.add("predicted_router", by=by_router)
                metrics.observed_seconds.add("predicted_envoy", by=predicted)
                metrics.observed_seconds.add("actual", by=seconds)


class Observed(NamedTuple):
    """Request that Envoy alone handles, until its response tells which replica has it.

    Until then polls show the request as external load.
    """

    services: Services
    decision: Decision  # the router's choice
    outcome: RequestOutcome
    sent_at: float  # seconds on the router's clock
    envoy_samples: bool  # Envoy, not the router, decides which response bodies are forwarded

    def answered(self, request: ProcessingRequest) -> InFlight | None:
        """Adds the request to the ledger; ``request`` has the headers of the response. Returns None
        if an unknown server answered, or a replica that the router had excluded."""
        replica, services = messages.upstream_of(request).address, self.services
        headers = messages.headers_of(request.response_headers, _RESPONSE_HEADERS)
        self.outcome.status = messages.status_of(headers)
        if replica not in services.fleet.members:  # Envoy answered itself, or a tunnel did
            services.metrics.observed.add("unknown")
            return None
        self.outcome.served_by = replica
        services.metrics.observed.add("same" if replica == self.decision.replica else "other")
        by_envoy = self.decision.on(replica)
        if by_envoy is None:  # the router had excluded the replica
            return None
        return InFlight(services, by_envoy, replica, self.outcome, observed=self)
