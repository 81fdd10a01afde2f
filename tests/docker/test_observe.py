"""The profile ``observe``: a real Prometheus evaluates the rules and the dashboard's queries."""

import asyncio
from typing import Any
from urllib.parse import quote

import pytest

from extproc.lab.harness.processes import answers
from tests.docker.conftest import ComposeSystem, image_of, require_image
from tests.observe.test_observability import targets
from tests.observe.test_reference import rules
from tests.waiting import until, until_read

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]

EMPTY = {
    "Refused, A": "no request is refused",
    "Share of tenants, A": "no tenant waits",
    "Failed, A": "no replica fails",
    "Excluded, A": "no replica is excluded",
    "Age of states, B": "one router has no peers",
}
"""Queries without a result while all goes well, and why."""


@pytest.fixture
async def prometheus(system: ComposeSystem) -> str:
    """Start Prometheus; return its address once it has scraped all parts twice under load."""
    require_image(image_of("prometheus"))
    await asyncio.to_thread(system.compose, "up", "--detach", "prometheus")
    await until(answers(f"{system.prometheus}/-/ready"))
    await system.ready()

    async def has_rates() -> bool:
        await traffic(system)
        found = await query(system, "rate(extproc_tpot_predicted_ratio_count[1m]) > 0")
        return bool(found) and not await query(system, "up == 0")

    await until(has_rates, 120)
    return system.prometheus


async def traffic(system: ComposeSystem) -> None:
    await asyncio.gather(*(system.stream("hello " * 500) for _ in range(8)))


def expressions() -> dict[str, str]:
    """Return the queries with what Grafana puts in the place of its variables."""
    values = {"$__rate_interval": "1m", "$instance": ".*", "$model": ".*", "$objective": ".*"}
    made = {}
    for name, target in targets():
        made[name] = target["expr"]
        for variable, value in values.items():
            made[name] = made[name].replace(variable, value)
    return made


async def query(system: ComposeSystem, expression: str) -> list[Any]:
    """Return the result of a query; fail with the message of Prometheus if it has an error."""
    answer = await system.get(f"{system.prometheus}/api/v1/query?query={quote(expression)}")
    assert answer["status"] == "success", f"{expression}: {answer['error']}"
    return list(answer["data"]["result"])


async def test_each_query_of_the_dashboard_has_a_result(
    system: ComposeSystem, prometheus: str
) -> None:
    del prometheus

    async def without_result() -> set[str]:
        await traffic(system)  # a rate needs two samples of each series
        return {name for name, text in expressions().items() if not await query(system, text)}

    await until_read(without_result, lambda names: names <= EMPTY.keys())


async def test_prometheus_evaluates_each_rule_and_none_fires(
    system: ComposeSystem, prometheus: str
) -> None:
    async def evaluated() -> list[Any]:
        groups = (await system.get(f"{prometheus}/api/v1/rules"))["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    async def all_evaluated() -> bool:
        return all(rule["health"] != "unknown" for rule in await evaluated())

    await until(all_evaluated)
    found = await evaluated()
    assert {rule["name"] for rule in found} == {rule["alert"] for rule in rules()}
    assert {rule["health"] for rule in found} == {"ok"}
    assert not [rule["name"] for rule in found if rule["state"] == "firing"]
