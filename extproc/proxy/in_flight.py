"""A request that was sent to a replica, until its response has ended."""

from extproc.observe.decision_log import PredictionResult
from extproc.proxy import messages
from extproc.proxy.proto.ext_proc_pb2 import HttpBody, ProcessingRequest
from extproc.proxy.services import RESERVED, Services
from extproc.request.errors import NoReplica
from extproc.request.usage import PRELUDE, ReportedUsage, ResponseIdReader, UsageReader
from extproc.route.decision import Decision

_OVERLOADED = "x-envoy-overloaded"  # Envoy's own answer, where a circuit breaker is full
_LOST = NoReplica.status  # status of the answer to a request that is given up, where none had begun
_UNAVAILABLE = 503
_RESPONSE_HEADERS = frozenset({":status", "content-type", _OVERLOADED})


class InFlight:
    """Holds the request's place in the ledger, follows it to who serves it, and learns from it.

    Of a response that Envoy does not tell of, only the end is seen.
    """

    def __init__(
        self,
        services: Services,
        decision: Decision,
        request_id: str,
        unseen: bool,
        waited: float,
        waited_for: str,
    ) -> None:
        """Takes its place on the replica chosen.

        ``unseen``: Envoy was asked not to tell of the response; ``waited``: seconds at the router.
        """
        self._services = services
        self._unseen = unseen
        self._sent_at = services.clock()
        self.served_by = decision.replica
        """The replica that it is on, as far as is known: ``ip:port``."""
        self._ticket = services.fleet.dispatch(
            decision.replica, decision.profile, decision.cached, response_visible=not unseen
        )
        services.fleet.sessions.record(decision.profile.session, decision.replica)
        decision.drop_large_parts()
        self._forecast = decision.forecast()
        self._foreseen = decision.prediction.output_tokens * decision.profile.sequences
        """Chunks that it should have, if it is streamed."""
        pool = services.config.pool
        self.outcome = services.log.add(request_id, services.wall(), decision, pool).outcome
        if waited:
            self.outcome.waited_s, self.outcome.waited_for = waited, waited_for
            services.metrics.waited_seconds.observe(waited)
        self._usage: UsageReader | None = None
        self._chunks: int | None = None  # that came so far, where they are counted
        self._response_id = ResponseIdReader() if decision.profile.stored else None
        self._ended = False
        services.metrics.requests.add("routed")
        services.metrics.decisions.add(decision.policy, decision.replica)

    def answered(self, request: ProcessingRequest) -> bool:
        """The response's headers came; returns whether its body is to be read, too."""
        message = request.response_headers
        headers = messages.headers_of(message, _RESPONSE_HEADERS)
        status = headers.get(":status", "")
        self.outcome.status = int(status) if status.isdecimal() else None
        self._ended = message.end_of_stream
        self.outcome.overloaded = _OVERLOADED in headers
        self._served(messages.served_by(request))
        if self._ended or not self._worth_reading(headers.get("content-type", "")):
            return False
        self._usage = UsageReader(PRELUDE.get(self._forecast.profile.endpoint, 0))
        return True

    def chunk(self, message: HttpBody) -> None:
        self._ended = message.end_of_stream
        self._services.fleet.eligibility.response_seen(self.served_by)
        if self._usage is None or not message.body:
            return
        if self._chunks is not None:
            self._chunks += 1
        self._usage.feed(message.body)
        first = self.outcome.ttft_s is None and self._usage.generating
        if first and self._forecast.profile.stream:
            self.outcome.ttft_s = self._services.clock() - self._sent_at
            self._services.fleet.first_token(self._ticket)
        if self._response_id is not None and (found := self._response_id.feed(message.body)):
            self._services.fleet.responses.record(found, self.served_by)

    def end(self, lost: bool = False) -> None:
        """The stream is over: the response has ended, or the client or Envoy gave up; ``lost``: or
        the router did, for its replica hangs."""
        services, outcome, profile = self._services, self.outcome, self._forecast.profile
        status, unseen = outcome.status, self._unseen
        if lost and status is None and not unseen:
            outcome.status = _LOST
        if self._chunks is not None:
            services.chunks.spend(self._chunks - self._foreseen)
        # What was cut off tells nothing of lengths.
        well = not lost and status is not None and status < 400 and not profile.in_background
        # Envoy closes the stream alike when a response has ended and when a client hangs up; only
        # where the response's chunks were read is the last one known.
        complete = well and self._ended
        prefilled = outcome.ttft_s is not None or (complete and not profile.stream)
        ended = services.fleet.release(self._ticket, prefilled)
        seconds = services.clock() - self._sent_at
        unanswered = status is None and not lost
        if unanswered and not unseen:
            services.metrics.requests.add("unanswered")
        usage = self._usage.usage() if self._usage is not None and complete else None
        if complete:
            outcome.completion_s = seconds
            self._account(seconds, usage)
        if usage is not None:
            self._learn(usage, seconds)
        elif well and (complete or self._usage is None):
            # Not read; or read to its end, which told no usage.
            services.router.learn_counted(self._forecast, self.served_by, ended, outcome.ttft_s)
        if services.recorder:
            services.recorder.ended(
                profile,
                outcome,
                self.served_by,
                seconds,
                ended.tokens,
                failed=not (well or (unanswered and unseen and not profile.in_background)),
                cut=self._usage is not None and not self._ended,
            )
        services.queue.request_ended(self.served_by)

    def _served(self, upstream: str) -> None:
        services, chosen = self._services, self.served_by
        # An address that is no member's, a tunnel's or a sidecar's, tells nothing.
        if upstream != self.served_by and upstream in services.fleet.members:
            services.fleet.move(self._ticket, upstream, self._forecast.profile.prefix)
            services.fleet.sessions.record(self._forecast.profile.session, upstream)
            self.served_by = upstream
        self.outcome.served_by = self.served_by
        status = self.outcome.status or 0
        services.metrics.responses.add(f"{status // 100}xx")
        moved, failed = self.served_by != chosen, status >= 500 and not self.outcome.overloaded
        if moved:  # Envoy passed the choice over or tried it in vain
            self._failed(chosen, unavailable=True, counts=not failed)
        if failed:
            self._failed(self.served_by, unavailable=status == _UNAVAILABLE, counts=not moved)
        elif not self.outcome.overloaded:
            services.fleet.eligibility.succeeded(self.served_by)

    def _failed(self, replica: str, unavailable: bool, counts: bool) -> None:
        """``counts``: blame this replica. A request that fails on two may itself be the cause.

        A replica without other requests is not full.
        """
        fleet = self._services.fleet
        if counts:
            others = fleet.in_flight_on(replica) - (replica == self.served_by)
            fleet.eligibility.failed(replica, unavailable and others > 0)
        self._services.metrics.failures.add(replica)

    def _worth_reading(self, content_type: str) -> bool:
        """Every whole response, for it is one message, those whose id is needed, and as many
        streams as the router has chunks for."""
        if self.outcome.status != 200:
            return False
        if self._response_id is not None or not content_type.startswith("text/event-stream"):
            return True
        forecast = self._forecast  # a first token alone tells how fast a replica loads an adapter
        loads = forecast.adapter_load > 0.0 or forecast.adapter_wait > 0.0
        services, reserved = self._services, 0.0 if loads else RESERVED
        if not services.chunks.takes(services.clock(), self._foreseen, reserved):
            return False
        self._chunks = 0
        return True

    def _learn(self, usage: ReportedUsage, seconds: float) -> None:
        """From the usage a response reported, ``seconds`` after the decision."""
        services, profile, outcome = self._services, self._forecast.profile, self.outcome
        outcome.prompt_tokens = usage.prompt_tokens
        outcome.output_tokens = usage.completion_tokens
        outcome.cached_tokens = usage.cached_tokens
        forecast, cached = self._forecast, usage.cached_tokens
        if cached is not None and self.served_by == forecast.replica and profile.sequences == 1:
            expected, depth = forecast.expected_hits, forecast.hits_depth
            prompt = usage.prompt_tokens or profile.prompt_tokens
            services.fleet.reported(forecast.replica, expected, depth, prompt, cached)
        if usage.prompt_tokens and profile.prompt_bytes:
            services.tokens.learn(profile.model, profile.prompt_bytes, usage.prompt_tokens)
        if usage.prompt_tokens and profile.images:
            beyond_text = usage.prompt_tokens - (profile.prompt_tokens - profile.image_tokens)
            services.tokens.learn_images(profile.model, profile.images, beyond_text)
        if usage.completion_tokens or not profile.sequences:
            each = usage.completion_tokens / max(profile.sequences, 1)
            services.router.learn(forecast, self.served_by, each, seconds, outcome.ttft_s)

    def _account(self, actual: float, usage: ReportedUsage | None) -> None:
        services, forecast, metrics = self._services, self._forecast, self._services.metrics
        profile, replica = forecast.profile, forecast.replica
        predicted, hits = forecast.predicted_completion, forecast.expected_hits
        cached = None if usage is None else usage.cached_tokens
        as_chosen = replica == self.served_by
        by = profile.model, profile.objective.name
        metrics.completion.observe(actual, predicted if as_chosen else None, *by)
        if (ttft := self.outcome.ttft_s) is not None:
            metrics.ttft.observe(ttft, forecast.predicted_ttft if as_chosen else None, *by)
            tokens = 0 if usage is None else usage.completion_tokens
            later = tokens / max(profile.sequences, 1) - 1.0
            if later > 0.0:
                tpot = forecast.decode_time_per_token * forecast.stretch
                metrics.tpot.observe((actual - ttft) / later, tpot if as_chosen else None, *by)
        if actual > 0:
            metrics.prediction_error.observe(abs(predicted - actual) / actual)
        if as_chosen:
            services.router.margins.completion.observe(predicted, actual)
            # Else nothing was foretold of what it would find.
            told = cached if profile.sequences == 1 and forecast.hits_depth >= 0 else None
            result = PredictionResult(services.clock(), replica, predicted, actual, hits, told)
            services.accuracy.add(result)
            if cached is not None:
                metrics.hits_expected.add(replica, by=hits)
                metrics.hits_reported.add(replica, by=cached)
