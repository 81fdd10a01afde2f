"""Stand-in for llm-d's ``epp`` or AIBrix's ``gateway-plugins`` that picks in turn.

``python -m tests.benchmarks.picker epp|gateway-plugins [OPTION=VALUE …]``
"""

import asyncio
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

import grpc
import uvloop
import yaml
from aiohttp import web
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from extproc.proxy.messages import pass_chunk, proceed, send_to
from extproc.proxy.proto.ext_proc_pb2 import ProcessingRequest, ProcessingResponse
from extproc.proxy.service import SERVICE

LIE = "PICKER_LIE"  # in the environment: lies about `policy`, `replica` or `failures`


class Epp:
    """Picker in full duplex that decides on the headers."""

    def __init__(self, options: Mapping[str, str]) -> None:
        config = yaml.safe_load(Path(options["config-file"]).read_text())
        (discovery,) = (one for one in config["plugins"] if one["type"] == "file-discovery")
        endpoints = yaml.safe_load(Path(discovery["parameters"]["path"]).read_text())["endpoints"]
        (profile,) = config["schedulingProfiles"]
        self.plugins = [one["pluginRef"] for one in profile["plugins"]]
        self.replicas = [f"{one['address']}:{one['port']}" for one in endpoints]
        self.ports = [int(options[name]) for name in ("grpc-port", "grpc-health-port")]
        self.http = int(options["metrics-port"])
        self.decided: Counter[str] = Counter()
        self._turns = cycle(self.replicas)

    def reply(self, request: ProcessingRequest) -> bytes:
        phase = request.WhichOneof("request") or ""
        if phase == "request_headers":
            replica = next(self._turns)
            said = self.replicas[0] if os.environ.get(LIE) == "replica" else replica
            self.decided[said] += 1
            return send_to(phase, replica)
        if phase.endswith("_body"):
            chunk = getattr(request, phase)
            return pass_chunk(phase, chunk.body, chunk.end_of_stream)
        return proceed(phase)

    def metrics(self) -> str:
        plugins = ["random-scorer"] if os.environ.get(LIE) == "policy" else self.plugins
        failed = 2 if os.environ.get(LIE) == "failures" else 0
        attempts = "llm_d_epp_scheduler_attempts_total"
        took = "llm_d_epp_plugin_duration_seconds"
        lines = [
            "# TYPE llm_d_epp_ready_endpoints gauge",
            f'llm_d_epp_ready_endpoints{{name="compare"}} {len(self.replicas)}',
            f"# TYPE {attempts} counter",
            f'{attempts}{{status="failure",port=""}} {failed}',
        ]
        for one, count in self.decided.items():
            port = one.rpartition(":")[2]
            lines.append(f'{attempts}{{status="success",port="{port}"}} {count}')
        lines.append(f"# TYPE {took} histogram")
        lines.append(f'{took}_count{{extension_point="Picker",plugin_type="max-score-picker"}} 1')
        for one in plugins:
            point = "Filter" if one.endswith("filter") else "Scorer"
            labels = f'extension_point="{point}",plugin_type="{one}"'
            lines.append(f"{took}_count{{{labels}}} {self.decided.total()}")
        return "\n".join([*lines, ""])


class GatewayPlugins:
    """Picker that decides on the whole body and logs its decisions."""

    def __init__(self, options: Mapping[str, str]) -> None:
        (model,) = yaml.safe_load(Path(options["endpoints-config"]).read_text())["models"]
        self.replicas = model["endpoints"]
        self.model = model["name"]
        self.ports = [int(options["grpc-bind-address"].rpartition(":")[2])]
        self.http = int(options["http-bind-address"].rpartition(":")[2])
        self._turns = cycle(self.replicas)

    def reply(self, request: ProcessingRequest) -> bytes:
        phase = request.WhichOneof("request") or ""
        if phase != "request_body":
            return proceed(phase)
        replica = next(self._turns)
        lie, policy = os.environ.get(LIE), os.environ["ROUTING_ALGORITHM"]
        strategy = "random" if lie == "policy" else policy
        said = self.replicas[0] if lie == "replica" else replica
        print(
            f'I1122 "request_start" request_id="x" routing_strategy="{strategy}" '
            f'target_pod="p" target_pod_ip="{said}" outstanding_requests=0',
            flush=True,
        )
        reply = ProcessingResponse()
        option = reply.request_body.response.header_mutation.set_headers.add()
        option.header.key, option.header.raw_value = "target-pod", replica.encode()
        return reply.SerializeToString()

    def metrics(self) -> str:
        name = "gateway_request_model_fail_total"
        failed = 2 if os.environ.get(LIE) == "failures" else 0
        return (
            f'# TYPE {name} counter\n{name}{{status_code="499"}} 7\n'
            f'{name}{{status_code="503"}} {failed}\n'
        )


async def main(name: str, words: list[str]) -> None:
    options = dict(one.removeprefix("--").partition("=")[::2] for one in words)
    kinds: dict[str, Any] = {"epp": Epp, "gateway-plugins": GatewayPlugins}
    picker = kinds[name](options)

    async def process(
        requests: AsyncIterator[bytes], _: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        async for raw in requests:
            yield picker.reply(ProcessingRequest.FromString(raw))

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": picker.model}]})

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=picker.metrics())

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.get("/metrics", metrics)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", picker.http).start()
    asked, *others = (grpc.aio.server() for _ in picker.ports)
    handler = grpc.method_handlers_generic_handler(
        SERVICE, {"Process": grpc.stream_stream_rpc_method_handler(process)}
    )
    asked.add_generic_rpc_handlers((handler,))
    for server in others:  # of its health alone
        healthy = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
        await healthy.set("", health_pb2.HealthCheckResponse.SERVING)
    for server, port in zip((asked, *others), picker.ports, strict=True):
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], sys.argv[2:]))
