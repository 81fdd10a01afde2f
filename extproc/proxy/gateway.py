"""The endpoint picker's protocol (Gateway API Inference Extension): full duplex."""

from collections.abc import Iterable, Iterator
from itertools import chain

from extproc.proxy import messages
from extproc.proxy.admission import NONE_READY
from extproc.proxy.asked import Asked, asked_by, headers_read
from extproc.proxy.exchange import Exchange
from extproc.proxy.proto.ext_proc_pb2 import HttpHeaders, ProcessingRequest
from extproc.proxy.services import Services
from extproc.request.errors import NoReplica, Refusal
from extproc.request.media import LARGE_BODY
from extproc.request.profile import NO_WORK

_PIECE = 2**16
"""Bytes of a body that was held back, in each message that returns it."""


class Gateway(Exchange):
    """A gateway asks for an endpoint, and has no choice of its own.

    Headers wait for the body, which comes in chunks, and all of it is answered at once: each reply
    is made when the one before it has been taken.
    """

    has_fallback = False
    is_timed = False

    def __init__(self, services: Services, first: ProcessingRequest) -> None:
        super().__init__(services, first)
        self._waiting: Asked | None = None
        self._held_back = bytearray()
        """What came of the body while the headers wait for it."""

    def _on_request_headers(self, message: HttpHeaders) -> Iterable[bytes]:
        config = self._services.config
        headers = messages.headers_of(message, headers_read(config))
        asked = asked_by(headers, config)
        if asked is None:
            return [self._pass_on("request_headers", headers)]
        if asked.readable and not message.end_of_stream:
            self._waiting = asked
            return []
        partial = not message.end_of_stream
        return self._route("request_headers", asked, b"", partial)

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
        """The headers that were held back, with a destination now, after them the body, and after
        that the reply to trailers.

        ``complete``: there is no more of the body.
        """
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
