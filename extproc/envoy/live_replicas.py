"""What there is to say about replicas: what they answer here, and what pollers say of them."""

import asyncio
from collections.abc import Mapping

import aiohttp

from extproc.config import Config
from extproc.envoy.finding import Finding, Level
from extproc.ground.address import with_name
from extproc.ground.clock import monotonic
from extproc.poll.metrics_text import EngineFigures
from extproc.poll.scrape import ScrapeError, open_session, read_models, scrape
from extproc.replica_state import SILENT_AFTER_S
from extproc.share.replicas import Snapshot

_NONE = "no replica is known: Envoy's own load balancing serves. Name them (replicas)"
_DOWN = "{}: it gets no requests. Start it, or put right its address (replicas)"
_SLOW = (
    "a scrape took {:.2f} s, longer than poll.timeout_s ({:g} s): nothing is learned from it. Look "
    "what keeps its API server busy, or raise poll.timeout_s"
)
_NO_LIST = "{}: any model's requests may go there. Let it answer /v1/models"
_NO_SIZE = (
    "tells no size of its KV cache (vllm:cache_config_info): how full it will be is not predicted. "
    "Let nothing between it and the poller drop that line"
)
_NO_STEPS = (
    "counts no steps (vllm:iteration_tokens_total): its speed stays that of its profile. Let "
    "nothing between it and the poller drop that line"
)
_UNPOLLED = (
    "routers do not know it: no poller scrapes it. Run 'extproc poll' with this configuration"
)
_DISAGREE = "it answers here, and pollers say: {}. Let the pollers' machines reach it"
_OLD = "what pollers saw of it is {:.0f} s old: is a poller that scrapes it alive?"


async def check_replicas(
    config: Config, replicas: Mapping[str, str], snapshot: Snapshot | None
) -> tuple[list[Finding], set[str]]:
    """What there is to say of a pool's replicas (``ip:port`` → name), and the models that they
    list; ``snapshot``: what pollers say of them, where that is known."""
    if not replicas:
        return [Finding("replica", Level.ERROR, f"pool {config.pool}", _NONE)], set()
    async with open_session(config.poll.give_up_s) as session:
        asked = (_check(config, session, id_, snapshot) for id_ in replicas)
        answers = await asyncio.gather(*asked)
    found: list[Finding] = []
    models: set[str] = set()
    for (id_, name), (said, served) in zip(replicas.items(), answers, strict=True):
        where = f"replica {with_name(id_, name)}"
        found += [Finding("replica", level, where, text) for level, text in said]
        models |= served
    return found, models


async def _check(
    config: Config, session: aiohttp.ClientSession, id_: str, snapshot: Snapshot | None
) -> tuple[list[tuple[Level, str]], set[str]]:
    began = monotonic()
    try:
        figures = await scrape(session, id_)
    except ScrapeError as error:
        return [(Level.ERROR, _DOWN.format(error))], set()
    took_s = monotonic() - began
    said = [(Level.WARNING, text) for text in _lacks(figures)]
    if took_s > config.poll.timeout_s:
        said.append((Level.WARNING, _SLOW.format(took_s, config.poll.timeout_s)))
    if snapshot is not None:
        said += _as_polled(id_, snapshot)
    models: tuple[str, ...] = figures.models
    try:
        models = (await read_models(session, id_)).get("models", ())
    except ScrapeError as error:
        said.append((Level.WARNING, _NO_LIST.format(error)))
    told = f"scraped in {took_s * 1e3:.0f} ms; serves {', '.join(models) or 'no model'}"
    return [*said, (Level.OK, told)], {*models}


def _lacks(figures: EngineFigures) -> list[str]:
    lacking = []
    if figures.generated_tokens and not figures.kv_tokens:  # who only embeds may have none
        lacking.append(_NO_SIZE)
    if figures.finished and not figures.steps:
        lacking.append(_NO_STEPS)
    return lacking


def _as_polled(id_: str, snapshot: Snapshot) -> list[tuple[Level, str]]:
    state = next((one for one in snapshot.states if one.id == id_), None)
    if state is None:
        return [(Level.ERROR, _UNPOLLED)]
    if not state.healthy:
        return [(Level.ERROR, _DISAGREE.format(state.problem))]
    if (age_s := snapshot.ages[id_]) > SILENT_AFTER_S:
        return [(Level.WARNING, _OLD.format(age_s))]
    return []
