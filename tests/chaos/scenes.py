"""Scenes: the fault of a part, how the system names the fault, and when it has recovered.

The table :data:`SCENES` has the same names as the table in docs/failure-modes.md.
"""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf

import aiohttp

from extproc.lab.harness.envoy_config import Bootstrap, endpoints, manager_of
from tests.chaos.replica import MetricsPage
from tests.chaos.stack import REPLICAS
from tests.chaos.system import FaultySystem
from tests.e2e.stack import cluster_of
from tests.waiting import until

RECOVERY_S = 60.0  # time in which a system has to recover

Act = Callable[[FaultySystem], Awaitable[None]]
Recovered = Callable[[FaultySystem, float], Awaitable[bool]]
"""True once the system has recovered since a monotonic time."""


async def _nothing(system: FaultySystem) -> None: ...


@dataclass(frozen=True, slots=True)
class ChaosFault:
    """Failure of a part, and its repair."""

    fail: Act
    mend: Act = _nothing


@dataclass(frozen=True, slots=True)
class Signs:
    """Signs of a fault that the running system has to show; an empty field: none is due."""

    page: str  # regular expression, in the page and in `extproc top`
    metric: str  # PromQL expression that has a result
    log: str  # regular expression, in a line of a router or poller
    alert: str = ""


@dataclass(frozen=True, slots=True)
class ChaosScene:
    """Fault that is repaired after ``hold_s`` seconds."""

    name: str
    fault: ChaosFault
    hold_s: float
    recovered: Recovered
    signs: Signs
    victim: str = ""  # name of the replica that fails
    stopped: str = ""  # name of the router that is stopped, and continues with its old state
    loses_answers: bool = False  # responses in progress at the failure may be lost
    loses_requests: bool = False  # no replica is left: any request may fail
    tidy: Act = _nothing  # after the recovery
    excluded_s: float = 4.0  # time until the failing replica must be excluded
    most_share: float = 0.02
    """Greatest share of the requests that the failing replica may get after that time."""
    most_age_s: float = 2.0
    """Greatest age of states that routers have of the other replicas; a dead poller is replaced
    within this time."""

    async def repair(self, system: FaultySystem) -> tuple[float, float | None]:
        """Repair the part; return the times of the repair and of the recovery, or None if the
        system has not recovered in time."""
        mended, recovered = time.monotonic(), None
        await self.fault.mend(system)

        async def has_recovered() -> bool:
            with suppress(aiohttp.ClientError, TimeoutError):  # a busy part answers late
                return await self.recovered(system, mended)
            return False

        with suppress(TimeoutError):
            await until(has_recovered, RECOVERY_S)
            recovered = time.monotonic()
        await self.tidy(system)
        return mended, recovered


def _killed(*names: str) -> ChaosFault:
    async def kill(system: FaultySystem) -> None:
        for name in names:
            await system.stack.kill(name)

    async def start(system: FaultySystem) -> None:
        for name in names:
            await system.stack.start(name)

    return ChaosFault(kill, start)


def _restarted(name: str) -> Act:
    async def restart(system: FaultySystem) -> None:
        await _killed(name).fail(system)
        await _killed(name).mend(system)

    return restart


def _stopped(name: str) -> ChaosFault:
    def send(number: signal.Signals) -> Act:
        async def act(system: FaultySystem) -> None:
            system.stack.process(name).signal(number)

        return act

    return ChaosFault(send(signal.SIGSTOP), send(signal.SIGCONT))


def _slowed(name: str, run_s: float, stop_s: float) -> ChaosFault:
    async def slow_down(system: FaultySystem) -> None:
        system.slow_down(name, run_s, stop_s)

    return ChaosFault(slow_down, lambda system: system.speed_up(name))


def _redis_memory(most: int) -> Act:
    """Limit the memory of Redis, in bytes; 0: no limit."""
    return lambda system: system.stack.redis_command("CONFIG", "SET", "maxmemory", most)


def _admit_pollers(admitted: bool) -> Act:
    return lambda system: system.stack.admit_pollers(admitted)


def _simulated(name: str, **faults: float) -> ChaosFault:
    def simulate(faults: dict[str, float]) -> Act:
        return lambda system: system.post(name, "/simulate", json=faults)

    healthy = {"fail": 0, "slow": 1.0}
    return ChaosFault(simulate(faults), simulate({fault: healthy[fault] for fault in faults}))


def _post(name: str, path: str) -> Act:
    return lambda system: system.post(name, path)


def _metrics(page: MetricsPage) -> Act:
    return lambda system: system.post("r4", "/misbehave", params={"metrics": page})


def _names(resolve: bool) -> Act:
    async def act(system: FaultySystem) -> None:
        system.stack.resolve_names(resolve)

    return act


