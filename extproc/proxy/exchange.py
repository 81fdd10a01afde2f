"""State of one HTTP request, and its replies to Envoy, from the first message to the last."""

import asyncio
from collections.abc import Awaitable, Callable, Container, Mapping
from typing import Any

from extproc.observe.decision import RequestOutcome
from extproc.observe.decision_log import summary_of
from extproc.observe.traces import Trace
from extproc.proxy import messages
from extproc.proxy.body_memory import BufferedBody
from extproc.proxy.call import Call
from extproc.proxy.headers import RequestHeaders, inference_headers, is_steered, model_list
from extproc.proxy.in_flight import InFlight, Observed
from extproc.proxy.proto.ext_proc_pb2 import ProcessingRequest
from extproc.proxy.services import Services
from extproc.request.endpoint import Endpoint, lists_models, stored_response_of
from extproc.request.errors import NoReplica, Refusal, error_body
from extproc.request.profile import NO_WORK, RequestProfile
from extproc.request.rewrite import rename, with_priority
from extproc.route.decision import Decision

NONE_READY = "no replica is ready to serve this request"
HUNG = "the replica that had this request hangs: send the request again"
_UNSENT = "refused", "gave_up"  # results of requests that no replica gets


class Exchange:
    """State of an HTTP request: its protocol, its body while the router holds it, and its entry in
    the ledger."""

    headers: RequestHeaders  # of a request that needs a decision

    def __init__(self, services: Services, call: Call, trace: Trace | None) -> None:
        self.services = services
        self.write: Callable[[bytes], Awaitable[None]] = call.write
        self.body = BufferedBody(services.body_memory)
        self.unread_model = ""
        """Model of a request whose body is too large to be read: the length of the body gives the
        profile. Empty: the router reads the body."""
        self.body_mode: int | None = None  # None: Envoy does not send the mode
        self.body_first = False  # Envoy sends the body before the headers, or instead of them
        self.full_duplex = False  # a gateway's protocol: Envoy has no fallback of its own
        self.subset: frozenset[str] | None = None  # endpoints that a gateway allows; None: all
        self.endpoint: Endpoint | None = None  # selects the form of error bodies
        self.profile: RequestProfile | None = None  # None: the body is not read yet
        self.arrived_at = services.clock()
        self.response_visible = True  # Envoy forwards the response to the router
        self.steered = True  # the router chooses the replica; otherwise it only observes
        self._call = call
        self._trace = trace
        self._unread: ProcessingRequest | None = None  # the next message, if already read
        self._envoy_waits = True  # Envoy waits for replies
        self._returns_chunks = False  # Envoy waits for the reply to each chunk of the response
        self._request_ended = False  # in full duplex: the last chunk of the body was read
        self._in_flight: InFlight | None = None
        self._observed: Observed | None = None  # None: not observed, or the response has begun

    # -- messages ---------------------------------------------------------------------------

    async def begin(self) -> None:
        first = self._unread = await self._call.read()
        if first.observability_mode:
            self.write, self._envoy_waits, self.steered = _unsent, False, False
        if first.HasField("protocol_config"):
            modes = first.protocol_config
            self.body_mode = modes.request_body_mode
            self._returns_chunks = modes.response_body_mode == messages.FULL_DUPLEX_STREAMED
        self.body_first = first.WhichOneof("request") == "request_body"
        self.full_duplex = self.body_mode == messages.FULL_DUPLEX_STREAMED and not self.body_first
        self.subset = messages.subset_of(first)

    def inference_headers(self, values: Mapping[str, str]) -> RequestHeaders | None:
        """Reads the headers of a request that needs a decision; returns None for any other request.

        Any replica can tokenize if all serve one model (:attr:`only_model`). So a request that only
        tokenizes needs a decision only if the router steers it and ``only_model`` is None.
        """
        config = self.services.config
        self.steered = self.steered and is_steered(config, values)
        headers = inference_headers(values, config)
        if headers is None:
            return None
        if not headers.endpoint.computes and not (self.steered and self.only_model is None):
            return None
        self.headers, self.endpoint = headers, headers.endpoint
        return headers

    async def refuse(self, refusal: Refusal) -> None:
        """Answers the client with the error; if the router only observes, lets Envoy go on."""
        self.body.release()
        if self.steered:
            self.services.metrics.refused.add(refusal.reason)
            self.undispatched("refused", refusal.reason)
            await self.write(self._answer(refusal))
        else:  # no memory for the body
            self.undispatched("observed")

    async def read(self, *phases: str) -> ProcessingRequest:
        """Returns the next message of one of these phases; replies to messages of other phases.
        Without a phase, replies to every message until the stream ends.

        Raises:
            Left: the stream ends first.
        """
        while True:
            message = await self.next()
            if message.WhichOneof("request") in phases:
                return message
            reply = self.reply_to(message)
            del message  # Envoy may read slowly, and the message may be a body of many MB
            await self.write(reply)

    def unread(self, message: ProcessingRequest) -> None:
        """Makes :meth:`next` return this message again."""
        self._unread = message

    async def next(self) -> ProcessingRequest:
        """Returns the next message. Drops chunks that follow the last chunk of a full duplex body:
        Envoy 1.35 to 1.37 repeats the last chunk
        (https://github.com/envoyproxy/envoy/issues/46237)."""
        if self._unread is not None:
            message, self._unread = self._unread, None
            return message
        while True:
            message = await self._call.read(self.body.evicted)
            repeated = self._request_ended and message.WhichOneof("request") == "request_body"
            if not repeated:
                self._request_ended |= self.full_duplex and message.request_body.end_of_stream
                return message

    def reply_to(self, message: ProcessingRequest) -> bytes:
        """Records the message's content and returns a reply that changes nothing. A reply to
        response headers may also ask Envoy for the response's body."""
        phase = message.WhichOneof("request") or ""
        match phase:
            case "request_body" if self.full_duplex:
                return _passed(phase, message)
            case "response_headers":
                if self._observed is not None:
                    self._in_flight, self._observed = self._observed.answered(message), None
                reads = self._in_flight is not None and self._in_flight.response_headers(message)
                if message.response_headers.end_of_stream:
                    self._response_ended()
                elif reads and not self._returns_chunks:
                    return messages.WATCH_RESPONSE
            case "response_body":
                if self._in_flight is not None:
                    self._in_flight.response_chunk(message.response_body.body)
                if message.response_body.end_of_stream:
                    self._response_ended()
                if self._returns_chunks:
                    return _passed(phase, message)
            case "response_trailers":
                self._response_ended()
        return messages.proceed(phase)

    def _response_ended(self) -> None:
        if self._in_flight is not None:
            self._in_flight.response_ended = True
        if not self._envoy_waits:
            self.close()  # Envoy closes the stream later

    # -- the end ----------------------------------------------------------------------------

    def end_if_hung(self, hung: Container[str]) -> bytes | None:
        """Ends the request if its replica is in ``hung``.

        Returns the message with which Envoy answers the client or, once a response has begun,
        breaks the response off. Returns None if the request goes on.
        """
        if self._in_flight is None or self._in_flight.served_by not in hung or not self.steered:
            return None
        self.services.metrics.requests.add("lost")
        self.close(lost=True)
        return self._answer(NoReplica(HUNG))

    def close(self, lost: bool = False) -> None:
        """Ends the request if it is in flight. ``lost``: the request's replica is hung."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight.end(lost)
            if self._trace is not None:
                self._trace.answered(in_flight.outcome)

    def undispatched(self, result: str, error: str = "") -> None:
        """Counts a request that the router does not dispatch; ``error``: reason of a refusal.

        ``result``: ``observed``; ``unrouted``, if no replica is usable or the router does not serve
        the body mode; or one of ``_UNSENT``, which are recorded.
        """
        self.services.metrics.requests.add(result)
        if self.services.recorder and result in _UNSENT:
            since_arrival_s = self.services.clock() - self.arrived_at
            self.services.recorder.refused(error or result, self.profile, since_arrival_s)
        if self._trace is not None:
            self._trace.ended(result, error)

    def _answer(self, error: Refusal) -> bytes:
        return messages.answer(error.status, error_body(error, self.endpoint), error.retry_after)

    # -- the choice -------------------------------------------------------------------------

    @property
    def only_model(self) -> str | None:
        """Model of every request, if all replicas serve the same model and ``route.models`` is
        empty."""
        services = self.services
        return None if services.config.route.models else services.fleet.members.only_model

    async def pass_through(self, phase: str, values: Mapping[str, str]) -> None:
        """Replies without a decision to a request that needs none or has an unserved body mode.

        A request about a stored response goes to the replica that owns the response. The router
        itself answers ``GET /v1/models``, unless every replica gives the same answer. Any replica
        may serve all other requests. Envoy chooses the replica or, in full duplex, the router.

        Raises:
            NoReplica: the router has to choose, and no replica is ready.
        """
        services, path = self.services, values.get(":path", "")
        leaves_body = self.leaves_body(phase)
        listed = values.get(":method") == "GET" and lists_models(path)
        owner = services.fleet.response_owner(stored_response_of(path))
        if not self.steered:
            reply = messages.RESPONSE_ONLY if leaves_body else messages.proceed(phase)
        elif listed and self.only_model is None and services.fleet.members.models:
            listing = model_list(services.fleet.members, int(services.wall()))
            reply = messages.answer(200, listing)
        elif owner is not None and (self.subset is None or owner in self.subset):
            reply = messages.send_to(phase, self._listed(owner, owner), leaves_body)
        elif self.full_duplex:
            if (decision := services.router.decide(NO_WORK, among=self.subset)) is None:
                raise NoReplica(NONE_READY)
            reply = messages.send_to(phase, self.destination(decision))
        else:
            reply = self.reply(phase, None)
        if self.endpoint is None:
            services.metrics.requests.add("passed")
        else:
            self.undispatched("unrouted")
        await self.write(reply)

    def dispatch(self, decision: Decision, waited: float = 0.0, reason: str = "") -> None:
        """Adds the request to the ledger, after ``waited`` seconds in the queue for ``reason``."""
        services, outcome = self.services, self._logged(decision)
        destination = self.destination(decision)
        self._in_flight = InFlight(services, decision, destination, outcome, self.response_visible)
        services.metrics.requests.add("routed")
        services.metrics.decisions.add(decision.choice.policy, decision.replica)
        if waited:
            outcome.queued_s, outcome.queue_reason = waited, reason
            services.metrics.queued_seconds.observe(waited)
        if self._trace is not None:
            self._trace.sent(decision, self.headers.request_id, services.config.pool, waited)

    def _logged(self, decision: Decision, observed: bool = False) -> RequestOutcome:
        services = self.services
        return services.log.add(
            self.headers.request_id, services.wall(), decision, services.config.pool, observed
        ).outcome

    def observe(self, decision: Decision) -> None:
        """Keeps the decision, to compare it with Envoy's choice, which the response will show."""
        decision.drop_large_parts()
        outcome, sent_at = self._logged(decision, observed=True), self.services.clock()
        self._observed = Observed(
            self.services, decision, outcome, sent_at, envoy_samples=not self._envoy_waits
        )

    async def wait_in_queue(self, until: asyncio.Future[Any], reason: str) -> None:
        """Waits for ``until``, and lets Envoy wait, too; ``reason``: for the trace.

        Raises:
            Left: the stream ends first.
        """
        if self._trace is not None:
            self._trace.queued(reason)
        if not self.full_duplex:
            await self.write(messages.wait(self.services.config.hold.longest_s))
        await self._call.wait_for(until)

    # -- the reply --------------------------------------------------------------------------

    def leaves_body(self, phase: str) -> bool:
        """Returns True if the reply in this phase makes Envoy send the body only to the replica."""
        return phase == "request_headers" and not self.full_duplex

    def reply(self, phase: str, decision: Decision | None) -> bytes:
        """Returns the reply that sends the request to the chosen replica.

        The body is adapted to the replica: it names the model as the replica does, and has the
        priority of the request's objective instead of the client's. ``decision`` None: Envoy
        chooses.
        """
        leaves_body = self.leaves_body(phase)
        if decision is None:
            return messages.LEAVE_ALONE if leaves_body else messages.proceed(phase)
        body, profile, priority = self.body.data, decision.profile, None
        if self.services.config.hold.has_priorities:  # vLLM serves lower numbers first
            all_take = self.services.fleet.members.all_take_priority
            priority = -profile.priority if all_take else 0
        if profile.requested_model not in ("", decision.name):
            body = rename(profile.endpoint, body, decision.name)
        takes = profile.endpoint.takes_priority and self.body.whole
        if priority is not None and takes and (priority or profile.claims_priority):
            body = with_priority(body, priority)
        self.body.replace(body)
        reply = messages.send_to(phase, self.destination(decision), leaves_body, priority)
        if not self.services.config.serve.decision_metadata or self._in_flight is None:
            return reply
        return messages.with_metadata(reply, summary_of(decision, self._in_flight.outcome.queued_s))

    def destination(self, decision: Decision) -> str:
        second, everywhere = decision.second, decision.situation.view.candidates.everywhere
        only_some = decision.name and decision.name not in everywhere
        if second is None and (only_some or decision.profile.previous_response):
            # Without a second choice Envoy would retry on any replica, which may lack the model
            # or the previous response.
            second = decision.replica
        return self._listed(decision.replica, second)

    def _listed(self, first: str, second: str | None) -> str:
        """Lists the destinations in the order in which Envoy tries them, separated by a comma."""
        wanted = self.services.config.serve.second_choice
        if wanted is None:
            wanted = not self.full_duplex  # some gateways take no list
        return first if second is None or not wanted else f"{first},{second}"


async def _unsent(_: bytes) -> None:
    """Drops a reply: Envoy ignores all replies in observability mode."""


def _passed(phase: str, message: ProcessingRequest) -> bytes:
    chunk = getattr(message, phase)
    return messages.pass_chunk(phase, chunk.body, chunk.end_of_stream)
