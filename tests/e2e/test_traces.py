"""Traces, access log and response headers work with a real collector and Envoy, configured as
docs/operations/monitor.md shows."""

import json
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml

from extproc.config import Config
from extproc.envoy.check import check_envoy
from extproc.envoy.finding import Level
from extproc.lab.harness.envoy_config import Bootstrap, manager_of, socket_address
from extproc.lab.harness.processes import Check, free_port, listening
from extproc.lab.harness.stack import MODEL
from tests.e2e.client import EnvoyClient
from tests.e2e.stack import PatientStack, equal_pair, ext_proc_of, here
from tests.spans import Spans, attributes
from tests.waiting import until

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="session")]
rotel = pytest.importorskip("rotel", reason="the collector has no wheel for this machine")

PAGE = Path(__file__).parents[2] / "docs" / "operations" / "monitor.md"
SECTIONS = PAGE.read_text().partition("## Traces")[2]
BLOCKS = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", SECTIONS, re.S)]
TRACES, TRACING, COLLECTOR, METADATA, RECEIVING, ACCESS_LOG, TELL = BLOCKS
TRACE = "0af7651916cd43dd8448eb211c80319c"


class TracedStack(PatientStack):
    """A stack with a collector, and Envoy as in docs/operations/monitor.md."""

    def __init__(self, directory: Path, spans: Spans) -> None:
        super().__init__(directory, here(equal_pair()), pollers=0)
        self.spans = spans
        self.log = directory / "decisions.log"
        self.ports = {**self.ports, "collector": free_port(), "collector-http": free_port()}

    async def start(self, name: str) -> None:
        if name == "router":
            await super().start("collector")
        await super().start(name)

    def _recipe(self, name: str) -> tuple[Sequence[str | Path], Check]:
        if name != "collector":
            return super()._recipe(name)
        agent = Path(rotel.__file__).with_name("rotel-agent")
        grpc, http = (self.address(part) for part in ("collector", "collector-http"))
        onward = f"http://127.0.0.1:{self.spans.port}"
        argv: list[str | Path] = [agent, "start", "--exporter", "otlp"]
        argv += ["--otlp-grpc-endpoint", grpc, "--otlp-http-endpoint", http]
        argv += ["--otlp-exporter-endpoint", onward, "--otlp-exporter-protocol", "http"]
        argv += ["--otlp-exporter-compression", "none", "--batch-timeout", "200ms"]
        return argv, listening(self.ports["collector-http"])

    def _configuration(self) -> dict[str, Any]:
        found = super()._configuration()
        found["serve"] = {**found["serve"], **METADATA["serve"], "chunks_per_s": 1e6}
        return {**found, "traces": {"endpoint": f"http://{self.address('collector-http')}"}}

    def _bootstrap(self) -> Bootstrap:
        bootstrap = super()._bootstrap()
        manager = manager_of(bootstrap)
        assert self.missing(bootstrap) == {"decision_metadata_is_received"}
        ext_proc_of(bootstrap).update(RECEIVING)
        manager["http_filters"].insert(-1, TELL)
        manager |= TRACING
        (where,) = COLLECTOR["load_assignment"]["endpoints"][0]["lb_endpoints"]
        where["endpoint"]["address"] = socket_address(self.address("collector"))
        bootstrap["static_resources"]["clusters"].append(COLLECTOR)
        assert not self.missing(bootstrap)
        return bootstrap

    def _write_configurations(self) -> None:
        super()._write_configurations()
        file = self.directory / "envoy.yaml"
        bootstrap = yaml.safe_load(file.read_text())
        manager_of(bootstrap).update(ACCESS_LOG)
        (log,) = ACCESS_LOG["access_log"]
        log["typed_config"]["path"] = str(self.log)
        layer = {"name": "tests", "static_layer": {"tracing.opentelemetry.flush_interval_ms": 200}}
        bootstrap["layered_runtime"] = {"layers": [layer]}
        file.write_text(yaml.safe_dump(bootstrap))

    def missing(self, bootstrap: object) -> set[str]:
        found = check_envoy(bootstrap, Config.model_validate(self._configuration()))
        return {finding.rule for finding in found if finding.level in (Level.ERROR, Level.WARNING)}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TracedStack]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")  # ms, of the router; usually 5 s
        async with (
            Spans() as spans,
            TracedStack(tmp_path_factory.mktemp("traces"), spans) as running,
        ):
            yield running


async def test_decision_is_part_of_trace_of_envoy(stack: TracedStack, client: EnvoyClient) -> None:
    assert TRACES == {"traces": {"endpoint": "http://collector:4318"}}
    sampled = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
    answer = await client.chat(20, headers=sampled, stream=True)
    spans = await stack.spans.of(TRACE, 5)
    route, request = spans["extproc: route"], spans[f"extproc: chat {MODEL}"]
    by_id = {span.span_id: name for name, span in spans.items()}
    asked = spans[by_id[route.parent_span_id]]
    assert by_id[asked.span_id].startswith("envoy: async envoy.service.ext_proc")
    assert request.parent_span_id == asked.span_id
    assert by_id[spans[by_id[asked.parent_span_id]].span_id].startswith("envoy: ")
    decided, record = attributes(route), answer.decision
    assert decided["extproc.request_id"] == record["request_id"]
    assert f"{decided['server.address']}:{decided['server.port']}" == record["replica"]
    for key in ("policy", "prompt_tokens", "predicted_completion_s"):
        assert decided[f"extproc.{key}"] == record[key], key
    terms = {candidate["name"]: candidate["terms_s"] for candidate in record["candidates"]}
    for which in ("replica", "second"):
        prefill_s = decided[f"extproc.{which}.prefill_s"]
        assert prefill_s == pytest.approx(
            terms.pop(decided[f"extproc.{which}"])["prefill"], abs=1e-4
        )
    served = attributes(request)
    assert served["http.response.status_code"] == 200
    assert served["gen_ai.usage.output_tokens"] == 20
    assert served["extproc.completion_s"] > served["gen_ai.response.time_to_first_chunk"] > 0
    assert request.end_time_unix_nano > request.start_time_unix_nano >= route.end_time_unix_nano


async def test_access_log_has_decision(stack: TracedStack, client: EnvoyClient) -> None:
    record = (await client.chat()).decision
    lines: list[dict[str, Any]] = []

    def logged() -> bool:
        lines[:] = map(json.loads, stack.log.read_text().splitlines()) if stack.log.exists() else ()
        return any(line["request"] == record["request_id"] for line in lines)

    await until(logged)
    (line,) = (line for line in lines if line["request"] == record["request_id"])
    decision = line["decision"]
    assert line["upstream"] == record["replica"]
    assert line["predicted_s"] == decision["predicted_completion_s"]
    assert decision["predicted_completion_s"] == record["predicted_completion_s"]
    assert decision["replica"] == record["replica_name"]
    assert decision["queued_s"] == 0
    keys = re.search(r"these fields with each choice: (.*?)\. Envoy", PAGE.read_text(), re.S)
    assert keys
    assert set(re.findall(r"`(\w+)`", keys[1])) == set(decision)


async def test_allowed_client_gets_decision_in_response_headers(client: EnvoyClient) -> None:
    names = ("x-extproc-replica", "x-extproc-predicted-completion")
    for value, allowed in (("a-value-of-your-own", True), ("true", False), ("", False)):
        answer = await client.chat(headers={"x-tell-decision": value} if value else None)
        assert [name in answer.headers for name in names] == [allowed] * 2
        if allowed:
            assert answer.headers[names[0]] == answer.decision["replica_name"]
