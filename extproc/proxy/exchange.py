"""An HTTP request, from its first message to the end of its response."""

import asyncio
from collections.abc import Awaitable, Callable, Container, Mapping
from typing import Any

from extproc.observe.decision_log import summary_of
from extproc.observe.traces import Trace
from extproc.proxy import messages
from extproc.proxy.body_memory import BufferedBody
from extproc.proxy.call import Call
from extproc.proxy.headers import RequestHeaders, asked_by, model_list
from extproc.proxy.in_flight import InFlight
from extproc.proxy.proto.ext_proc_pb2 import HttpBody, ProcessingRequest
from extproc.proxy.services import Services
from extproc.request.endpoint import Endpoint, lists_models, stored_response_of
from extproc.request.errors import NoReplica, Refusal, error_body
from extproc.request.rewrite import rename, with_priority
from extproc.route.decision import Decision

HUNG = "the replica that had this request hangs: send it again"


class Exchange:
    """A request for its whole life: it is profiled, a replica is chosen, and it is in flight until
    the stream closes."""

    def __init__(self, services: Services, call: Call, trace: Trace | None = None) -> None:
        self.services = services
        self.write = call.write
        self.body = BufferedBody(services.body_memory)
        self.body_mode: int | None = None  # None: an older Envoy does not tell
        self.body_first = False  # it comes before the headers
        self.full_duplex = False  # a gateway's: it has no choice of its own, and patience
        self.subset: frozenset[str] | None = None  # the only endpoints that a gateway allows
        self.endpoint: Endpoint | None = None  # whose form errors have
        self.unseen = False  # Envoy was told not to tell of the response
        self._call = call
        self._trace = trace
        self._first: ProcessingRequest | None = None  # the first message, until it is answered
        self._response_body_mode = messages.NONE
        self._request_ended = False  # in full duplex: the body's last chunk has come
        self._in_flight: InFlight | None = None

    # -- messages ---------------------------------------------------------------------------

    async def begin(self) -> None:
        first = self._first = await self._call.read()
        if first.HasField("protocol_config"):
            self.body_mode = first.protocol_config.request_body_mode
            self._response_body_mode = first.protocol_config.response_body_mode
        self.body_first = first.WhichOneof("request") == "request_body"
        self.full_duplex = self.body_mode == messages.FULL_DUPLEX_STREAMED and not self.body_first
        self.subset = messages.subset_of(first)

    def is_for(self, headers: Mapping[str, str]) -> RequestHeaders | None:
        """The request by its headers; None where it makes no replica compute."""
        asked = asked_by(headers, self.services.config)
        self.endpoint = None if asked is None else asked.endpoint
        return asked

    async def answer(self, protocol: Callable[["Exchange"], Awaitable[None]]) -> None:
        try:
            await protocol(self)
        except Refusal as refusal:
            self.body.release()
            reason = refusal.code or refusal.kind
            self.services.metrics.refused.add(reason)
            self.ends_here("refused", reason)
            await self.write(refuse(refusal, self.endpoint))
        finally:
            self.body.release()

    async def read(self, *phases: str) -> ProcessingRequest:
        """The next message of these phases; those that come before it are answered as they are."""
        while True:
            message, self._first = self._first or await self._next(), None
            if message.WhichOneof("request") in phases:
                return message
            await self.write(self._reply_to(message))

    async def pass_one(self) -> None:
        message = await self._next()
        reply = self._reply_to(message)
        del message  # it may be a body of many MB, and Envoy slow to read
        await self.write(reply)

    async def _next(self) -> ProcessingRequest:
        """The next message, but for chunks after a body's last, which Envoy 1.35 to 1.37 repeats
        (https://github.com/envoyproxy/envoy/issues/46237)."""
        while True:
            message = await self._call.read(self.body.dropped)
            if not self.full_duplex or message.WhichOneof("request") != "request_body":
                return message
            if not self._request_ended:
                self._request_ended = message.request_body.end_of_stream
                return message

    def take_body(self, message: ProcessingRequest) -> bool:
        """Holds a body that comes in one piece; returns whether it is a whole one."""
        self.body.add(message.request_body.body)
        # Trailers may follow a whole one.
        return message.request_body.end_of_stream or self.body_mode == messages.BUFFERED

    def _reply_to(self, message: ProcessingRequest) -> bytes:
        phase = message.WhichOneof("request") or ""
        match phase:
            case "request_body" if self.full_duplex:
                return _passed(phase, message)
            case "response_headers" if self._in_flight is not None:
                reads = self._in_flight.answered(message)
                # In full duplex the body comes anyway.
                comes = message.response_headers.end_of_stream or self._returns_chunks
                return messages.proceed(phase) if comes or not reads else messages.watch_response()
            case "response_body":
                if self._in_flight is not None:
                    self._in_flight.chunk(message.response_body)
                return _passed(phase, message) if self._returns_chunks else messages.proceed(phase)
        return messages.proceed(phase)

    @property
    def _returns_chunks(self) -> bool:
        return self._response_body_mode == messages.FULL_DUPLEX_STREAMED

    # -- its end ----------------------------------------------------------------------------

    def lose(self, hung: Container[str]) -> bytes | None:
        """Gives the request up if its replica is one of those, and returns what tells Envoy, which
        takes it at any time: it answers the client, or breaks off an answer that has begun."""
        if self._in_flight is None or self._in_flight.served_by not in hung:
            return None
        self.services.metrics.requests.add("lost")
        self.close(lost=True)
        return refuse(NoReplica(HUNG), self.endpoint)

    def close(self, lost: bool = False) -> None:
        one, self._in_flight = self._in_flight, None
        if one is not None:
            one.end(lost)
            if self._trace is not None:
                self._trace.answered(one.outcome)

    def ends_here(self, result: str, error: str = "") -> None:
        self.services.metrics.requests.add(result)
        if self.services.recorder:
            self.services.recorder.refused(error or result)
        if self._trace is not None:
            self._trace.ended(result, error)

    # -- the choice -------------------------------------------------------------------------

    @property
    def has_fallback(self) -> bool:
        """Envoy has a choice of its own, among all replicas, where the router makes none."""
        return not self.full_duplex and self.subset is None

    @property
    def only_model(self) -> str | None:
        """The model of every request, where there is one and no name for it has to be read."""
        services = self.services
        return None if services.config.route.models else services.fleet.members.only_model

    async def pass_on(
        self, phase: str, headers: Mapping[str, str], to_any: Callable[[], bytes]
    ) -> None:
        """Answers what is no inference; ``to_any`` makes the reply to what any replica may get.

        A request about a stored response goes to the replica that holds it. The router lists the
        models where names are configured that no replica knows.
        """
        services, path = self.services, headers.get(":path", "")
        services.metrics.requests.add("passed")
        listed = headers.get(":method") == "GET" and lists_models(path)
        holder = services.fleet.response_owner(stored_response_of(path))
        if listed and services.config.route.models and (members := services.fleet.members):
            listing = model_list(members.names, members, int(services.wall()))
            reply = messages.answer(200, listing)
        elif holder is not None and (self.subset is None or holder in self.subset):
            leave_body = phase == "request_headers" and not self.full_duplex
            reply = messages.send_to(phase, self._listed(holder, holder), leave_body)
        else:
            reply = to_any()
        await self.write(reply)

    def book(
        self, asked: RequestHeaders, decision: Decision | None, waited: float = 0.0, why: str = ""
    ) -> None:
        """Takes its place on the replica chosen, after ``waited`` seconds; None: Envoy chooses."""
        services, trace = self.services, self._trace
        if decision is not None:
            request_id = asked.request_id
            self._in_flight = InFlight(services, decision, request_id, self.unseen, waited, why)
            if trace is not None:
                trace.sent(decision, request_id, services.config.pool, waited)
            return
        services.metrics.requests.add("unrouted")
        if trace is not None:
            trace.ended("unrouted")

    async def waits(self, until: asyncio.Future[Any], why: str) -> None:
        """Tells Envoy, and those who trace it, that it waits, and waits.

        Raises:
            Left: the stream ends first.
        """
        if self._trace is not None:
            self._trace.waits(why)
        if not self.full_duplex:
            await self.write(messages.wait(self.services.config.hold.longest_s))
        await self._call.unless_left(until)

    # -- the reply --------------------------------------------------------------------------

    def reply(
        self, phase: str, decision: Decision | None, partial: bool, leave_body: bool
    ) -> bytes:
        """The reply to the phase that says where the request goes; the body held becomes what that
        replica gets: the model under the name by which it serves it, and the priority, if any,
        instead of the client's. The arguments are those of
        :func:`~extproc.proxy.admission.choose`."""
        if decision is None:
            return messages.proceed(phase)
        body, profile, priority = self.body.data, decision.profile, None
        if self.services.config.hold.has_priorities:  # the replica takes the lower first
            all_take = self.services.fleet.members.all_take_priority
            priority = -profile.priority if all_take else 0
        if profile.requested_model not in ("", decision.name):
            body = rename(profile.endpoint, body, decision.name)
        takes = profile.endpoint.takes_priority and not partial
        if priority is not None and takes and (priority or profile.claims_priority):
            body = with_priority(body, priority)
        self.body.change(body)
        reply = messages.send_to(phase, self.destination(decision), leave_body, priority)
        if not self.services.config.serve.decision_metadata or self._in_flight is None:
            return reply
        return messages.with_metadata(reply, summary_of(decision, self._in_flight.outcome.waited_s))

    def destination(self, decision: Decision) -> str:
        second, members = decision.second, self.services.fleet.members
        alone = decision.name and not members.all_serve(decision.name)
        if second is None and (alone or decision.profile.previous_response):
            second = decision.replica  # for Envoy's fallback policy would try it on any
        return self._listed(decision.replica, second)

    def _listed(self, first: str, second: str | None) -> str:
        """The destination as Envoy takes it: what to try first, and what after that."""
        wanted = self.services.config.serve.second_choice
        if wanted is None:
            wanted = not self.full_duplex  # not every gateway takes a list
        return first if second is None or not wanted else f"{first},{second}"


def _passed(phase: str, message: ProcessingRequest) -> bytes:
    chunk: HttpBody = getattr(message, phase)
    return messages.pass_chunk(phase, chunk.body, chunk.end_of_stream)


def refuse(error: Refusal, endpoint: Endpoint | None) -> bytes:
    """The answer to a request that is not to be served."""
    return messages.answer(error.status, error_body(error, endpoint), error.retry_after)
