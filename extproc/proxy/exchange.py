"""One HTTP request, from its first message to the end of its response.

Its way through the code::

    proxy/service.py      a gRPC stream opens: one request, in one of three protocols
    proxy/exchange.py     what Envoy tells of it, phase by phase, and what is answered
    proxy/headers.py      its headers
    request/inspect.py    its body: model, prompt tokens, output bound, prefix
    route/router.py       a prediction for every replica, a policy's choice
    proxy/admission.py    is it taken?
    route/queue.py        it waits, where no replica could carry it to its end
    fleet/fleet.py        the replica's ledger, until the stream closes
    proxy/messages.py     the choice, as Envoy takes it

The protocols are in ``protocols.py``.
"""

import asyncio
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace
from functools import partial

from extproc.observe.decision_log import summary_of
from extproc.observe.traces import Trace
from extproc.proxy import admission, messages
from extproc.proxy.headers import Asked, model_list
from extproc.proxy.in_flight import InFlight
from extproc.proxy.proto.ext_proc_pb2 import HttpBody, HttpHeaders, ProcessingRequest
from extproc.proxy.services import Services
from extproc.request.endpoint import Endpoint, lists_models, stored_response_of
from extproc.request.errors import NoReplica, Refusal, Saturated, error_body
from extproc.request.inspect import inspect
from extproc.request.objective import NO_OBJECTIVE, Objective, session_key
from extproc.request.profile import RequestProfile
from extproc.request.rewrite import rename, with_priority
from extproc.route.router import Decision
from extproc.route.waiting import Waiting

HUNG = "the replica that had this request hangs: send it again"
Sent = Callable[[Decision | None], Iterable[bytes]]
"""The replies that say where a request goes; by no decision, where Envoy chooses."""
Replied = Callable[[bytes, bytes], Iterable[bytes]]
"""The replies to a phase, of that which says where it goes, and the body for the replica."""


def _alone(reply: bytes, body: bytes) -> Iterable[bytes]:
    return [reply]


