"""Requests whose body is the first message and the only one before they leave."""

from collections.abc import Iterable

from extproc.request.endpoint import Endpoint
from extproc.server import messages
from extproc.server.asked import asked_by, headers_read
from extproc.server.exchange import Exchange
from extproc.server.proto.ext_proc_pb2 import ProcessingRequest


class BodyFirst(Exchange):
    """The body is the first message and the only one before the request leaves; Envoy tells what
    matters of the headers in its attributes (``request_header_mode: SKIP``).

    What has no body, such as a GET, is told of with its response, if at all.
    """

    def _on_request_body(self, request: ProcessingRequest) -> Iterable[bytes]:
        if self._in_flight is not None:
            return [messages.proceed("request_body")]
        message, config = request.request_body, self._services.config
        headers = {":method": "POST"} | messages.attributes_of(request, headers_read(config))
        asked = asked_by(headers, config)
        if asked is None:
            return [self._pass_on("request_body", headers)]
        self._unseen = messages.UNSEEN in headers and asked.endpoint is not Endpoint.RESPONSES
        if asked.readable:
            return self._route_body(asked, message)
        asked = asked._replace(length=len(message.body))
        return self._route("request_body", asked, b"", partial=True)
