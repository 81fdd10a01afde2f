"""Each stream of Envoy is one HTTP request, served by one coroutine in one of three protocols.

The first message selects the protocol: body first, headers first, or full duplex. Invariants, which
``tests/proxy/test_stream.py`` checks with random messages:

- Every message gets one reply, in order; in full duplex, one reply may answer several messages. A
  message that the protocol does not expect gets an empty reply.
- However the stream ends, afterwards the request has no entry in the ledger or the queue, and holds
  no body memory.
- The router holds a body only until the replies that route its request are written.
"""

import logging
from functools import cache

from extproc.proxy import messages
from extproc.proxy.admission import admit, observe
from extproc.proxy.body_memory import BODY_LIMIT_BYTES, NoMemory, TooLarge
from extproc.proxy.call import Left
from extproc.proxy.exchange import Exchange
from extproc.proxy.headers import header_names
from extproc.proxy.proto.ext_proc_pb2 import ProcessingRequest
from extproc.request.endpoint import Endpoint
from extproc.request.errors import Refusal
from extproc.request.inspect import names_model
from extproc.request.media import LARGE_BODY

logger = logging.getLogger(__name__)

_SERVED_MODES = None, messages.BUFFERED, messages.FULL_DUPLEX_STREAMED
"""In other body modes, Envoy may forward a request before the router has the whole body."""
_PIECE = 2**16  # bytes of a body in each full duplex reply


async def stream(exchange: Exchange) -> None:
    """Routes one request to a replica and follows its response to the end of the stream."""
    try:
        await exchange.begin()
        try:
            await _serve(exchange)
        except Refusal as refusal:
            # A traceback has frames, and their variables name the refusal: a cycle.
            await exchange.refuse(refusal.with_traceback(None))
        finally:
            exchange.body.release()
        await exchange.read()  # no phase: replies to all further messages until the stream ends
    except Left:
        pass
    finally:
        exchange.close()


async def _serve(exchange: Exchange) -> None:
    """Reads the headers, and serves the request in the protocol of its stream.

    If Envoy sends the body only (``request_header_mode: SKIP``), the message with the body carries
    the headers that the router needs, as attributes. The stream of a request without a body, such
    as a GET, then begins with the response, or has no message at all.
    """
    phase = "request_body" if exchange.body_first else "request_headers"
    message = await exchange.read(phase)
    names = header_names(exchange.services.config.headers)
    if exchange.body_first:
        values = {":method": "POST"} | messages.attributes_of(message, names)
    else:
        values = messages.headers_of(message.request_headers, names)
    headers = exchange.inference_headers(values)
    if headers is None:
        await exchange.pass_through(phase, values)
    elif exchange.steered and exchange.body_mode not in _SERVED_MODES:
        _warn_of_body_mode()
        await exchange.pass_through(phase, values)
    elif not exchange.steered:
        await _observe(exchange, message)
    elif exchange.body_first:
        skipped = messages.RESPONSE_SKIPPED in values
        exchange.response_visible = not skipped or headers.endpoint is Endpoint.RESPONSES
        _take_body(exchange, message)
        del message, values  # both may be large, and the request may wait long in the queue
        await _route_body(exchange)
    elif message.request_headers.end_of_stream or not headers.readable:
        exchange.body.whole = message.request_headers.end_of_stream
        del message, values
        await exchange.write(await admit(exchange, phase))
    else:
        del message, values
        await (_full_duplex if exchange.full_duplex else _headers_first)(exchange)


def _take_body(exchange: Exchange, message: ProcessingRequest) -> None:
    """Holds a whole body; of a compressed body, only the length counts."""
    body, headers = message.request_body.body, exchange.headers
    if headers.readable:
        exchange.body.add(body)
    else:
        exchange.headers = headers._replace(length=len(body))


async def _headers_first(exchange: Exchange) -> None:
    """Asks Envoy for the body, unless it is large and the model is known.

    The reply to the headers tells Envoy whether to send the body and the response.
    """
    _skip_large_body(exchange)
    if exchange.unread_model:
        await exchange.write(await admit(exchange, "request_headers"))
        return
    services = exchange.services
    # The router needs the response if its budget of responses allows, if a failed replica may have
    # recovered, or if the replica stores the response under an id.
    exchange.response_visible = (
        services.responses.takes(services.clock(), 1.0)
        or services.fleet.eligibility.has_suspects
        or exchange.endpoint is Endpoint.RESPONSES
    )
    with_response = messages.proceed("request_headers")
    await exchange.write(with_response if exchange.response_visible else messages.BODY_ONLY)
    _take_body(exchange, await exchange.read("request_body"))
    await _route_body(exchange)