class Exchange:
    """Owns a request for its whole life: profiles it, has its replica chosen, and keeps what is in
    flight until the stream closes.

    How a request comes in is up to the protocol; what is here is the same in each. Phases may come
    in any order; each is answered as it is, and one that is unknown with a continue.
    """

    has_fallback = True  # whether Envoy has a choice of its own where the router makes none
    is_timed = True  # whether Envoy waits for a reply no longer than it was told

    def __init__(self, services: Services, first: ProcessingRequest) -> None:
        """Takes the stream's first message, which says how Envoy speaks; it is not answered yet."""
        self._services = services
        told, config = first.HasField("protocol_config"), first.protocol_config
        self._body_mode = config.request_body_mode if told else None
        """None: an older Envoy does not tell."""
        self._response_body_mode = config.response_body_mode
        self._subset = messages.subset_of(first)
        """The only endpoints that may be chosen, where a gateway says so."""
        self._endpoint: Endpoint | None = None  # whose form errors have
        self._unseen = False  # whether Envoy was told not to tell of the response
        self._in_flight: InFlight | None = None
        self._held: Waiting | None = None  # where it waits for a replica
        self._room = 0  # bytes of the room for bodies that are held
        self.waiting: asyncio.Future[Iterable[bytes]] | None = None
        """The replies that are still to come, where it does."""
        self.trace: Trace | None = None  # where it is sampled

    def answer(self, request: ProcessingRequest) -> Iterable[bytes]:
        """The replies to one message of the stream, in their order, as bytes."""
        try:
            match request.WhichOneof("request"):
                case "request_headers" if self._in_flight is None:
                    return self._on_request_headers(request.request_headers)
                case "request_body":
                    return self._on_request_body(request)
                case "request_trailers":
                    return self._on_request_trailers()
                case "response_headers":
                    return [self._on_response_headers(request)]
                case "response_body":
                    return [self._on_response_body(request.response_body)]
                case phase:
                    return [messages.proceed(phase or "")]
        except Refusal as error:
            return self._refused(error)

    def close(self) -> None:
        """The stream is over: the response has ended, or the client or Envoy gave up."""
        self._leave_room()
        if self._held is not None:
            self._services.queue.gave_up(self._held, self.is_timed)
            self._held = None
            self._ends_here("gave_up")
        if self._in_flight is not None:
            self._end(self._in_flight)

    def lose(self, hung: Container[str]) -> bytes | None:
        """Gives the request up if its replica is one of those, and returns what tells Envoy, which
        takes it at any time: it answers the client, or breaks off an answer that has begun."""
        if self._in_flight is None or self._in_flight.served_by not in hung:
            return None
        self._services.metrics.requests.add("lost")
        self._end(self._in_flight, lost=True)
        return refuse(NoReplica(HUNG), self._endpoint)

    def _end(self, one: InFlight, lost: bool = False) -> None:
        self._in_flight = None
        one.end(lost)
        if self.trace is not None:
            self.trace.answered(one.outcome)

    def _refused(self, error: Refusal) -> Iterable[bytes]:
        reason = error.code or error.kind
        self._services.metrics.refused.add(reason)
        self._ends_here("refused", reason)
        return [refuse(error, self._endpoint)]

    def _ends_here(self, result: str, error: str = "") -> None:
        self._services.metrics.requests.add(result)
        if self._services.recorder:
            self._services.recorder.refused(error or result)
        if self.trace is not None:
            self.trace.ended(result, error)

    # -- the request ------------------------------------------------------------------------

    def _on_request_headers(self, message: HttpHeaders) -> Iterable[bytes]:
        return [messages.proceed("request_headers")]

    def _on_request_body(self, request: ProcessingRequest) -> Iterable[bytes]:
        return [messages.proceed("request_body")]

    def _on_request_trailers(self) -> Iterable[bytes]:
        return [messages.proceed("request_trailers")]

    def _pass_on(self, phase: str, headers: Mapping[str, str]) -> bytes:
        """The reply to what is no inference.

        What is about a stored response goes to the replica that holds it. A replica knows no name
        but its own, so where others are configured the list of models is not asked for there.
        """
        services, path = self._services, headers.get(":path", "")
        services.metrics.requests.add("passed")
        listed = headers.get(":method") == "GET" and lists_models(path)
        if listed and services.config.route.models and (members := services.fleet.members):
            listing = model_list(members.names, members, int(services.wall()))
            return messages.answer(200, listing)
        holder = services.fleet.holder(stored_response_of(path))
        if holder is not None and (self._subset is None or holder in self._subset):
            leave_body = phase == "request_headers" and self.has_fallback
            return messages.send_to(phase, self._listed(holder, holder), leave_body)
        return self._to_any(phase)

    def _to_any(self, phase: str) -> bytes:
        """The reply to what any replica may get."""
        return messages.proceed(phase)

    def _route(
        self, phase: str, asked: Asked, body: bytes, partial: bool, replied: Replied = _alone
    ) -> Iterable[bytes]:
        """The replies to a phase, as far as they are known yet.

        ``partial``: ``body`` is the beginning of a larger one.

        Raises:
            Refusal: it is not to be served.
        """
        services = self._services
        started = services.clock()
        profile = inspect(
            asked.endpoint,
            body,
            services.tokens,
            partial=partial,
            content_length=asked.length,
            model_of=lambda name, previous: services.router.model(
                name, previous, self._subset, asked.session
            ),
        )

        def sent(decision: Decision | None) -> Iterable[bytes]:
            if decision is None:
                return replied(messages.proceed(phase), body)
            priority = self._priority(decision.profile)
            written = self._written(decision, body, None if partial else priority)
            return replied(self._sent(phase, decision, priority), written)

        size = len(body) if self.is_timed else 0  # a gateway's body has its room
        return self._decide(asked, profile, started, size, sent)

    def _route_body(self, asked: Asked, message: HttpBody) -> Iterable[bytes]:
        """The replies to a body that came in one piece."""
        came = message.body
        # Trailers may follow a whole one.
        whole = message.end_of_stream or self._body_mode == messages.BUFFERED

        def replied(reply: bytes, body: bytes) -> Iterable[bytes]:
            if body is came:
                return [reply]
            length = len(came) if whole else asked.length
            longer = len(body) - len(came)
            return [messages.with_body(reply, body, None if length is None else length + longer)]

        return self._route("request_body", asked, came, not whole, replied)

    def _decide(
        self, asked: Asked, profile: RequestProfile, started: float, size: int, sent: Sent
    ) -> Iterable[bytes]:
        """Chooses a replica, and books the request there or has it wait: not where there is no room
        for its body of ``size`` bytes, which the replica chosen may get with another name.

        ``started``: when it was begun to be looked at; ``sent`` makes the replies.

        Raises:
            Refusal: it is not to be served.
        """
        services = self._services
        objective = self._objective(asked, profile)
        if asked.tenant or asked.session or objective is not NO_OBJECTIVE:
            session = session_key(asked.session, profile.model) if asked.session else ""
            profile = replace(profile, tenant=asked.tenant, session=session, objective=objective)
        told, router = not self._unseen, services.router
        decide = partial(router.decide, profile, asked.policy, self._subset, told)
        decision = decide()
        admission.check_model(services, profile)
        if decision is None:
            self._let_envoy_choose(profile)
        else:
            services.demand.came(decision)
            if admission.has_to_wait(services, decision) and self._take_room(size):
                return self._wait(asked, decision, decide, sent)
        self._book(asked, decision)
        services.metrics.decision_seconds.observe(services.clock() - started)
        return sent(decision)

    def _objective(self, asked: Asked, profile: RequestProfile) -> Objective:
        hold = self._services.config.hold
        found = hold.objective(asked.objective, asked.tenant, profile.asked, profile.model)
        if not (told := asked.targets):
            return found
        ttft_s, tpot_s = told.get("ttft_s", found.ttft_s), told.get("tpot_s", found.tpot_s)
        return found._replace(ttft_s=ttft_s, tpot_s=tpot_s)

    def _book(
        self, asked: Asked, decision: Decision | None, waited: float = 0.0, why: str = ""
    ) -> None:
        """Takes its place on the replica chosen; None: Envoy chooses.

        ``waited``: seconds before that, and ``why``.
        """
        services = self._services
        if decision is None:
            services.metrics.requests.add("unrouted")
            if self.trace is not None:
                self.trace.ended("unrouted")
            return
        request_id, unseen = asked.request_id, self._unseen
        self._in_flight = InFlight(services, decision, request_id, unseen, waited, why)
        if self.trace is not None:
            self.trace.sent(decision, request_id, services.config.pool, waited)

    # -- waiting ----------------------------------------------------------------------------

    def _wait(
        self,
        asked: Asked,
        decision: Decision,
        decide: Callable[..., Decision | None],
        sent: Sent,
    ) -> Iterable[bytes]:
        """Has it wait; the replies, where it may go at once, or else what tells Envoy to wait.

        Raises:
            Saturated: too many wait.
        """
        services, since = self._services, self._services.clock()
        waiting: asyncio.Future[Iterable[bytes]] = asyncio.get_running_loop().create_future()

        at_once = True

        def go(outcome: Decision | Exception | None) -> None:
            waited = 0.0 if at_once else services.clock() - since
            self._waits_no_more()
            if waiting.cancelled():
                return
            try:
                waiting.set_result(self._after_waiting(asked, one, outcome, waited, sent))
            except Exception as error:  # this request's alone
                waiting.set_exception(error)

        def decide_anew() -> Decision | None:
            so_far = services.clock() - since
            decision = decide(waited=so_far)
            if decision is not None:
                admission.refuse_late(services, decision, so_far)
            return decision

        one = Waiting(decision, since, decide_anew, go)
        self._held = one
        try:
            services.queue.enter(one)
        except Saturated:
            self._waits_no_more()
            raise
        if waiting.done():
            return waiting.result()
        at_once, self.waiting = False, waiting
        if self.trace is not None:
            self.trace.waits(one.why)
        return [messages.wait(services.config.hold.longest_s)] if self.is_timed else []

    def _after_waiting(
        self,
        asked: Asked,
        one: Waiting,
        outcome: Decision | Exception | None,
        waited: float,
        sent: Sent,
    ) -> Iterable[bytes]:
        try:
            if isinstance(outcome, Exception):
                raise outcome
            if outcome is None:
                self._let_envoy_choose(one.profile)
            self._book(asked, outcome, waited, one.why)
            return sent(outcome)
        except Refusal as error:
            return self._refused(error)

    def _waits_no_more(self) -> None:
        self._held = None
        if self.is_timed:  # a gateway's body has its room until it was returned
            self._leave_room()

    def _take_room(self, size: int) -> bool:
        if not self._services.room.take(size):
            return False
        self._room += size
        return True

    def _leave_room(self) -> None:
        self._services.room.give_back(self._room)
        self._room = 0

    def _let_envoy_choose(self, profile: RequestProfile) -> None:
        has_one = self.has_fallback and self._subset is None
        admission.check_fallback(self._services, profile, has_one)

    # -- the reply --------------------------------------------------------------------------

    def _written(self, decision: Decision, body: bytes, priority: int | None) -> bytes:
        """The body, with the name by which the replica chosen serves the model, and with that
        priority, if any: then a client's own does not count."""
        profile, name = decision.profile, decision.name
        if profile.asked not in ("", name):
            body = rename(profile.endpoint, body, name)
        if priority is None or not profile.endpoint.takes_priority:
            return body
        return with_priority(body, priority) if priority or profile.claims_priority else body

    def _priority(self, profile: RequestProfile) -> int | None:
        """What the replica is told, which takes the lower first; None: whatever the client says."""
        if not self._services.config.hold.has_priorities:
            return None
        return -profile.priority if self._services.fleet.members.all_take_priority else 0

    def _destination(self, decision: Decision) -> str:
        second, members = decision.second, self._services.fleet.members
        alone = decision.name and not members.all_serve(decision.name)
        if second is None and (alone or decision.profile.previous_response):
            second = decision.replica  # for Envoy's fallback policy would try it on any
        return self._listed(decision.replica, second)

    def _listed(self, first: str, second: str | None) -> str:
        """The destination as Envoy takes it: what to try first, and what after that."""
        if second is None or not self._services.config.serve.second_choice:
            return first
        return f"{first},{second}"

    def _sent(
        self, phase: str, decision: Decision, priority: int | None, leave_body: bool = False
    ) -> bytes:
        """The reply that says where a request goes that is booked there."""
        reply = messages.send_to(phase, self._destination(decision), leave_body, priority)
        if not self._services.config.serve.decision_metadata or self._in_flight is None:
            return reply
        return messages.with_metadata(reply, summary_of(decision, self._in_flight.outcome.waited_s))

    # -- the response -----------------------------------------------------------------------

    def _on_response_headers(self, request: ProcessingRequest) -> bytes:
        reads = self._in_flight is not None and self._in_flight.answered(request)
        if not reads or request.response_headers.end_of_stream:
            return messages.proceed("response_headers")
        if self._response_body_mode == messages.FULL_DUPLEX_STREAMED:
            return messages.proceed("response_headers")  # it comes anyway
        return messages.watch_response()

    def _on_response_body(self, message: HttpBody) -> bytes:
        if self._in_flight is not None:
            self._in_flight.chunk(message)
        if self._response_body_mode == messages.FULL_DUPLEX_STREAMED:
            return messages.pass_chunk("response_body", message.body, message.end_of_stream)
        return messages.proceed("response_body")


def refuse(error: Refusal, endpoint: Endpoint | None) -> bytes:
    """The answer to a request that is not to be served."""
    return messages.answer(error.status, error_body(error, endpoint), error.retry_after)
