"""What goes wrong, and when it counts as over."""

import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tests.chaos.replica import Page
from tests.chaos.system import System

Act = Callable[[System], Awaitable[None]]
Over = Callable[[System, float], Awaitable[bool]]
"""Whether everything is as before; takes the monotonic time since when."""


async def _nothing(system: System) -> None: ...


@dataclass(frozen=True, slots=True)
class Scene:
    """A part fails, and comes back ``hold_s`` seconds later."""

    name: str
    fail: Act
    hold_s: float
    mend: Act
    over: Over  # recovery is timed from the mending to this
    victim: str = ""  # the replica that fails
    stopped: str = ""  # the router that goes on later, at first with what it knew before
    loses_answers: bool = False  # whether the answers it was giving when it failed may be lost
    tidy: Act = _nothing  # once it is over
    most_age_s: float = 2.0
    """Seconds: routers have no older figures of the other replicas. A poller that dies is replaced
    within these."""


def _kill(name: str) -> Act:
    return lambda system: system.stack.kill(name)


def _start(name: str) -> Act:
    return lambda system: system.stack.start(name)


def _signal(name: str, number: signal.Signals) -> Act:
    async def act(system: System) -> None:
        system.stack.process(name).signal(number)

    return act


def _simulate(name: str, status: int) -> Act:
    return lambda system: system.post(name, "/simulate", json={"fail": status})


def _metrics(name: str, page: Page) -> Act:
    return lambda system: system.post(name, "/misbehave", params={"metrics": page})


def _serves(name: str) -> Over:
    async def over(system: System, since: float) -> bool:
        return system.served_by(name, since)

    return over


def _routes(name: str) -> Over:
    return lambda system, since: system.routed_by(name, since)


async def _fresh(system: System, since: float) -> bool:
    return await system.scraped(since)


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
    *(
        Scene(
            f"metrics-{page}",
            _metrics("r4", page),
            6.0,
            _metrics("r4", Page.GOOD),
            _serves("r4"),
            "r4",
        )
        for page in (Page.GARBAGE, Page.HUGE, Page.ENDLESS)
    ),
)
