"""The three ways in which Envoy tells of a request, by the first message of its stream."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from itertools import chain

from extproc.proxy import messages
from extproc.proxy.admission import NONE_READY
from extproc.proxy.exchange import Exchange
from extproc.proxy.headers import Asked, asked_by, headers_read
from extproc.proxy.proto.ext_proc_pb2 import HttpHeaders, ProcessingRequest
from extproc.proxy.services import Services
from extproc.request.endpoint import Endpoint
from extproc.request.errors import NoReplica, Refusal
from extproc.request.media import LARGE_BODY, of_length
from extproc.request.profile import NO_WORK
from extproc.route.router import Decision

_HELD_BACK = None, messages.BUFFERED, messages.BUFFERED_PARTIAL  # modes: headers wait for the body
_PIECE = 2**16  # bytes of a body that was held back, in each message that returns it


def protocol_of(first: ProcessingRequest) -> type[Exchange]:
    """Returns the protocol of a stream that begins with this message."""
    if first.WhichOneof("request") == "request_body":
        return BodyFirst
    full_duplex = first.protocol_config.request_body_mode == messages.FULL_DUPLEX_STREAMED
    return Gateway if full_duplex else HeadersFirst


class BodyFirst(Exchange):
    """The body is the first message and the only one before the request leaves; Envoy tells what
    matters of the headers in its attributes (``request_header_mode: SKIP``).

    A request without a body, such as a GET, is told of with its response, if at all.
    """

    def _on_request_body(self, request: ProcessingRequest) -> Iterable[bytes]:
        if self._in_flight is not None:
            return [messages.proceed("request_body")]
        message, config = request.request_body, self._services.config
        headers = {":method": "POST"} | messages.attributes_of(request, headers_read(config))
        asked = asked_by(headers, config)
        if asked is None:
            return [self._pass_on("request_body", headers)]
        self._endpoint = asked.endpoint
        self._unseen = messages.UNSEEN in headers and asked.endpoint is not Endpoint.RESPONSES
        if asked.readable:
            return self._route_body(asked, message)
        asked = asked._replace(length=len(message.body))
        return self._route("request_body", asked, b"", partial=True)


class _HeadersBeforeBody(Exchange, ABC):
    def __init__(self, services: Services, first: ProcessingRequest) -> None:
        super().__init__(services, first)
        self._waiting: Asked | None = None  # for its body

    def _on_request_headers(self, message: HttpHeaders) -> Iterable[bytes]:
        config = self._services.config
        headers = messages.headers_of(message, headers_read(config))
        asked = asked_by(headers, config)
        if asked is None:
            return [self._pass_on("request_headers", headers)]
        self._endpoint = asked.endpoint
        if message.end_of_stream:
            return self._route("request_headers", asked, b"", partial=False)
        return self._before_body(asked)

    @abstractmethod
    def _before_body(self, asked: Asked) -> Iterable[bytes]: ...


class HeadersFirst(_HeadersBeforeBody):
    """Two messages before a request leaves, where no filter after ext_proc holds it back; and one
    for what is decided without a body. The body need not come, nor Envoy tell of the response: the
    reply to the headers says so."""

    def _before_body(self, asked: Asked) -> Iterable[bytes]:
        if asked.readable and self._body_mode in _HELD_BACK:
            model = self._too_large_for(asked)
            return [self._wait_for_body(asked)] if model is None else self._by_length(asked, model)
        # The headers leave before the body is seen, so its length must do.
        return self._route("request_headers", asked, b"", partial=True)

    def _on_request_body(self, request: ProcessingRequest) -> Iterable[bytes]:
        asked, self._waiting = self._waiting, None
        if asked is None:
            return [messages.proceed("request_body")]
        return self._route_body(asked, request.request_body)

    def _to_any(self, phase: str) -> bytes:
        return messages.LEAVE_ALONE

    def _wait_for_body(self, asked: Asked) -> bytes:
        services, self._waiting = self._services, asked
        sees = services.watch.sees(services.clock(), services.fleet.eligibility.doubtful)
        reads = asked.endpoint is Endpoint.RESPONSES  # their ids
        self._unseen = not (sees or reads)
        if self._unseen:
            return messages.body_only(self._body_mode or messages.BUFFERED)
        return messages.proceed("request_headers")

    def _too_large_for(self, asked: Asked) -> str | None:
        """Returns the only model there is, where the body is too large to be looked at."""
        if (asked.length or 0) <= LARGE_BODY or self._services.config.route.models:
            return None
        return self._services.fleet.members.only_model

    def _by_length(self, asked: Asked, model: str) -> Iterable[bytes]:
        services = self._services
        started = services.clock()
        profile = of_length(asked.endpoint, asked.length or 0, model, services.tokens)

        def sent(decision: Decision | None) -> Iterable[bytes]:
            if decision is None:
                return [messages.proceed("request_headers")]
            priority = self._priority(decision.profile)
            return [self._sent("request_headers", decision, priority, leave_body=True)]

        return self._decide(asked, profile, started, 0, sent)


class Gateway(_HeadersBeforeBody):
    """The endpoint picker's protocol (Gateway API Inference Extension), full duplex.

    A gateway asks for an endpoint, and has no choice of its own. Headers wait for the body, which
    comes in chunks, and all of it is answered at once: each reply is made when the one before it
    has been taken.
    """

    has_fallback = False
    is_timed = False

    def __init__(self, services: Services, first: ProcessingRequest) -> None:
        super().__init__(services, first)
        self._held_back = bytearray()  # of the body, while the headers wait for it

    def _before_body(self, asked: Asked) -> Iterable[bytes]:
        if asked.readable:
            self._waiting = asked
            return []
        return self._route("request_headers", asked, b"", partial=True)

    def _on_request_body(self, request: ProcessingRequest) -> Iterable[bytes]:
        message = request.request_body
        if self._waiting is None:
            return [messages.pass_chunk("request_body", message.body, message.end_of_stream)]
        self._held_back += message.body
        more = not message.end_of_stream
        if self._take_room(len(message.body)) and more and len(self._held_back) < LARGE_BODY:
            return []
        return self._let_go(self._waiting, complete=not more)

    def _on_request_trailers(self) -> Iterable[bytes]:
        trailers = [messages.proceed("request_trailers")]
        if self._waiting is None:
            return trailers
        return self._let_go(self._waiting, complete=True, trailers=trailers)

    def _to_any(self, phase: str) -> bytes:
        decision = self._services.router.decide(NO_WORK, among=self._subset)
        if decision is None:
            raise NoReplica(NONE_READY)
        return messages.send_to(phase, self._destination(decision))

    def _let_go(
        self, asked: Asked, complete: bool, trailers: Iterable[bytes] = ()
    ) -> Iterable[bytes]:
        """Replies with the headers that were held back, with a destination now, after them the
        body, and after that the reply to trailers; ``complete``: no more of the body comes."""
        body, self._held_back, self._waiting = bytes(self._held_back), bytearray(), None

        def replied(reply: bytes, body: bytes) -> Iterable[bytes]:
            return chain(self._with_body(reply, body, complete and not trailers), trailers)

        try:
            return self._route("request_headers", asked, body, not complete, replied)
        except Refusal:
            self._leave_room()
            raise

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
