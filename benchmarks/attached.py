"""The demo's stack around replicas that run already, and Envoy without ext_proc."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from extproc.lab.harness.envoy_config import Bootstrap, manager_of
from extproc.lab.harness.stack import SimulatedReplica, Stack

_ASKING = ("local_ratelimit", "set_filter_state", "ext_proc", "buffer")


class Attached(Stack):
    """Redis, poller, router and Envoy beside servers that run already; it leaves those alone."""

    def __init__(
        self,
        directory: Path,
        servers: Mapping[str, str],
        profiles: Mapping[str, str],
        settings: Mapping[str, Mapping[str, object]] = MappingProxyType({}),
    ) -> None:
        """A stack that does not run yet.

        Args:
            directory: where configurations and logs go.
            servers: name → ``ip:port`` of each replica.
            profiles: name → the hardware profile that router and poller take it to have.
            settings: as for :class:`Stack`.
        """
        replicas = [SimulatedReplica(name, profiles[name]) for name in servers]
        super().__init__(directory, replicas, settings)
        self._servers = servers

    def address(self, name: str) -> str:
        return self._servers.get(name) or super().address(name)

    async def start(self, name: str) -> None:
        if name not in self._servers:
            await super().start(name)


def drop_ext_proc(bootstrap: Bootstrap) -> None:
    """Removes ext_proc, and the filters that only its answer needs."""
    filters = manager_of(bootstrap)["http_filters"]
    filters[:] = [one for one in filters if one["name"].rpartition(".")[2] not in _ASKING]