def _misconfigured(change: Callable[[Bootstrap], None]) -> ChaosFault:
    def configure(change: Callable[[Bootstrap], None]) -> Act:
        async def act(system: FaultySystem) -> None:
            bootstrap = system.stack.right_envoy()
            change(bootstrap)
            await asyncio.to_thread(system.stack.configure_envoy, bootstrap)

        return act

    return ChaosFault(configure(change), configure(lambda _: None))


def _wrong_port(bootstrap: Bootstrap) -> None:
    cluster_of(bootstrap, "router")["load_assignment"]["endpoints"] = endpoints(["127.0.0.1:1"])


def _without_filter(bootstrap: Bootstrap) -> None:
    filters = manager_of(bootstrap)["http_filters"]
    filters[:] = [each for each in filters if each["name"] != "envoy.filters.http.ext_proc"]
    routes = manager_of(bootstrap)["route_config"]["virtual_hosts"][0]["routes"]
    for route in routes:
        route.get("typed_per_filter_config", {}).pop("envoy.filters.http.ext_proc", None)


def _without_override(bootstrap: Bootstrap) -> None:
    cluster = cluster_of(bootstrap, "replicas")
    policy = cluster["load_balancing_policy"]["policies"][0]["typed_extension_config"]
    cluster["load_balancing_policy"] = policy["typed_config"]["fallback_policy"]


def _serves(*names: str) -> Recovered:
    async def recovered(system: FaultySystem, since: float) -> bool:
        return all(system.served_by(name, since) for name in names)

    return recovered


def _routes(*names: str) -> Recovered:
    async def recovered(system: FaultySystem, since: float) -> bool:
        return all([await system.routed_by(name, since) for name in names])

    return recovered


async def _followed(system: FaultySystem, since: float) -> bool:
    return system.followed(since)


async def _fresh(system: FaultySystem, since: float) -> bool:
    return await system.scraped(since)


def _excluded(name: str, reason: str, text: str) -> Signs:
    return Signs(
        f"{name} is excluded: .*{text}",
        f'extproc_replica_excluded{{reason="{reason}"}}',
        f"excluded: {reason}",
        "ExtprocReplicaExcluded",
    )


def _bad_metrics(page: MetricsPage, hold_s: float = 6.0, excluded_s: float = 4.0) -> ChaosScene:
    fault = ChaosFault(_metrics(page), _metrics(MetricsPage.GOOD))
    signs = _excluded("r4", "unhealthy", "(metrics|answer)")
    return ChaosScene(
        f"metrics-{page}", fault, hold_s, _serves("r4"), signs, victim="r4", excluded_s=excluded_s
    )


_ROUTER_LOST = Signs(
    "Router .* lost: killed, hung",
    "extproc_other_routers == 0",
    "Router .* lost: killed, hung",
    "ExtprocProcessDown",
)
_POLLER_LOST = Signs(
    "Poller .* lost: killed, hung",
    'up{job="poller"} == 0',
    "Poller .* lost: killed, hung",
    "ExtprocProcessDown",
)
_REPLICAS = [replica.name for replica in REPLICAS]
_NO_POLLER = "No poller reaches Redis"


def _no_state(page: str, log: str) -> Signs:
    return Signs(page, "extproc_state_age_seconds > 5", log, "ExtprocStateStale")


