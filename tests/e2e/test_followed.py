"""Envoy does not follow decisions: the router says so, and blames no replica."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from extproc.lab.harness.envoy_config import Bootstrap, manager_of
from extproc.lab.harness.stack import FLEET
from tests.e2e.client import IN_TURN, EnvoyClient
from tests.e2e.stack import SETTINGS, Behind, Change, cluster_of, ext_proc_of, here
from tests.waiting import until

REQUESTS = 12  # in turn, each of the four replicas is chosen three times


def without_metadata(bootstrap: Bootstrap) -> None:
    del ext_proc_of(bootstrap)["metadata_options"]


def without_first_member(bootstrap: Bootstrap) -> None:
    del members_of(bootstrap)[0]


def with_other_filter(bootstrap: Bootstrap) -> None:
    """Add a filter that always chooses the last replica."""
    member = members_of(bootstrap)[-1]["endpoint"]["address"]["socket_address"]
    address = f"{member['address']}:{member['port_value']}"
    http = "type.googleapis.com/envoy.extensions.filters.http"
    setting: dict[str, Any] = {
        "@type": f"{http}.set_metadata.v3.Config",
        "metadata": [
            {
                "metadata_namespace": "envoy.lb",
                "value": {"x-gateway-destination-endpoint": address},
                "allow_overwrite": True,
            }
        ],
    }
    filters = manager_of(bootstrap)["http_filters"]
    filters.insert(-1, {"name": "envoy.filters.http.set_metadata", "typed_config": setting})


def members_of(bootstrap: Bootstrap) -> list[dict[str, Any]]:
    (endpoints,) = cluster_of(bootstrap, "replicas")["load_assignment"]["endpoints"]
    members: list[dict[str, Any]] = endpoints["lb_endpoints"]
    return members


CHANGES: dict[str, Change] = {
    "fallback": without_metadata,
    "unknown_address": without_first_member,
    "other_filter": with_other_filter,
}


class Disobeying(Behind):
    """A stack whose Envoy does not follow decisions."""

    cases = CHANGES
    router_constants: Mapping[str, object] = {
        "extproc.observe.changes._COUNTED_EVERY_S": 1.0  # the next case waits for a line, too
    }


system = partial(Disobeying, replicas=here(FLEET), settings=SETTINGS, pollers=0)


async def not_followed(client: EnvoyClient) -> dict[str, float]:
    counted = {
        reason: await client.metric(f'extproc_not_followed_total{{reason="{reason}"}}')
        for reason in ("retry", "unknown_address", "other_filter", "fallback")
    }
    return {reason: count for reason, count in counted.items() if count}


@pytest.mark.parametrize("stack", CHANGES, indirect=True)
async def test_decision_that_envoy_does_not_follow_blames_no_replica(
    client: EnvoyClient, stack: Disobeying
) -> None:
    reason = stack.name
    before = await not_followed(client)
    answers = [await client.chat(headers=IN_TURN) for _ in range(REQUESTS)]
    elsewhere = [
        answer.decision["outcome"]["not_followed"]
        for answer in answers
        if answer.decision["outcome"]["served_by"] != answer.decision["replica"]
    ]
    assert elsewhere
    assert set(elsewhere) == {reason}
    counted = await not_followed(client)
    assert counted == before | {reason: before.get(reason, 0.0) + len(elsewhere)}
    for address in stack.names:
        assert await client.metric(f'extproc_failures_total{{replica="{address}"}}') == 0
    assert (await client.chat()).decision["excluded"] == []
    warning = "Envoy did not follow decisions in the last minute"
    assert any(text.startswith(warning) for text in await client.warnings())
    log = stack.directory / "router.log"
    await until(lambda: f"{reason}=" in log.read_text())
