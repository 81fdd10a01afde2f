"""Names in Redis. The pool stands in braces: a Redis Cluster keeps all of a pool in one slot."""


def slot_key(pool: str) -> str:
    """A key of the pool, never written: in a Redis Cluster it has the pool's hash slot."""
    return f"{{{pool}}}:slot"


def replica_key(pool: str, replica_id: str) -> str:
    """Key of one replica's state, a JSON ``ReplicaState`` that expires."""
    return f"{{{pool}}}:replica:{replica_id}"


def replica_pattern(pool: str) -> str:
    """Glob that matches the keys of all the pool's replicas."""
    return replica_key(pool, "*")


def members_key(pool: str) -> str:
    """Key of a hash, replica → JSON ``Member``: what commands asked of the pool's membership."""
    return f"{{{pool}}}:members"


def changes_channel(pool: str) -> str:
    """Pub/sub channel that carries every change together with the new value."""
    return f"{{{pool}}}:changes"


def lease_key(pool: str, replica_id: str) -> str:
    """Key that names the poller that scrapes a replica; it expires unless renewed."""
    return f"{{{pool}}}:lease:{replica_id}"


def pollers_key(pool: str) -> str:
    """Key of the pool's live pollers: a sorted set, by the millisecond until which each counts."""
    return f"{{{pool}}}:pollers"


def router_key(pool: str, router: str) -> str:
    """Key of one router's digest, as :mod:`extproc.fleet.digest` encodes it; it expires."""
    return f"{{{pool}}}:router:{router}"


def router_pattern(pool: str) -> str:
    """Glob that matches the keys of all the pool's routers."""
    return router_key(pool, "*")


def responses_key(pool: str) -> str:
    """Key of a stream of stored responses: id → ``ip:port`` of the replica that holds it."""
    return f"{{{pool}}}:responses"


def sessions_key(pool: str) -> str:
    """Key of a stream of sessions: digest → ``ip:port`` of the replica that has its requests."""
    return f"{{{pool}}}:sessions"


def prompts_key(pool: str) -> str:
    """Key of a stream of the prompts that routers sent: :mod:`extproc.fleet.sent`."""
    return f"{{{pool}}}:prompts"


def blocks_key(pool: str, replica_id: str) -> str:
    """Key of a replica's KV blocks: news of them, as :mod:`extproc.fleet.block_news` encodes them,
    one after another; the first is whole."""
    return f"{{{pool}}}:blocks:{replica_id}"


def kv_stream_key(pool: str, replica_id: str) -> str:
    """Key of what the poller knows of a replica's KV events, for the next poller to go on from."""
    return f"{{{pool}}}:kv-stream:{replica_id}"


def blocks_pattern(pool: str) -> str:
    """Glob that matches the keys of the blocks of all the pool's replicas."""
    return blocks_key(pool, "*")


def blocks_channel(pool: str) -> str:
    """Pub/sub channel that carries news of blocks: the replica, a line break, the news."""
    return f"{{{pool}}}:blocks"


def digests_channel(pool: str) -> str:
    """Pub/sub channel that carries every digest."""
    return f"{{{pool}}}:digests"