def _skip_large_body(exchange: Exchange) -> None:
    """Sets ``unread_model`` if the body need not pass the router, because it is large and the model
    is known."""
    if (exchange.headers.length or 0) > _most_read(exchange) and not exchange.full_duplex:
        exchange.unread_model = exchange.only_model or ""


def _most_read(exchange: Exchange) -> int:
    """Returns how many bytes of a body the router reads although it knows the model: more if the
    router chooses, and the body may name, behind its images, a stored response that only one
    replica can continue."""
    continues = exchange.steered and exchange.endpoint is Endpoint.RESPONSES
    return BODY_LIMIT_BYTES if continues else LARGE_BODY


async def _full_duplex(exchange: Exchange) -> None:
    """Serves the endpoint picker's protocol (Gateway API Inference Extension).

    A gateway has no fallback of its own. The router answers the headers after it has read the body,
    which comes in chunks. The replies then return the whole body to Envoy, chunk by chunk.
    """
    trailers = await _read_chunks(exchange)
    reply = await admit(exchange, "request_headers")
    if trailers:
        # Envoy sends a body twice before trailers that get a reply of their own
        # (https://github.com/envoyproxy/envoy/issues/45470).
        await exchange.write(messages.with_whole_request(reply, exchange.body.take()))
        return
    await exchange.write(reply)
    body, whole = exchange.body.take(), exchange.body.whole
    for start in range(0, len(body) or whole, _PIECE):
        end = start + _PIECE
        piece = messages.pass_chunk("request_body", body[start:end], whole and end >= len(body))
        await exchange.write(piece)


async def _read_chunks(exchange: Exchange) -> bool:
    """Reads at most :func:`_most_read` bytes of the body, and more only while the model is unknown.

    Returns True if the body has ended with trailers.

    Raises:
        NoMemory: memory is short, and the model is unknown.
        TooLarge: the model is not named in the first ``BODY_LIMIT_BYTES``.
    """
    body, memory, limit = exchange.body, exchange.services.body_memory, _most_read(exchange)
    while True:
        message = await exchange.read("request_body", "request_trailers")
        trailers: bool = message.WhichOneof("request") == "request_trailers"
        body.add(message.request_body.body, trailers or message.request_body.end_of_stream)
        if body.whole:
            return trailers
        short = memory.free < 0
        if not short and body.size < limit:
            continue
        if exchange.only_model or names_model(exchange.headers.endpoint, body.data):
            memory.resize(body, body.size)  # awaits no further chunk: must not be evicted
            return False
        if short:
            raise NoMemory
        if limit == BODY_LIMIT_BYTES:
            text = f"the model is not named in the first {limit} bytes of the body: put it first"
            raise TooLarge(text, "model", "body_too_large")
        limit = BODY_LIMIT_BYTES


@cache
def _warn_of_body_mode() -> None:
    logger.error(
        "request_body_mode of an Envoy is neither BUFFERED nor FULL_DUPLEX_STREAMED: Envoy's "
        "fallback policy chooses the replicas; run 'extproc check --envoy YOUR.yaml'"
    )


async def _observe(exchange: Exchange, message: ProcessingRequest) -> None:
    """Passes each message of a request on unchanged; then decides as if to route the request.

    The router decides when it has the whole request, when it has as much of the request as it may
    hold, or when the response begins, whichever comes first.
    """
    body, headers, enough = exchange.body, exchange.headers, False
    while True:
        match message.WhichOneof("request"):
            case "request_headers":
                body.whole = message.request_headers.end_of_stream
                _skip_large_body(exchange)
            case "request_body":
                # If trailers follow a buffered body, Envoy does not set ``end_of_stream``.
                buffered = exchange.body_mode == messages.BUFFERED
                body.add(message.request_body.body, buffered or message.request_body.end_of_stream)
                enough = body.size >= LARGE_BODY or exchange.services.body_memory.free < 0
            case "request_trailers":
                body.whole = True
            case _:
                exchange.unread(message)
                break
        reply = messages.RESPONSE_ONLY if exchange.unread_model else exchange.reply_to(message)
        del message  # as in Exchange.read
        await exchange.write(reply)
        if body.whole or enough or exchange.unread_model:
            break
        message = await exchange.next()
    if not headers.readable:
        exchange.headers = headers._replace(length=body.size or headers.length)
        body.release()
    observe(exchange)


async def _route_body(exchange: Exchange) -> None:
    body = exchange.body
    reply = await admit(exchange, "request_body")
    if body.changed:
        reply = messages.with_body(reply, body.take())
    else:
        body.release()
    await exchange.write(reply)
