"""What there is to say about what runs: Redis, the replicas, Envoy."""

from collections.abc import Iterator, Mapping
from contextlib import suppress

from extproc.config import Config, ModelTargets
from extproc.envoy.finding import Finding, Level, worst_first
from extproc.envoy.live_envoy import check_live_envoy
from extproc.envoy.live_redis import check_redis
from extproc.envoy.live_replicas import check_replicas
from extproc.fleet.members import ModelNames
from extproc.poll.discovery import RESOLVE_S, Discovery, read_replicas
from extproc.share.replicas import Snapshot

_NOWHERE = (
    "names no address now{}: none of its replicas is polled. Put right its name, or what resolves "
    "it"
)
_UNSERVED = (
    "no replica that answers lists it: requests for {} get 404, or wait for a replica that does. "
    "Start one with it, or put right route.models"
)
_LACKING = (
    "no replica that answers lists it: requests for {} go to those that list another of its names. "
    "Start one with it, or put right route.models"
)


async def check_live(config: Config, envoy_admin: str | None) -> list[Finding]:
    """What there is to say, worst first. All are asked; nothing is changed.

    Envoy is asked at the URL of its admin address, if that is given.
    """
    found: list[Finding] = []
    replicas: dict[str, str] = {}
    served: set[str] = set()
    for pool in config.each_pool:
        snapshot = None
        if config.state == "redis":
            said, snapshot = await check_redis(pool)
            found += said
        said, named = await _named(pool, snapshot)
        found += said
        said, models = await check_replicas(pool, named, snapshot)
        found += said
        replicas |= named
        served |= models
    found += _models(config.route.models, served)
    if envoy_admin is not None:
        found += await check_live_envoy(envoy_admin, config, replicas)
    return worst_first(found)


async def _named(config: Config, snapshot: Snapshot | None) -> tuple[list[Finding], dict[str, str]]:
    """The replicas that configuration, file or pollers name: ``ip:port`` → name."""
    found: list[Finding] = []
    sources = [*config.replicas]
    if config.replicas_file is not None:
        with suppress(OSError, ValueError):  # check_replicas_files tells
            sources += read_replicas(config.replicas_file)
    named = {state.id: state.name for state in snapshot.states} if snapshot else {}
    for source in sources:
        discovery = Discovery([source], None, RESOLVE_S)
        try:
            targets = {target.id: target.name for target in await discovery.targets()}
            reason = "".join(f" ({problem})" for problem in discovery.problems())
        finally:
            discovery.stop()
        if not targets:
            text = _NOWHERE.format(reason)
            found.append(Finding("replicas", Level.ERROR, f"replica {source.where}", text))
        named |= targets
    return found, named


def _models(models: Mapping[str, ModelTargets], served: set[str]) -> Iterator[Finding]:
    """What the names that clients ask for lead to, and no replica serves."""
    names = ModelNames(models)
    for name, targets in models.items():
        weighed = targets.items() if isinstance(targets, dict) else [(name, 1.0)]
        known = {one for model, weight in weighed if weight for one in names.served(model)}
        missing = known - served
        text = _LACKING if missing < known else _UNSERVED
        for model in sorted(missing):
            yield Finding("model", Level.ERROR, f"model {model}", text.format(name))
