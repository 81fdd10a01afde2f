"""mTLS between Envoy and router, and the router's limits of headers and streams."""

import asyncio
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from extproc.lab.harness.envoy_config import Bootstrap, manager_of
from extproc.lab.harness.stack import SimulatedReplica
from tests.certificates import Authority
from tests.e2e.client import EnvoyClient
from tests.e2e.stack import PatientStack, cluster_of, here
from tests.waiting import until

DOCS = Path(__file__).parents[2] / "docs"
REPLICAS = tuple(SimulatedReplica(name, "llama-8b-h100") for name in ("one", "two"))
MOST_STREAMS = 3


class SecuredStack(PatientStack):
    """A stack with mTLS as in docs/envoy.md, whose Envoy accepts headers of 96 kB."""

    def __init__(self, directory: Path) -> None:
        self.files = directory / "tls"
        self.files.mkdir()
        authority = Authority(directory / "authority")
        cert, key = authority.sign("router")
        for file, name in ((cert, "tls.crt"), (key, "tls.key"), (authority.file, "ca.crt")):
            shutil.copy(file, self.files / name)
        serve = {
            "tls_cert": str(self.files / "tls.crt"),
            "tls_key": str(self.files / "tls.key"),
            "tls_client_ca": str(self.files / "ca.crt"),
            "max_streams": MOST_STREAMS,
        }
        super().__init__(directory, here(REPLICAS), {"serve": serve}, pollers=0)

    def _bootstrap(self) -> Bootstrap:
        bootstrap = super()._bootstrap()
        cluster_of(bootstrap, "router").update(documented(self.files))
        manager_of(bootstrap)["max_request_headers_kb"] = 96
        return bootstrap


def documented(files: Path) -> dict[str, Any]:
    page = (DOCS / "envoy.md").read_text(encoding="utf-8").partition("## TLS to the router")[2]
    snippet = page.partition("```yaml\n")[2].partition("```")[0]
    return dict(yaml.safe_load(snippet.replace("/etc/envoy/tls", str(files))))


system = SecuredStack


async def test_headers_of_90_kb_reach_router_and_replica(client: EnvoyClient) -> None:
    before = await client.routed()
    large = {f"x-large-{number}": "v" * 7_500 for number in range(12)}
    await client.chat(tokens=3, headers=large)
    assert await client.routed() == before + 1


async def test_no_request_fails_beyond_max_streams(
    client: EnvoyClient, stack: SecuredStack
) -> None:
    before = await client.routed()
    asked = asyncio.gather(*(client.chat(tokens=2000) for _ in range(20)))
    await until(partial(client.metric, 'extproc_requests_total{result="overload"}'))
    await client.slow(0.05)
    await asked
    assert await client.routed() > before
    await stack.wait_routing()
