"""A primary that Sentinels watch."""

from collections.abc import Sequence

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.utils import str_if_bytes

from extproc.address import join_address
from extproc.redis_url import Node, Options
from extproc.store.located import ask, first_answer


class Primary:
    """Finds the present primary of a service: Sentinels promote another when it fails."""

    def __init__(
        self, service: str, sentinels: Sequence[Node], tls: bool, options: Options
    ) -> None:
        """
        Args:
            service: what the Sentinels call it.
            sentinels: some of them; the first that answers is believed.
            tls: whether they speak TLS.
            options: redis-py's options of a connection to them.
        """
        self._service = service
        self._sentinels = sentinels
        self._tls = tls
        self._options = dict(options)

    def __str__(self) -> str:
        sentinels = ",".join(join_address(*node) for node in self._sentinels)
        return f"{self._service} of sentinels {sentinels}"

    async def __call__(self) -> Node:
        """Ask the Sentinels.

        Raises:
            RedisConnectionError: none of them answers, or knows the service.
        """
        return await first_answer(self._sentinels, self._ask)

    async def _ask(self, sentinel: Node) -> Node:
        command = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
        answer = await ask(sentinel, self._tls, self._options, *command)
        if answer is None:
            where = join_address(*sentinel)
            raise RedisConnectionError(f"sentinel {where} knows no service {self._service!r}")
        host, port = map(str_if_bytes, answer)
        return host, int(port)