SCENES = (
    ChaosScene("router-killed", _killed("router-2"), 5.0, _routes("router-2"), _ROUTER_LOST),
    ChaosScene("routers-killed", _killed("router", "router-2"), 5.0, _routes("router", "router-2"),
               Signs("no router answers", "absent(extproc_open_streams)", "", "ExtprocNoRouter")),
    ChaosScene("router-stopped", _stopped("router"), 5.0, _routes("router"), _ROUTER_LOST,
               stopped="router"),
    ChaosScene("router-slow", _slowed("router", run_s=0.02, stop_s=0.18), 10.0, _routes("router"),
               Signs("This router is slow", "extproc_loop_delay_seconds > 0.02",
                     "This router is slow", "ExtprocRouterSlow"),
               stopped="router"),
    ChaosScene("redis-killed", _killed("redis"), 10.0, _fresh,
               _no_state("Redis does not answer", "redis is lost"), most_age_s=12.0),
    ChaosScene("redis-slow", _slowed("redis", run_s=0.005, stop_s=0.095), 10.0, _fresh,
               Signs("Redis is slow",
                     "histogram_quantile(0.9, rate(extproc_redis_seconds_bucket[1m])) > 0.02",
                     "Redis is slow", "ExtprocRedisSlow")),
    ChaosScene("redis-full", ChaosFault(_redis_memory(1), _redis_memory(0)), 10.0, _fresh,
               Signs("Redis stores nothing", "extproc_poll_redis_lost > 0",
                     "redis is lost", "ExtprocPollerWithoutRedis")),
    ChaosScene("redis-emptied",
               ChaosFault(lambda system: system.stack.redis_command("FLUSHALL")),
               5.0, _fresh, Signs("", "", "redis was emptied")),
    ChaosScene("poller-killed", ChaosFault(_killed("poller").fail), 0.0, _fresh, _POLLER_LOST,
               tidy=_killed("poller").mend),
    ChaosScene("poller-stopped", _stopped("poller"), 5.0, _fresh, _POLLER_LOST),
    ChaosScene("pollers-killed", _killed("poller", "poller-2"), 10.0, _fresh,
               _no_state(_NO_POLLER, _NO_POLLER), most_age_s=20.0),  # pollers take seconds to start
    ChaosScene("pollers-cut-off", ChaosFault(_admit_pollers(False), _admit_pollers(True)), 10.0,
               _fresh, _no_state(_NO_POLLER, "redis is lost"), most_age_s=12.0),
    ChaosScene("replica-killed", _killed("r1"), 6.0, _serves("r1"),
               _excluded("r1", "unhealthy", ""), victim="r1", loses_answers=True),
    ChaosScene("replica-stopped", _stopped("r2"), 10.0, _serves("r2"),
               _excluded("r2", "stalled", "hangs"), victim="r2", loses_answers=True),
    ChaosScene("replicas-killed", _killed(*_REPLICAS), 10.0, _serves(*_REPLICAS),
               Signs("No replica is healthy",
                     'rate(extproc_refused_total{reason="service_unavailable_error"}[1m]) > 0',
                     "requests refused: .*service_unavailable_error", "ExtprocNoReplica"),
               loses_requests=True, most_age_s=inf),  # no replica is left to be scraped
    ChaosScene("replica-500", _simulated("r3", fail=500), 10.0, _serves("r3"),
               Signs("r3 is excluded: ejected", 'extproc_replica_excluded{reason="failing"}',
                     "ejected for", "ExtprocReplicaFails"),
               victim="r3"),
    ChaosScene("replica-full", _simulated("r3", fail=503), 10.0, _serves("r3"),
               Signs("full|ejected", "rate(extproc_failures_total[1m]) > 0",
                     "requests failed on replicas", "ExtprocReplicaFails"),
               victim="r3", most_share=0.2),
    # With little load a replica that was slow gets no request for minutes, unless it restarts.
    ChaosScene("replica-slow",
               ChaosFault(_simulated("r3", slow=4.0).fail, _restarted("r3")), 10.0, _serves("r3"),
               Signs("r3 is much slower", 'extproc_replica_speed_ratio{phase="decode"} < 0.67',
                     "much slower", "ExtprocReplicaSlow"),
               victim="r3", most_share=0.2, loses_answers=True),
    ChaosScene("replica-asleep", ChaosFault(_post("r3", "/sleep"), _post("r3", "/wake_up")), 6.0,
               _serves("r3"), _excluded("r3", "asleep", "sleep"), victim="r3", loses_answers=True),
    _bad_metrics(MetricsPage.GARBAGE),
    _bad_metrics(MetricsPage.HUGE),
    # Two scrapes of three timeouts each pass until the exclusion.
    _bad_metrics(MetricsPage.ENDLESS, hold_s=12.0, excluded_s=8.0),
    ChaosScene("metrics-frozen",
               ChaosFault(_metrics(MetricsPage.FROZEN), _metrics(MetricsPage.GOOD)),
               20.0, _serves("r4"),
               Signs("r4 is showing gauges that do not move", "extproc_replica_gauges_ignored == 1",
                     "r4 is showing gauges", "ExtprocGaugesFrozen"),
               victim="r4", most_share=1.0),
    ChaosScene("envoy-wrong-port", _misconfigured(_wrong_port), 10.0, _routes("router", "router-2"),
               Signs("no router sent", "rate(envoy_http_ext_proc_failure_mode_allowed[1m]) > 0",
                     "no router sent", "ExtprocFailOpen")),
    ChaosScene("envoy-bypassing", _misconfigured(_without_filter), 10.0,
               _routes("router", "router-2"),
               Signs("no router sent", "extproc_external_requests > 1",
                     "no router sent", "ExtprocExternalLoad")),
    ChaosScene("envoy-not-following", _misconfigured(_without_override), 10.0, _followed,
               Signs("Envoy did not follow decisions", "rate(extproc_not_followed_total[1m]) > 0",
                     "Envoy did not follow decisions", "ExtprocNotFollowed")),
    ChaosScene("dns-down", ChaosFault(_names(False), _names(True)), 10.0, _fresh,
               Signs("r3.test", "extproc_poll_lookups_failing > 0",
                     "does not resolve", "ExtprocLookupFails")),
    ChaosScene("api-server-down",
               ChaosFault(lambda system: system.stack.api.stop(),
                          lambda system: system.stack.api.start()),
               10.0, _fresh,
               Signs("API server", "extproc_poll_lookups_failing > 0",
                     "Kubernetes source cannot be watched", "ExtprocLookupFails")),
)  # fmt: skip
