"""One HTTP request, from its headers to the end of its response."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain

from extproc.clock import Clock
from extproc.config import Config
from extproc.fleet.fleet import Fleet
from extproc.fleet.ledger import Ticket
from extproc.fleet.view import least
from extproc.observe.decisions import DecisionLog, Outcome
from extproc.observe.metrics import RouterMetrics
from extproc.predict.lengths import OutputLengths
from extproc.request.errors import BadRequest, NoReplica, Refusal, Saturated, error_body
from extproc.request.inspect import endpoint_of, inspect
from extproc.request.large import LARGE_BODY, of_length
from extproc.request.profile import NO_WORK, RequestProfile
from extproc.request.tokens import TokenCounter
from extproc.request.usage import UsageReader
from extproc.route.router import Decision, Forecast, Router
from extproc.server import messages
from extproc.server.proto.ext_proc_pb2 import HttpBody, HttpHeaders, ProcessingRequest
from extproc.server.room import Room
from extproc.server.watch import Watch

_LONGEST_ID = 128
"""Characters of a request id: one is kept with every decision."""
_DIGITS = 15
"""Of a content-length: a petabyte."""
_NONE_READY = "no replica is ready to serve this request"
_RETRY_AFTER_S = 1
_PIECE = 2**16
"""Bytes of a body that was held back, in each message that returns it."""
_REQUEST_HEADERS = {":path", ":method", "x-request-id", "content-length", "content-encoding"}
_RESPONSE_HEADERS = frozenset({":status", "content-type"})


@dataclass(frozen=True, slots=True)
class Services:
    """What every exchange works with."""

    config: Config
    router: Router
    tokens: TokenCounter
    log: DecisionLog
    metrics: RouterMetrics
    clock: Clock
    wall: Clock
    random: random.Random
    room: Room = field(default_factory=Room)
    watch: Watch = field(default_factory=Watch)

    @property
    def fleet(self) -> Fleet:
        """The router's fleet."""
        return self.router.fleet

    def of_pool(self, config: Config) -> "Services":
        """The same for a pool of its own, with an empty fleet."""
        router = Router(Fleet(OutputLengths()), config.route.policy, self.random)
        return replace(self, config=config, router=router)


