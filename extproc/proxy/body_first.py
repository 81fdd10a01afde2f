"""Requests whose body is the first message and the only one before they leave."""

from collections.abc import Iterable

from extproc.proxy import messages
from extproc.proxy.asked import asked_by, headers_read
from extproc.proxy.exchange import Exchange
from extproc.proxy.proto.ext_proc_pb2 import ProcessingRequest
from extproc.request.endpoint import Endpoint


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
