"""Work that a router does every second: stale replicas, gauges, and log lines about changes."""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

from extproc.observe.changes import CounterLog, WarningLog
from extproc.observe.dashboard.warnings import figure_warnings, router_warnings
from extproc.proxy.services import Services
from extproc.replica_state import TTL_S

logger = logging.getLogger(__name__)

_EVERY_S = 1.0
_VARIED_S, _VARIED_BY = 0.2, 0.618
"""Pauses vary within a range of this width (s), from one to the next by this part of the range.
If a CPU limit stops the process for a part of every 100 ms, equal pauses might all end in stops."""
_WARNINGS_EVERY = 5  # turns of the loop in ``run``
_REFUSED = "requests refused: add or start replicas, or change the limits (docs/overload.md)"
_FAILED = "requests failed on replicas: read the log of each replica"
_OF_CLIENTS = "invalid_json", "invalid_type", "invalid_model", "model_not_found", "body_too_large"
"""Refusals for mistakes of clients; these are not logged."""
_NOT_FOLLOWED = "Envoy did not follow decisions: run 'extproc check --envoy-admin URL'"


class Housekeeping:
    """Removes replicas whose state is stale, updates gauges, and logs what has changed."""

    def __init__(self, pools: Sequence[Services]) -> None:
        first, self._pools = pools[0], pools
        self._clock, self._metrics, self._delays = first.clock, first.metrics, first.delays
        self._history = first.history
        self._counters = (
            CounterLog(logger, _NOT_FOLLOWED, first.metrics.not_followed, first.clock, {"retry"}),
            CounterLog(logger, _REFUSED, first.metrics.refused, first.clock, _OF_CLIENTS),
            CounterLog(logger, _FAILED, first.metrics.failures, first.clock, (), self._title),
        )
        self._warnings = WarningLog(first.clock)
        first.metrics.in_flight.set_function(lambda: sum(pool.fleet.in_flight for pool in pools))

    async def run(self) -> NoReturn:
        """Do the housekeeping of all pools about once a second, until cancelled."""
        turn, due = 0, self._clock()
        while True:
            late = self._clock() - due
            self._delays.loop_delay_s.add(min(max(late, 0.0), _EVERY_S))
            excluded = [pair for pool in self._pools for pair in self._look_at(pool).items()]
            self._metrics.excluded.show(dict.fromkeys(excluded, 1.0))
            self._set_gauges()
            self._history.look()
            for counter in self._counters:
                counter.look()
            if turn % _WARNINGS_EVERY == _WARNINGS_EVERY - 1:  # not right after the start
                self._warnings.look(self._unlogged_warnings())
            pause_s = _EVERY_S + _VARIED_S * (turn * _VARIED_BY % 1.0 - 0.5)
            turn, due = turn + 1, self._clock() + pause_s
            await asyncio.sleep(pause_s)

    def _look_at(self, pool: Services) -> Mapping[str, str]:
        """Do the housekeeping of one pool; return the reason of each excluded replica."""
        fleet, name, now = pool.fleet, pool.config.pool, pool.wall()
        fleet.drop_stale(TTL_S)
        excluded = pool.exclusions.look(fleet, now)
        usable = len(fleet.members) - len(excluded)
        needed = pool.demand.replicas(pool.queue, 1 + len(fleet.peers), usable)
        self._metrics.replicas_needed.labels(name).set(needed)
        pool.routers.look(fleet.peers.addresses, now, fleet.peers.stopped)
        if fleet.pollers is not None and not self._delays.redis_refusal:  # pollers are known
            pool.pollers.look(fleet.pollers, now, fleet.stopped_pollers)
        if pool.config.serve.steers_all:  # otherwise observed requests count as external at first
            self._metrics.external_requests.labels(name).set(fleet.external_requests)
            pool.external.add(fleet.external_requests)
        return excluded

    def _set_gauges(self) -> None:
        pools, metrics = self._pools, self._metrics
        fleets = [pool.fleet for pool in pools]
        states = [state for fleet in fleets for state in fleet.members]
        metrics.drop_other_replicas({state.id for state in states})
        metrics.set_speeds(states)
        members = [each for fleet in fleets for each in fleet.eligibility.conditions.values()]
        frozen = [(member.state.id,) for member in members if member.frozen]
        metrics.frozen.show(dict.fromkeys(frozen, 1.0))
        serve = sum(state.serves for state in states)
        asleep = sum(state.asleep and state.healthy and state.ready for state in states)
        metrics.replicas.labels("healthy").set(serve)
        metrics.replicas.labels("asleep").set(asleep)
        metrics.replicas.labels("unhealthy").set(len(states) - serve - asleep)
        waiting = [pair for pool in pools for pair in pool.queue.sizes().items()]
        shares = [pair for pool in pools for pair in pool.queue.shares().items()]
        metrics.set_waiting(waiting, shares)
        metrics.set_unserved({pool.config.pool: pool.queue.unserved_by_model() for pool in pools})
        metrics.known_blocks.set(sum(fleet.blocks.count_known() for fleet in fleets))
        metrics.other_routers.set(max(len(fleet.peers) for fleet in fleets))
        # A pool whose pollers list no replica has no updates.
        due = [fleet for fleet in fleets if fleet.members]
        due = due or [fleet for fleet in fleets if not fleet.is_empty]
        now = self._clock()
        oldest = min((fleet.eligibility.staleness.heard_at for fleet in due), default=now)
        metrics.state_age.set(now - oldest)
        metrics.loop_delay.set(self._delays.loop_delay_s.value)

    def _title(self, replica: str) -> str:
        """Return a replica's name for log lines, with the pool if the router has several pools."""
        for pool in self._pools:
            if replica in pool.fleet.members:
                of = f" of pool {pool.config.pool}" if len(self._pools) > 1 else ""
                return pool.fleet.members.title(replica) + of
        return replica

    def _unlogged_warnings(self) -> Iterator[str]:
        yield from router_warnings(self._pools)
        for pool in self._pools:
            for warning in figure_warnings(pool, pool.fleet.overview()):
                yield f"pool {pool.config.pool}: {warning}"
