"""One HTTP request, from its headers to the end of its response."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain

from extproc.predict.inputs import least
from extproc.request.answer import AnswerNamer
from extproc.request.errors import BadRequest, NoModel, NoReplica, Refusal, Saturated, error_body
from extproc.request.inspect import inspect
from extproc.request.large import LARGE_BODY, of_length
from extproc.request.paths import endpoint_of, lists_models, stored_response_of
from extproc.request.profile import NO_WORK, Endpoint, RequestProfile
from extproc.request.rename import rename
from extproc.request.session import session_key, session_of
from extproc.route.router import Decision
from extproc.server import messages
from extproc.server.in_flight import InFlight
from extproc.server.models import model_list
from extproc.server.proto.ext_proc_pb2 import HttpBody, HttpHeaders, ProcessingRequest
from extproc.server.services import Services

_LONGEST_ID = 128
"""Characters of a request id: one is kept with every decision."""
_DIGITS = 15
"""Of a content-length: a petabyte."""
_NONE_READY = "no replica is ready to serve this request"
_RETRY_AFTER_S = 1
_PIECE = 2**16
"""Bytes of a body that was held back, in each message that returns it."""
_REQUEST_HEADERS = frozenset(
    {":path", ":method", "x-request-id", "content-length", "content-encoding"}
)


class Exchange:
    """Owns a request for its whole life: profiles it, has its replica chosen, and keeps what is in
    flight until the stream closes.

    Phases may come in any order; each is answered as it is, and one that is unknown with a
    continue.
    """

    __slots__ = (
        "_answer",
        "_asked",
        "_body_mode",
        "_content_length",
        "_endpoint",
        "_held",
        "_in_flight",
        "_large_for",
        "_policy",
        "_refused",
        "_request_id",
        "_response_body_mode",
        "_services",
        "_session",
        "_subset",
        "_taken",
        "_tenant",
        "_unseen",
    )

    def __init__(self, services: Services) -> None:
        self._services = services
        self._endpoint: Endpoint | None = None
        """What it asks for; None: what makes no replica compute."""
        self._request_id = ""
        self._policy = ""
        self._tenant = ""
        self._session = ""
        """As the client names it."""
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
        self._unseen = False
        """Whether Envoy was told not to tell of the response."""
        self._in_flight: InFlight | None = None
        self._answer: AnswerNamer | None = None
        """Where the answer is to have the name that was asked for."""

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
        route, tenant_header = config.route, config.request.tenant_header
        cookies = "cookie" if route.session_cookie else None
        wanted = _headers_read(route.policy_header, tenant_header, route.session_header, cookies)
        headers = messages.headers_of(message, wanted)
        path = headers.get(":path", "")
        endpoint = endpoint_of(path)
        if endpoint is None or headers.get(":method") != "POST":
            return [self._pass_on(path, headers.get(":method", ""))]
        self._endpoint = endpoint
        self._request_id = headers.get("x-request-id", "")[:_LONGEST_ID]
        if route.allow_policy_header:
            self._policy = headers.get(route.policy_header, "")
        if route.keeps_sessions:
            self._session = session_of(headers, route.session_header, route.session_cookie)
        if tenant_header:
            self._tenant = headers.get(tenant_header.lower(), "")[:_LONGEST_ID]
        length = headers.get("content-length", "")
        self._content_length = int(length[:_DIGITS]) if length.isdecimal() else None
        if message.end_of_stream:
            return [self._route("request_headers", b"", partial=False)[0]]
        readable = headers.get("content-encoding", "identity") == "identity"
        if readable and self._gateway:
            self._held = bytearray()
            return []
        if readable and self._body_mode in (messages.BUFFERED, messages.BUFFERED_PARTIAL):
            if (self._content_length or 0) <= LARGE_BODY or route.models:
                return [self._wait_for_body()]
            self._large_for = self._services.fleet.members.only_model
            if self._large_for is None:
                return [self._wait_for_body()]
        # The headers leave before the body is seen, so its length must do.
        return [self._route("request_headers", b"", partial=True)[0]]

    def _wait_for_body(self) -> bytes:
        services = self._services
        sees = services.watch.sees(services.clock(), services.fleet.eligibility.doubtful)
        reads = self._endpoint is Endpoint.RESPONSES  # their ids
        self._unseen = not (sees or reads or services.config.route.answer_asked_name)
        if self._unseen:
            return messages.body_only(self._body_mode)
        return messages.proceed("request_headers")

    def _pass_on(self, path: str, method: str) -> bytes:
        """What is no inference goes wherever Envoy sends it; a gateway has to be told where.

        What is about a stored response goes to the replica that holds it. A replica knows no name
        but its own, so where others are configured the list of models is not asked for there.
        """
        services = self._services
        services.metrics.requests.add("passed")
        if services.config.route.models and method == "GET" and lists_models(path):
            states = services.fleet.members
            if states:
                created = int(services.wall())
                return messages.answer(
                    200, model_list(services.fleet.members.names, states, created)
                )
        holder = services.fleet.holder(stored_response_of(path))
        if holder is not None and (self._subset is None or holder in self._subset):
            return self._send_to("request_headers", holder, leave_body=not self._gateway)
        if not self._gateway:
            return messages.LEAVE_ALONE
        decision = services.router.decide(NO_WORK, among=self._subset)
        if decision is None:
            return _refuse(NoReplica(_NONE_READY))
        return self._send_to("request_headers", self._destination(decision))

    def _on_request_body(self, message: HttpBody) -> Iterable[bytes]:
        if self._held is not None:
            self._held += message.body
            more = not message.end_of_stream
            if self._take_room(len(message.body)) and more and len(self._held) < LARGE_BODY:
                return []
            return self._let_go(complete=not more, last=not more)
        if self._body_mode == messages.FULL_DUPLEX_STREAMED:
            return [messages.pass_chunk("request_body", message.body, message.end_of_stream)]
        whole, came = message.end_of_stream, message.body
        reply, body = self._route("request_body", came, partial=not whole)
        if body is came:
            return [reply]
        length = len(came) if whole else self._content_length
        longer = len(body) - len(came)
        return [messages.with_body(reply, body, None if length is None else length + longer)]

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
        reply, body = self._route("request_headers", body, partial=not complete)
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

    def _profile(self, endpoint: Endpoint, body: bytes, partial: bool) -> RequestProfile:
        profile = self._inspect(endpoint, body, partial)
        if not (self._tenant or self._session):
            return profile
        session = session_key(self._session, profile.model) if self._session else ""
        return replace(profile, tenant=self._tenant, session=session)

    def _inspect(self, endpoint: Endpoint, body: bytes, partial: bool) -> RequestProfile:
        if self._large_for is not None:
            length = self._content_length or 0
            return of_length(endpoint, length, self._large_for, self._services.tokens)
        return inspect(
            endpoint,
            body,
            self._services.tokens,
            partial=partial,
            content_length=self._content_length,
            model_of=self._model,
        )

    def _model(self, asked: str, previous_response: str) -> str:
        router = self._services.router
        return router.model(asked, previous_response, self._subset, self._session)

    def _route(self, phase: str, body: bytes, partial: bool) -> tuple[bytes, bytes]:
        """The reply to a phase, and the body as the replica chosen is to get it."""
        services = self._services
        if self._asked or self._endpoint is None:
            return messages.proceed(phase), body
        self._asked = True
        started = services.clock()
        try:
            decision = self._decide(self._profile(self._endpoint, body, partial))
        except Refusal as error:
            self._refused = True
            services.metrics.requests.add("refused")
            return _refuse(error), body
        if decision is None:
            services.metrics.requests.add("unrouted")
            return messages.proceed(phase), body
        body = self._named(decision, body)
        self._in_flight = InFlight(services, decision, self._request_id, self._unseen)
        services.metrics.decision_seconds.observe(services.clock() - started)
        leave_body = self._large_for is not None
        return self._send_to(phase, self._destination(decision), leave_body), body

    def _decide(self, profile: RequestProfile) -> Decision | None:
        """None where Envoy is to choose.

        Raises:
            Refusal: it is not to be served.
        """
        router, route = self._services.router, self._services.config.route
        decision = router.decide(profile, self._policy, self._subset)
        if route.listed_models_only and self._is_unknown(profile, decision):
            raise NoModel(profile.asked, router.fleet.members.models)
        if decision is None:
            apart = router.fleet.eligibility.only_some_serve(profile.model)
            served = router.fleet.members.names.served(profile.model)
            apart |= profile.asked != "" and served != (profile.asked,)
            if self._gateway or self._subset is not None or apart:
                raise NoReplica(_NONE_READY)
            return None
        soonest = least(decision.prediction.ttft)
        if route.max_ttft_s is not None and soonest > route.max_ttft_s:
            message = f"every replica is busy: the first token would come in {soonest:.0f} s"
            raise Saturated(message, code="saturated")
        return decision

    def _is_unknown(self, profile: RequestProfile, decision: Decision | None) -> bool:
        """Whether the request names a model that no replica serves, as far as all are known."""
        fleet = self._services.fleet
        if not fleet.known.is_set():
            return False
        if decision is not None and decision.name in fleet.members.models_on(decision.replica):
            return False
        return profile.asked != "" and fleet.eligibility.unknown(profile.model)

    def _named(self, decision: Decision, body: bytes) -> bytes:
        """The body, with the name by which the replica chosen serves the model."""
        profile, name = decision.profile, decision.name
        if profile.asked in ("", name):
            return body
        if self._services.config.route.answer_asked_name:
            self._answer = AnswerNamer(name, profile.asked)
        return rename(profile.endpoint, body, profile.asked, name)

    def _destination(self, decision: Decision) -> str:
        if not self._services.config.serve.second_choice:
            return decision.replica
        second = decision.second
        if (
            second is None
            and decision.name
            and not self._services.fleet.members.all_serve(decision.name)
        ):
            second = decision.replica  # for Envoy's fallback policy would try it on any
        return decision.replica if second is None else f"{decision.replica},{second}"

    def _send_to(self, phase: str, destination: str, leave_body: bool = False) -> bytes:
        clear_route_cache = self._services.config.serve.clear_route_cache
        return messages.send_to(phase, destination, clear_route_cache, leave_body)

    # -- the response -----------------------------------------------------------------------

    def _on_response_headers(self, request: ProcessingRequest) -> bytes:
        reads = self._in_flight is not None and self._in_flight.answered(request)
        if not (reads or self._answer) or request.response_headers.end_of_stream:
            return messages.proceed("response_headers")
        if self._response_body_mode == messages.FULL_DUPLEX_STREAMED:
            return messages.proceed("response_headers")  # it comes anyway
        return messages.watch_response(changes=self._answer is not None)

    def _on_response_body(self, message: HttpBody) -> bytes:
        if self._in_flight is not None:
            self._in_flight.chunk(message)
        body = message.body
        if self._answer is not None:
            body = self._answer.feed(body, message.end_of_stream)
        if self._response_body_mode == messages.FULL_DUPLEX_STREAMED:
            return messages.pass_chunk("response_body", body, message.end_of_stream)
        if self._answer is not None:
            return messages.replace_chunk(body)
        return messages.proceed("response_body")

    def close(self) -> None:
        """The stream is over: the response has ended, or the client or Envoy gave up."""
        self._leave_room()
        if self._in_flight is not None:
            self._in_flight.end()
            self._in_flight = None


@lru_cache(maxsize=16)
def _headers_read(*configured: str | None) -> frozenset[str]:
    """The headers of a request that matter: to read all takes twice as long."""
    return _REQUEST_HEADERS | {(name or "").lower() for name in configured}


def _refuse(error: Refusal) -> bytes:
    retry_after = 0 if isinstance(error, BadRequest | NoModel) else _RETRY_AFTER_S
    return messages.answer(error.status, error_body(error), retry_after)
