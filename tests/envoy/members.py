"""Members of a running Envoy's clusters, as its admin address shows them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import aiohttp

from tests.waiting import until_read


class EnvoyMembers:
    """Members of the cluster of replicas, called by the names given for their ``ip:port``."""

    def __init__(self, admin: str, names: Mapping[str, str] = MappingProxyType({})) -> None:
        self._admin = admin
        self._names = names

    async def clusters(self) -> dict[str, list[dict[str, Any]]]:
        url = f"{self._admin}/clusters?format=json"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            found = (await response.json(content_type=None))["cluster_statuses"]
        return {cluster["name"]: cluster.get("host_statuses", []) for cluster in found}

    async def have(self, **health: str) -> None:
        """Wait until exactly these members exist, each with this health."""
        await until_read(self.health, lambda now: now == health)

    async def health(self) -> dict[str, str]:
        members = await self._by_name()
        return {
            name: state["health_status"]["eds_health_status"] for name, state in members.items()
        }

    async def requests(self, name: str) -> int:
        """Return the number of requests that Envoy has sent to a member."""
        stats = (await self._by_name())[name]["stats"]
        return sum(int(stat.get("value", 0)) for stat in stats if stat["name"] == "rq_total")

    async def _by_name(self) -> dict[str, dict[str, Any]]:
        named = {}
        for state in (await self.clusters()).get("replicas", []):
            at = state["address"]["socket_address"]
            address = f"{at['address']}:{at['port_value']}"
            named[self._names.get(address, address)] = state
        return named
