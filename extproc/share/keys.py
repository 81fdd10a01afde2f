"""Names in Redis."""


class Keys:
    """Of one pool, which stands in braces: a Redis Cluster keeps all of a pool in one slot.

    A name that ends in a colon goes on with a replica (``ip:port``) or a router.
    """

    def __init__(self, pool: str) -> None:
        tag = f"{{{pool}}}:"
        self.slot = f"{tag}slot"
        """Never written: in a Redis Cluster it has the pool's hash slot."""
        self.replica = f"{tag}replica:"
        """A replica's state, a JSON ``ReplicaState`` that expires."""
        self.changes = f"{tag}changes"
        """Channel that carries every change of a state together with the new value."""
        self.drains = f"{tag}drains"
        """A hash of the replicas that commands drain, as :mod:`extproc.share.drains` writes it."""
        self.lease = f"{tag}lease:"
        """The poller that scrapes a replica; it expires unless renewed."""
        self.pollers = f"{tag}pollers"
        """The live pollers: a sorted set, by the millisecond until which each counts."""
        self.router = f"{tag}router:"
        """A router's digest, as :mod:`extproc.fleet.digest` encodes it; it expires."""
        self.digests = f"{tag}digests"
        """Channel that carries every digest."""
        self.responses = f"{tag}responses"
        """A stream of stored responses: id → ``ip:port`` of the replica that holds it."""
        self.sessions = f"{tag}sessions"
        """A stream of sessions: digest → ``ip:port`` of the replica that has its requests."""
        self.prompts = f"{tag}prompts"
        """A stream of the prompts that routers sent: :mod:`extproc.fleet.announcements`."""
        self.blocks = f"{tag}blocks:"
        """A replica's KV blocks: news of them, as :mod:`extproc.fleet.held_blocks` encodes them,
        one after another; the first is whole."""
        self.blocks_channel = f"{tag}blocks"
        """Channel that carries news of blocks: the replica, a line break, the news."""
        self.kv_stream = f"{tag}kv-stream:"
        """What the poller knows of a replica's KV events, for the next poller to go on from."""
