"""Headers that say what a request aims for reach the router through Envoy, where it tells them."""

import json
from pathlib import Path

import pytest

from extproc.config import Config
from extproc.envoy.check import check_envoy
from extproc.envoy.finding import Level
from extproc.lab.harness.envoy_config import Bootstrap
from extproc.lab.harness.stack import SimulatedReplica
from extproc.request.objective import FAIRNESS_ID, OBJECTIVE, TARGETS
from tests.e2e.client import Client
from tests.e2e.stack import Stack, ext_proc_of

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="session")]

REPLICAS = tuple(SimulatedReplica(f"r{number}", "llama-8b-h100") for number in range(2))
SETTINGS: dict[str, dict[str, object]] = {
    "hold": {
        "allow_inference_headers": True,
        "objectives": {
            "soon": {"priority": 1, "sheddable": True},
            "batch": {"priority": -1, "tenants": ["night"]},
        },
    },
    "serve": {"chunks_per_s": 1e6, "drain_s": 1.0},
}
ALL = (*OBJECTIVE, *FAIRNESS_ID, *TARGETS)
CONFIG = Config.model_validate(SETTINGS)


class Told(Stack):
    """Envoy tells the router what ``extproc check`` asks for."""

    def _bootstrap(self) -> Bootstrap:
        bootstrap = super()._bootstrap()
        assert self.missing(bootstrap) == {"named_headers_are_told"}
        told = [f"request.headers['{name}']" for name in ALL]
        ext_proc_of(bootstrap)["request_attributes"] += told
        assert not self.missing(bootstrap)
        return bootstrap

    @staticmethod
    def missing(bootstrap: object) -> set[str]:
        return {one.rule for one in check_envoy(bootstrap, CONFIG) if one.level is Level.ERROR}


def system(directory: Path) -> Stack:
    return Told(directory, REPLICAS, SETTINGS)


@pytest.mark.parametrize("header", OBJECTIVE)
async def test_an_objective_is_heard(client: Client, header: str) -> None:
    answer = await client.chat(headers={header: "soon"})
    assert (answer.status, answer.decision["objective"]) == (200, "soon")


@pytest.mark.parametrize("header", FAIRNESS_ID)
async def test_so_is_a_tenant(client: Client, header: str) -> None:
    answer = await client.chat(headers={header: "night"})
    assert (answer.status, answer.decision["objective"]) == (200, "batch")


@pytest.mark.parametrize("header", TARGETS)
async def test_and_a_target_that_is_met_or_refused(client: Client, header: str) -> None:
    objective = {"x-llm-d-inference-objective": "soon"}
    answer = await client.chat(headers={header: "60000", **objective})
    assert (answer.status, answer.decision["policy"]) == (200, "target")
    answer = await client.chat(headers={header: "0.001", **objective})
    assert (answer.status, answer.decisions) == (429, [])
    assert json.loads(answer.body)["error"]["code"] == "too_late"
    assert int(answer.headers["Retry-After"]) >= 1
