"""Requests whose headers come first, and then the body, in one message or not at all."""

from collections.abc import Iterable

from extproc.proxy import messages
from extproc.proxy.asked import Asked, asked_by, headers_read
from extproc.proxy.exchange import Exchange
from extproc.proxy.proto.ext_proc_pb2 import HttpHeaders, ProcessingRequest
from extproc.proxy.services import Services
from extproc.request.endpoint import Endpoint
from extproc.request.media import LARGE_BODY, of_length
from extproc.route.router import Decision

_HELD_BACK = None, messages.BUFFERED, messages.BUFFERED_PARTIAL
"""Modes in which the headers wait for the body."""


class HeadersFirst(Exchange):
    """Two messages before a request leaves, where no filter after ext_proc holds it back; and one
    for what is decided without a body. The body need not come, nor Envoy tell of the response: the
    reply to the headers says so."""

    def __init__(self, services: Services, first: ProcessingRequest) -> None:
        super().__init__(services, first)
        self._waiting: Asked | None = None
        """For its body."""

    def _on_request_headers(self, message: HttpHeaders) -> Iterable[bytes]:
        config = self._services.config
        headers = messages.headers_of(message, headers_read(config))
        asked = asked_by(headers, config)
        if asked is None:
            return [self._pass_on("request_headers", headers)]
        if message.end_of_stream:
            return self._route("request_headers", asked, b"", partial=False)
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
        self._unseen = not (sees or reads or services.config.route.answer_asked_name)
        if self._unseen:
            return messages.body_only(self._body_mode or messages.BUFFERED)
        return messages.proceed("request_headers")

    def _too_large_for(self, asked: Asked) -> str | None:
        """The only model there is, where the body is too large to be looked at."""
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
