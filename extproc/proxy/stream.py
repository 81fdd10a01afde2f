"""A stream of Envoy's messages is one coroutine; it begins in one of three protocols.

The protocol shows in the first message. Messages that it does not wait for may come at any time,
and are answered as they are.
"""

from collections.abc import Callable

from extproc.proxy import messages
from extproc.proxy.admission import NONE_READY, choose
from extproc.proxy.body_memory import MOST_EACH, NoMemory, TooLarge
from extproc.proxy.call import Left
from extproc.proxy.exchange import Exchange
from extproc.proxy.headers import RequestHeaders, headers_read
from extproc.request.endpoint import Endpoint
from extproc.request.errors import NoReplica
from extproc.request.inspect import names_model
from extproc.request.media import LARGE_BODY
from extproc.request.profile import NO_WORK

_HELD_BACK = None, messages.BUFFERED, messages.BUFFERED_PARTIAL  # modes: headers wait for the body
_PIECE = 2**16  # bytes of a body that was held back, in each message that returns it


async def stream(exchange: Exchange) -> None:
    """Brings one request to a replica, and follows its response to the end."""
    try:
        await exchange.begin()
        protocol = _full_duplex if exchange.full_duplex else _headers_first
        await exchange.answer(_body_first if exchange.body_first else protocol)
        while True:
            await exchange.pass_one()
    except Left:
        pass
    finally:
        exchange.close()


async def _body_first(exchange: Exchange) -> None:
    """The body is the first message and the only one before the request leaves; Envoy tells what
    matters of the headers in its attributes (``request_header_mode: SKIP``).

    A request without a body, such as a GET, is told of with its response, if at all.
    """
    config = exchange.services.config
    message = await exchange.read("request_body")
    headers = {":method": "POST"} | messages.attributes_of(message, headers_read(config))
    asked = exchange.is_for(headers)
    if asked is None:
        proceed = messages.proceed("request_body")
        await exchange.pass_on("request_body", headers, lambda: proceed)
        return
    exchange.unseen = (
        messages.RESPONSE_SKIPPED in headers and asked.endpoint is not Endpoint.RESPONSES
    )
    if not asked.readable:
        asked = asked._replace(length=len(message.request_body.body))
        del message
        await exchange.write(await choose(exchange, "request_body", asked, partial=True))
        return
    whole = exchange.take_body(message)
    del message
    await _send_body(exchange, asked, whole)


async def _headers_first(exchange: Exchange) -> None:
    """Two messages before a request leaves, where no filter after ext_proc holds it back; and one
    for what is decided without a body. The body need not come, nor Envoy tell of the response: the
    reply to the headers says so."""
    asked = await _headers(exchange, messages.leave_alone)
    if asked is None:
        return
    # Where the headers leave before the body is seen its length must do.
    unread, model = not asked.readable or exchange.body_mode not in _HELD_BACK, ""
    if not unread and (asked.length or 0) > LARGE_BODY:
        model = exchange.only_model or ""
    if unread or model:
        await exchange.write(await choose(exchange, "request_headers", asked, True, model))
        return
    await exchange.write(_wait_for_body(exchange, asked))
    whole = exchange.take_body(await exchange.read("request_body"))
    await _send_body(exchange, asked, whole)


async def _full_duplex(exchange: Exchange) -> None:
    """The endpoint picker's protocol (Gateway API Inference Extension).

    A gateway asks for an endpoint, and has no choice of its own. Headers wait for the body, which
    comes in chunks, and all of it is answered at once: each reply is made when the one before it
    has been taken.
    """
    asked = await _headers(exchange, lambda: _to_any(exchange))
    if asked is None:
        return
    if not asked.readable:
        await exchange.write(await choose(exchange, "request_headers", asked, partial=True))
        return
    ended, trailers = await _first_part(exchange, asked)
    reply = await choose(exchange, "request_headers", asked, partial=not ended)
    if trailers:
        # Before trailers that are answered for themselves Envoy sends a body twice
        # (https://github.com/envoyproxy/envoy/issues/45470).
        await exchange.write(messages.with_whole_request(reply, exchange.body.take()))
        return
    await exchange.write(reply)
    body, last = exchange.body.take(), ended
    for start in range(0, len(body) or last, _PIECE):
        end = start + _PIECE
        piece = messages.pass_chunk("request_body", body[start:end], last and end >= len(body))
        await exchange.write(piece)


async def _first_part(exchange: Exchange, asked: RequestHeaders) -> tuple[bool, bool]:
    """Reads as much of the body as is ever looked at, and on to the model's name, where that
    matters; returns whether that was all, and whether trailers followed."""
    body, most = exchange.body, LARGE_BODY
    while True:
        message = await exchange.read("request_body", "request_trailers")
        trailers = message.WhichOneof("request") == "request_trailers"
        ended = trailers or message.request_body.end_of_stream
        body.add(message.request_body.body, more_comes=not ended)
        if ended:
            return ended, trailers
        short = exchange.services.body_memory.free < 0
        if not short and len(body) < most:
            continue
        if exchange.only_model or names_model(asked.endpoint, body.data):
            body.add(b"")  # it waits no more
            return False, False
        if short:
            raise NoMemory
        if most == MOST_EACH:
            raise TooLarge
        most = MOST_EACH


async def _headers(exchange: Exchange, to_any: Callable[[], bytes]) -> RequestHeaders | None:
    """Reads the headers. A request that makes no replica compute is answered, as is one without a
    body; None then."""
    config = exchange.services.config
    message = (await exchange.read("request_headers")).request_headers
    headers = messages.headers_of(message, headers_read(config))
    asked = exchange.is_for(headers)
    if asked is None:
        await exchange.pass_on("request_headers", headers, to_any)
    elif message.end_of_stream:
        await exchange.write(await choose(exchange, "request_headers", asked))
        return None
    return asked


async def _send_body(exchange: Exchange, asked: RequestHeaders, whole: bool) -> None:
    body = exchange.body
    came = len(body)
    reply = await choose(exchange, "request_body", asked, partial=not whole)
    if body.changed:
        length, longer = came if whole else asked.length, len(body) - came
        changed = body.take()
        reply = messages.with_body(reply, changed, None if length is None else length + longer)
        del changed
    else:
        body.release()
    await exchange.write(reply)


def _wait_for_body(exchange: Exchange, asked: RequestHeaders) -> bytes:
    services = exchange.services
    sees = services.responses.takes(services.clock(), 1.0)
    sees |= services.fleet.eligibility.has_suspects  # a replica may be well again
    sees |= asked.endpoint is Endpoint.RESPONSES  # their ids are read
    exchange.unseen = not sees
    if sees:
        return messages.proceed("request_headers")
    return messages.body_only(exchange.body_mode or messages.BUFFERED)


def _to_any(exchange: Exchange) -> bytes:
    decision = exchange.services.router.decide(NO_WORK, among=exchange.subset)
    if decision is None:
        raise NoReplica(NONE_READY)
    return messages.send_to("request_headers", exchange.destination(decision))