class Exchange:
    """Owns a request for its whole life: profiles it, chooses its replica, holds its place in the
    ledger, releases it when the stream closes, and learns from it.

    Phases may come in any order; each is answered as it is, and one that is unknown with a
    continue.
    """

    __slots__ = (
        "_arrived",
        "_asked",
        "_body_mode",
        "_content_length",
        "_decided",
        "_ended",
        "_first_chunk",
        "_forecast",
        "_held",
        "_large_for",
        "_outcome",
        "_path",
        "_policy",
        "_refused",
        "_request_id",
        "_response_body_mode",
        "_served_by",
        "_services",
        "_status",
        "_subset",
        "_taken",
        "_tenant",
        "_ticket",
        "_unseen",
        "_usage",
    )

    def __init__(self, services: Services) -> None:
        self._services = services
        self._arrived = services.clock()
        self._path = ""
        self._request_id = ""
        self._policy = ""
        self._tenant = ""
        self._content_length: int | None = None
        self._body_mode = messages.BUFFERED
        self._response_body_mode = messages.NONE
        self._subset: frozenset[str] | None = None
        """The only endpoints that may be chosen, where a gateway says so."""
        self._held: bytearray | None = None
        """What came of the body while the headers are held back for it."""
        self._taken = 0
        """Bytes of the room for bodies."""
        self._asked = False
        self._refused = False
        self._large_for: str | None = None
        """The only model there is, where the body is too large to be looked at."""
        self._ticket: Ticket | None = None
        self._forecast: Forecast | None = None
        self._outcome = Outcome()
        self._decided = 0.0
        self._served_by = ""
        self._status: int | None = None
        self._usage: UsageReader | None = None
        self._first_chunk: float | None = None
        self._ended = False
        self._unseen = False
        """Whether Envoy was told not to tell of the response."""

    def answer(self, request: ProcessingRequest) -> Iterable[bytes]:
        """The replies to one message of the stream, in their order, as bytes.

        Mostly it is one. In full duplex the headers wait for the body, and all of it is answered at
        once: each reply is made when the one before it has been taken.
        """
        if request.HasField("protocol_config"):
            self._body_mode = request.protocol_config.request_body_mode
            self._response_body_mode = request.protocol_config.response_body_mode
        match request.WhichOneof("request"):
            case "request_headers":
                self._subset = messages.subset_of(request)
                return self._on_request_headers(request.request_headers)
            case "request_body":
                return self._on_request_body(request.request_body)
            case "request_trailers":
                return chain(
                    self._let_go(complete=True, last=False), [messages.proceed("request_trailers")]
                )
            case "response_headers":
                return [self._on_response_headers(request)]
            case "response_body":
                return [self._on_response_body(request.response_body)]
            case phase:
                return [messages.proceed(phase or "")]

    @property
    def _gateway(self) -> bool:
        """Whether it is a gateway that asks for an endpoint, and has no choice of its own.

        Only the endpoint picker protocol (Gateway API Inference Extension) has full duplex.
        """
        return self._body_mode == messages.FULL_DUPLEX_STREAMED

    # -- the request ------------------------------------------------------------------------

    def _on_request_headers(self, message: HttpHeaders) -> Sequence[bytes]:
        config = self._services.config
        policy_header, tenant_header = config.route.policy_header, config.request.tenant_header
        headers = messages.headers_of(message, _headers_read(policy_header, tenant_header))
        path = headers.get(":path", "")
        if endpoint_of(path) is None or headers.get(":method") != "POST":
            return [self._pass_on()]
        self._path = path
        self._request_id = headers.get("x-request-id", "")[:_LONGEST_ID]
        if config.route.allow_policy_header:
            self._policy = headers.get(policy_header, "")
        if tenant_header:
            self._tenant = headers.get(tenant_header.lower(), "")[:_LONGEST_ID]
        length = headers.get("content-length", "")
        self._content_length = int(length[:_DIGITS]) if length.isdecimal() else None
        if message.end_of_stream:
            return [self._route("request_headers", b"", partial=False)]
        readable = headers.get("content-encoding", "identity") == "identity"
        if readable and self._gateway:
            self._held = bytearray()
            return []
        if readable and self._body_mode in (messages.BUFFERED, messages.BUFFERED_PARTIAL):
            if (self._content_length or 0) <= LARGE_BODY:
                return [self._wait_for_body()]
            self._large_for = self._services.fleet.only_model
            if self._large_for is None:
                return [self._wait_for_body()]
        # The headers leave before the body is seen, so its length must do.
        return [self._route("request_headers", b"", partial=True)]

    def _wait_for_body(self) -> bytes:
        services = self._services
        self._unseen = not services.watch.sees(self._arrived, services.fleet.health.troubled)
        if self._unseen:
            return messages.body_only(self._body_mode)
        return messages.proceed("request_headers")

    def _pass_on(self) -> bytes:
        """What is no inference goes wherever Envoy sends it; a gateway has to be told where."""
        self._services.metrics.requests.add("passed")
        if not self._gateway:
            return messages.LEAVE_ALONE
        decision = self._services.router.decide(NO_WORK, among=self._subset)
        if decision is None:
            return _refuse(NoReplica(_NONE_READY))
        return self._send_to("request_headers", decision)

    def _on_request_body(self, message: HttpBody) -> Iterable[bytes]:
        if self._held is not None:
            self._held += message.body
            more = not message.end_of_stream
            if self._take_room(len(message.body)) and more and len(self._held) < LARGE_BODY:
                return []
            return self._let_go(complete=not more, last=not more)
        if self._body_mode == messages.FULL_DUPLEX_STREAMED:
            return [messages.pass_chunk("request_body", message.body, message.end_of_stream)]
        if not self._path or self._asked:
            return [messages.proceed("request_body")]
        return [self._route("request_body", message.body, partial=not message.end_of_stream)]

    def _take_room(self, size: int) -> bool:
        if not self._services.room.take(size):
            return False
        self._taken += size
        return True

    def _leave_room(self) -> None:
        self._services.room.give_back(self._taken)
        self._taken = 0

    def _let_go(self, complete: bool, last: bool) -> Iterable[bytes]:
        """The headers that were held back, with a destination now, and after them the body.

        ``complete``: there is no more of it; ``last``: nor trailers.
        """
        if self._held is None:
            return []
        body, self._held = bytes(self._held), None
        reply = self._route("request_headers", body, partial=not complete)
        if self._refused:
            self._leave_room()
            return [reply]
        return self._with_body(reply, body, last)

    def _with_body(self, reply: bytes, body: bytes, last: bool) -> Iterator[bytes]:
        """Holds its room until an Envoy that is slow to read has taken it all."""
        try:
            yield reply
            for start in range(0, len(body) or last, _PIECE):
                end = start + _PIECE
                ended = last and end >= len(body)
                yield messages.pass_chunk("request_body", body[start:end], ended)
        finally:
            self._leave_room()

    def _profile(self, body: bytes, partial: bool) -> RequestProfile:
        profile = self._inspect(body, partial)
        return replace(profile, tenant=self._tenant) if self._tenant else profile

    def _inspect(self, body: bytes, partial: bool) -> RequestProfile:
        if self._large_for is not None:
            length = self._content_length or 0
            return of_length(self._path, length, self._large_for, self._services.tokens)
        return inspect(
            self._path,
            body,
            self._services.tokens,
            partial=partial,
            content_length=self._content_length,
        )

    def _route(self, phase: str, body: bytes, partial: bool) -> bytes:
        services = self._services
        if self._asked:
            return messages.proceed(phase)
        self._asked = True
        started = services.clock()
        try:
            decision = self._decide(self._profile(body, partial))
        except Refusal as error:
            self._refused = True
            services.metrics.requests.add("refused")
            return _refuse(error)
        if decision is None:
            services.metrics.requests.add("unrouted")
            return messages.proceed(phase)
        self._take(decision)
        services.metrics.decision_seconds.observe(services.clock() - started)
        return self._send_to(phase, decision)

    def _decide(self, profile: RequestProfile) -> Decision | None:
        """None where Envoy is to choose.

        Raises:
            Refusal: it is not to be served.
        """
        decision = self._services.router.decide(profile, self._policy, self._subset)
        if decision is None:
            if self._gateway or self._subset is not None:
                raise NoReplica(_NONE_READY)
            return None
        longest = self._services.config.route.max_ttft_s
        soonest = least(decision.prediction.ttft)
        if longest is not None and soonest > longest:
            message = f"every replica is busy: the first token would come in {soonest:.0f} s"
            raise Saturated(message, code="saturated")
        return decision

    def _send_to(self, phase: str, decision: Decision) -> bytes:
        serve, destination = self._services.config.serve, decision.replica
        if serve.second_choice and (second := decision.second) is not None:
            destination += f",{second}"
        return messages.send_to(
            phase,
            destination,
            clear_route_cache=serve.clear_route_cache,
            leave_body=self._large_for is not None,
        )

    def _take(self, decision: Decision) -> None:
        services = self._services
        self._decided = services.clock()
        self._served_by = decision.replica
        self._ticket = services.fleet.dispatch(decision.replica, decision.profile)
        self._forecast = decision.forecast()
        record = services.log.add(self._request_id, services.wall(), decision, services.config.pool)
        self._outcome = record.outcome
        services.metrics.requests.add("routed")
        services.metrics.decisions.add(decision.policy, decision.replica)

    # -- the response -----------------------------------------------------------------------

    def _on_response_headers(self, request: ProcessingRequest) -> bytes:
        if self._ticket is None:
            return messages.proceed("response_headers")
        headers = messages.headers_of(request.response_headers, _RESPONSE_HEADERS)
        status = headers.get(":status", "")
        self._status = int(status) if status.isdecimal() else None
        self._ended = request.response_headers.end_of_stream
        self._served(messages.served_by(request))
        if self._ended or not self._worth_reading(headers.get("content-type", "")):
            return messages.proceed("response_headers")
        self._usage = UsageReader()
        if self._response_body_mode == messages.FULL_DUPLEX_STREAMED:
            return messages.proceed("response_headers")  # it comes anyway
        return messages.watch_response()

    def _served(self, upstream: str) -> None:
        """Which replica it was in the end, and whether it failed."""
        services = self._services
        assert self._ticket is not None
        if upstream and upstream != self._served_by:
            # Envoy passed the choice over or tried it in vain.
            services.fleet.failed(self._served_by)
            services.fleet.move(self._ticket, upstream)
            self._served_by = upstream
        self._outcome.served_by = self._served_by
        self._outcome.status = self._status
        services.metrics.responses.add(f"{(self._status or 0) // 100}xx")
        if self._status is not None and self._status >= 500:
            services.fleet.failed(self._served_by)
        else:
            services.fleet.answered(self._served_by)

    def _worth_reading(self, content_type: str) -> bool:
        """Every whole response, for it is one message, and a sample of the streams."""
        if self._status != 200:
            return False
        if not content_type.startswith("text/event-stream"):
            return True
        return self._services.random.random() < self._services.config.serve.stream_sample

    def _on_response_body(self, message: HttpBody) -> bytes:
        self._ended = message.end_of_stream
        if self._usage is not None and self._ticket is not None:
            if self._first_chunk is None and message.body and self._streamed:
                self._first_chunk = self._services.clock()
                self._services.fleet.first_token(self._ticket)
            self._usage.feed(message.body)
        if self._response_body_mode == messages.FULL_DUPLEX_STREAMED:
            return messages.pass_chunk("response_body", message.body, message.end_of_stream)
        return messages.proceed("response_body")

    @property
    def _streamed(self) -> bool:
        return self._forecast is not None and self._forecast.profile.stream

    # -- the end ----------------------------------------------------------------------------

    def close(self) -> None:
        """The stream is over: the response has ended, or the client or Envoy gave up."""
        self._leave_room()
        if self._ticket is None or self._forecast is None:
            return
        services, outcome = self._services, self._outcome
        complete = self._complete()
        prefilled = self._first_chunk is not None or (complete and not self._streamed)
        services.fleet.release(self._ticket, prefilled)
        self._ticket = None
        if self._status is None and not self._unseen:
            services.metrics.requests.add("unanswered")
        if not complete:
            return
        outcome.completion_s = services.clock() - self._decided
        if self._first_chunk is not None:
            outcome.ttft_s = self._first_chunk - self._decided
        self._learn(outcome.completion_s)
        self._account(self._forecast.predicted_completion, outcome.completion_s)

    def _complete(self) -> bool:
        """Whether it was answered to the end, as far as can be told.

        Envoy closes the stream alike when a response has ended and when a client hangs up; only
        where the response's chunks were read is the last one known.
        """
        if self._status is None or self._status >= 400:
            return False
        return self._usage is None or self._ended

    def _learn(self, seconds: float) -> None:
        """From the usage a response reported, ``seconds`` after the decision."""
        usage = None if self._usage is None else self._usage.usage()
        if usage is None or self._forecast is None:
            return
        services, profile, outcome = self._services, self._forecast.profile, self._outcome
        outcome.prompt_tokens = usage.prompt_tokens
        outcome.output_tokens = usage.completion_tokens
        if usage.prompt_tokens and profile.prompt_bytes:
            services.tokens.learn(profile.model, profile.prompt_bytes, usage.prompt_tokens)
        if usage.completion_tokens and profile.sequences:
            each = usage.completion_tokens / profile.sequences
            services.router.learn(self._forecast, self._served_by, each, seconds, outcome.ttft_s)

    def _account(self, predicted: float, actual: float) -> None:
        metrics = self._services.metrics
        metrics.completion_seconds.observe(actual)
        if actual > 0:
            metrics.prediction_error.observe(abs(predicted - actual) / actual)


@lru_cache(maxsize=16)
def _headers_read(policy_header: str, tenant_header: str | None) -> frozenset[str]:
    """The headers of a request that matter: to read all takes twice as long."""
    return frozenset(_REQUEST_HEADERS | {policy_header, (tenant_header or "").lower()})


def _refuse(error: Refusal) -> bytes:
    retry_after = 0 if isinstance(error, BadRequest) else _RETRY_AFTER_S
    return messages.refuse(error.status, error_body(error), retry_after)
