"""mTLS between Envoy and router, and the router's limits of headers and streams."""

import asyncio
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from extproc.lab.harness.envoy_config import Bootstrap, manager_of
from tests.certificates import Authority
from tests.e2e.client import EnvoyClient
from tests.e2e.stack import PatientStack, cluster_of, equal_pair, here
from tests.waiting import until

DOCS = Path(__file__).parents[2] / "docs"
MOST_STREAMS = 3


def system(directory: Path) -> PatientStack:
    """A stack with mTLS as in docs/envoy.md, whose Envoy accepts headers of 96 kB."""
    tls, authority = directory / "tls", Authority(directory / "authority")
    tls.mkdir()
    cert, key, ca = (tls / name for name in ("tls.crt", "tls.key", "ca.crt"))
    made = (*authority.sign("router"), authority.file)
    for source, file in zip(made, (cert, key, ca), strict=True):
        shutil.copy(source, file)
    serve = {"tls_cert": str(cert), "tls_key": str(key), "tls_client_ca": str(ca)}

    def secure(bootstrap: Bootstrap) -> None:
        cluster_of(bootstrap, "router").update(documented(tls))
        manager_of(bootstrap)["max_request_headers_kb"] = 96

    settings = {"serve": serve | {"max_streams": MOST_STREAMS}}
    return PatientStack(directory, here(equal_pair()), settings, pollers=0, change=secure)


def documented(files: Path) -> dict[str, Any]:
    page = (DOCS / "envoy.md").read_text(encoding="utf-8").partition("## TLS to the router")[2]
    snippet = page.partition("```yaml\n")[2].partition("```")[0]
    return dict(yaml.safe_load(snippet.replace("/etc/envoy/tls", str(files))))


async def test_headers_of_90_kb_reach_router_and_replica(client: EnvoyClient) -> None:
    before = await client.routed()
    large = {f"x-large-{number}": "v" * 7_500 for number in range(12)}
    await client.chat(tokens=3, headers=large)
    assert await client.routed() == before + 1


async def test_no_request_fails_beyond_max_streams(client: EnvoyClient) -> None:
    before = await client.routed()
    asked = asyncio.gather(*(client.chat(tokens=2000) for _ in range(20)))
    await until(partial(client.metric, 'extproc_requests_total{result="overload"}'))
    await client.slow(0.05)
    await asked
    assert await client.routed() > before
    await client.stack.wait_routing()
