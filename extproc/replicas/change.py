"""``add``, ``drain`` and ``remove``: what they ask of the pollers."""

import asyncio

from pydantic import ValidationError

from extproc.config import ReplicaSource
from extproc.ground.address import join_address
from extproc.poll.resolve import is_address, one_family, resolve_host
from extproc.replicas.pool import Pool, Replica, ReplicaError
from extproc.replicas.wait import left
from extproc.share.desired import Desired, Wish

_RESOLVE_S = 5.0


async def add(pool: Pool, address: str, profile: str | None, name: str | None) -> str:
    """Have a replica polled, or take back that it drains or was removed; returns what was done.

    It is at ``host:port``, of a host name the address it has now. What is not given stays as it is,
    or is the default.

    Raises:
        ValueError: it is no address or profile.
    """
    given = _source(address, profile, name)
    id_ = await _resolved(given)
    known = {replica.id: replica for replica in await pool.replicas()}.get(id_)
    before = known.desired.source if known and known.desired else None
    if known and not before and known.wish == "remove" and not (profile or name):
        await _ask(pool, known, "serve")
        return f"{known.title} is polled again, if configuration, file, DNS or Kubernetes name it"
    if known and known.state and not before and known.wish != "remove":
        if profile or name:
            raise ReplicaError(
                f"{known.title} is in the pool by configuration, file, DNS or Kubernetes: "
                "its profile and name are set there"
            )
        if known.wish == "serve":
            return f"{known.title} is in the pool already"
        await _ask(pool, known, "serve")
        return f"{known.title} takes requests again"
    source = ReplicaSource(
        url=id_,
        profile=given.profile if profile or before is None else before.profile,
        name=name or (before.name if before else "") or _host_name(given, id_),
    )
    desired = Desired(wish="serve", source=source)
    await pool.desired.write({id_: desired})
    return f"{Replica(id_, None, desired).title} is added"


async def drain(pool: Pool, word: str) -> tuple[Replica, str]:
    """Have nothing new sent to a replica; returns it as it was, and what was done."""
    replica = await pool.find(word)
    await _ask(pool, replica, "drain")
    told = f"{replica.title} is draining" + (f": {left(replica.state)}" if replica.state else "")
    if not _served_without(replica, await pool.replicas()):
        told += (
            "\nno other replica could serve its requests: until one does, it goes on getting them"
        )
    return replica, told


def _served_without(replica: Replica, replicas: list[Replica]) -> bool:
    """Whether every model it serves has another replica that is healthy and does not drain."""
    others = [
        one.state
        for one in replicas
        if one.state
        and one.id != replica.id
        and one.state.healthy
        and one.wish == "serve"
        and not one.state.draining  # it may be Kubernetes that drains it
    ]
    models = replica.state.models if replica.state else ()
    return bool(others) and all(any(model in state.models for state in others) for model in models)


async def remove(pool: Pool, word: str) -> str:
    """Have a replica polled no more, whoever names it; returns what was done."""
    replica = await pool.find(word)
    await _ask(pool, replica, "remove")
    state = replica.state
    in_flight = state.running + state.waiting if state and state.healthy else 0
    rest = f"; {in_flight} requests there go on" if in_flight else ""
    return f"{replica.title} is removed{rest}"


async def _ask(pool: Pool, replica: Replica, wish: Wish) -> None:
    source = replica.desired.source if replica.desired else None
    await pool.desired.write({replica.id: Desired(wish=wish, source=source)})


def _source(address: str, profile: str | None, name: str | None) -> ReplicaSource:
    fields = {"url": address, "profile": profile, "name": name}
    try:
        return ReplicaSource.model_validate({key: text for key, text in fields.items() if text})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(first["msg"].removeprefix("Value error, ")) from None


async def _resolved(source: ReplicaSource) -> str:
    """``ip:port``: Envoy knows its members by nothing else."""
    host, port = source.host_and_port
    try:
        async with asyncio.timeout(_RESOLVE_S):
            addresses = one_family([host] if is_address(host) else await resolve_host(host))
    except (OSError, UnicodeError) as error:
        reason = str(error) or f"no answer within {_RESOLVE_S:g} s"
        raise ReplicaError(f"the host {host!r} does not resolve: {reason}") from None
    if len(addresses) > 1:
        raise ReplicaError(
            f"{host!r} has {len(addresses)} addresses: add each, or write "
            f"{{dns: '{join_address(host, port)}'}} into the replicas of the configuration"
        )
    return join_address(addresses[0], port)


def _host_name(source: ReplicaSource, id_: str) -> str:
    given = join_address(*source.host_and_port)
    return "" if given == id_ else given
