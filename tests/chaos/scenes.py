"""Faults of parts, and the conditions under which the system has recovered."""

import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tests.chaos.replica import MetricsPage
from tests.chaos.system import LoadedSystem

Act = Callable[[LoadedSystem], Awaitable[None]]
Recovered = Callable[[LoadedSystem, float], Awaitable[bool]]
"""Condition of recovery since a monotonic time."""


async def _nothing(system: LoadedSystem) -> None: ...


@dataclass(frozen=True, slots=True)
class Scene:
    """Failure of a part, and its repair ``hold_s`` seconds later."""

    name: str
    fail: Act
    hold_s: float
    mend: Act
    recovered: Recovered
    victim: str = ""  # name of the replica that fails
    stopped: str = ""  # name of the router that is stopped, and continues with its old state
    loses_answers: bool = False  # responses in progress at the failure may be lost
    tidy: Act = _nothing  # after the recovery
    excluded_s: float = 4.0  # time until the failing replica must be excluded
    most_age_s: float = 2.0
    """Greatest age of states that routers have of the other replicas; a dead poller is replaced
    within this time."""


def _kill(name: str) -> Act:
    return lambda system: system.stack.kill(name)


def _start(name: str) -> Act:
    return lambda system: system.stack.start(name)


def _signal(name: str, number: signal.Signals) -> Act:
    async def act(system: LoadedSystem) -> None:
        system.stack.process(name).signal(number)

    return act


def _simulate(name: str, status: int) -> Act:
    return lambda system: system.post(name, "/simulate", json={"fail": status})


def _metrics(name: str, page: MetricsPage) -> Act:
    return lambda system: system.post(name, "/misbehave", params={"metrics": page})


def _serves(name: str) -> Recovered:
    async def recovered(system: LoadedSystem, since: float) -> bool:
        return system.served_by(name, since)

    return recovered


def _routes(name: str) -> Recovered:
    return lambda system, since: system.routed_by(name, since)


async def _fresh(system: LoadedSystem, since: float) -> bool:
    return await system.scraped(since)


def _bad_metrics(page: MetricsPage, hold_s: float = 6.0, excluded_s: float = 4.0) -> Scene:
    bad, good = _metrics("r4", page), _metrics("r4", MetricsPage.GOOD)
    recovered = _serves("r4")
    return Scene(f"metrics-{page}", bad, hold_s, good, recovered, "r4", excluded_s=excluded_s)


SCENES = (
    Scene("redis-killed", _kill("redis"), 10.0, _start("redis"), _fresh, most_age_s=12.0),
    Scene("router-killed", _kill("router-2"), 5.0, _start("router-2"), _routes("router-2")),
    Scene("poller-killed", _kill("poller"), 0.0, _nothing, _fresh, tidy=_start("poller")),
    Scene(
        "poller-stopped",
        _signal("poller", signal.SIGSTOP),
        5.0,
        _signal("poller", signal.SIGCONT),
        _fresh,
    ),
    Scene(
        "router-stopped",
        _signal("router", signal.SIGSTOP),
        5.0,
        _signal("router", signal.SIGCONT),
        _routes("router"),
        stopped="router",
    ),
    Scene(
        "replica-killed", _kill("r1"), 6.0, _start("r1"), _serves("r1"), "r1", loses_answers=True
    ),
    Scene(
        "replica-stopped",
        _signal("r2", signal.SIGSTOP),
        10.0,
        _signal("r2", signal.SIGCONT),
        _serves("r2"),
        "r2",
        loses_answers=True,
    ),
    Scene("replica-500", _simulate("r3", 500), 10.0, _simulate("r3", 0), _serves("r3"), "r3"),
    _bad_metrics(MetricsPage.GARBAGE),
    _bad_metrics(MetricsPage.HUGE),
    # Two scrapes of three timeouts each pass until the exclusion.
    _bad_metrics(MetricsPage.ENDLESS, hold_s=12.0, excluded_s=8.0),
)
