"""Endpoint pickers of llm-d (``epp``) and of AIBrix (``gateway-plugins``)."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import yaml
from prometheus_client.samples import Sample

from benchmarks.compare.contenders import Servers
from benchmarks.compare.pickers import PickerAccount, PickerProduct

# Filters and scorers by policy, with the weights of the scorers.
_PROFILES: Mapping[str, Mapping[str, int | None]] = {
    "scorers": {"queue-scorer": 2, "kv-cache-utilization-scorer": 2, "prefix-cache-scorer": 3},
    "affinity": {"prefix-cache-affinity-filter": None, "token-load-scorer": 1},
    "active": {"active-request-scorer": 1},
}
# Plugins that compute inputs of these scorers and do not start by themselves.
_PRODUCERS: Mapping[str, tuple[str, ...]] = {
    "scorers": (),
    "affinity": ("approx-prefix-cache-producer", "inflight-load-producer"),
    "active": ("inflight-load-producer",),
}


class LlmD(PickerProduct):
    name = "llm-d"
    program = "epp"
    policies = tuple(_PROFILES)
    clusters: ClassVar[Mapping[str, str]] = {"epp": "grpc"}

    def command(
        self, policy: str, model: str, servers: Servers, ports: Mapping[str, int], directory: Path
    ) -> tuple[list[str], dict[str, str]]:
        endpoints, config = directory / "endpoints.yaml", directory / "epp.yaml"
        split = {name: address.rpartition(":") for name, address in servers.items()}
        listed = [
            {"name": n, "address": host, "port": port} for n, (host, _, port) in split.items()
        ]
        endpoints.write_text(yaml.safe_dump({"endpoints": listed}))
        config.write_text(yaml.safe_dump(_config(policy, endpoints), sort_keys=False))
        options = {
            "pool-name": "compare",
            "pool-namespace": "compare",
            "config-file": config,
            "grpc-port": ports["grpc"],
            "grpc-health-port": ports["health"],
            "metrics-port": ports["http"],
            "secure-serving": "false",
            "metrics-endpoint-auth": "false",
            "tracing": "false",
            "zap-devel": "false",
            "v": 1,
        }
        return [f"--{name}={value}" for name, value in options.items()], {}

    def account(
        self, policy: str, samples: Iterable[Sample], log: str, servers: Servers
    ) -> PickerAccount:
        used: set[str] = set()
        decided: Counter[str] = Counter()
        ready, failed = 0, 0
        for sample in samples:
            match sample.name.removeprefix("llm_d_epp_"):
                case "plugin_duration_seconds_count":
                    if sample.labels["extension_point"] in ("Filter", "Scorer") and sample.value:
                        used.add(sample.labels["plugin_type"])
                case "scheduler_attempts_total" if sample.labels["status"] == "success":
                    name = sample.labels["endpoint_name"]
                    decided[servers.get(name, name)] += int(sample.value)
                case "scheduler_attempts_total":
                    failed += int(sample.value)
                case "ready_endpoints":
                    ready = int(sample.value)
        return PickerAccount({*_PROFILES[policy]}, used, decided, ready, failed)


def _config(policy: str, endpoints: Path) -> dict[str, Any]:
    source, extractor = "metrics-data-source", "core-metrics-extractor"
    types = [*_PROFILES[policy], *_PRODUCERS[policy], source, extractor]
    discovery = {"name": "endpoints", "type": "file-discovery"}
    profile = [
        {"pluginRef": name} | ({} if weight is None else {"weight": weight})
        for name, weight in _PROFILES[policy].items()
    ]
    return {
        "apiVersion": "llm-d.ai/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": [
            *({"type": plugin} for plugin in types),
            discovery | {"parameters": {"path": str(endpoints)}},
        ],
        "schedulingProfiles": [{"name": "default", "plugins": profile}],
        "dataLayer": {
            "discovery": {"pluginRef": "endpoints"},
            "sources": [{"pluginRef": source, "extractors": [{"pluginRef": extractor}]}],
        },
    }


# AIBrix names the policy in its log, which has a line for each request, but not in its metrics.
_DECIDED = re.compile(r'routing_strategy="?([\w-]+).*?target_pod_ip="?([\d.:]+)')
_NO_REDIS = "1"  # a port without Redis, or AIBrix would use a Redis of this machine


class AIBrix(PickerProduct):
    name = "aibrix"
    program = "gateway-plugins"
    policies = ("least-request", "least-latency", "prefix-cache")
    clusters: ClassVar[Mapping[str, str]] = {"gateway_ext_proc": "grpc", "gateway_http": "http"}

    def command(
        self, policy: str, model: str, servers: Servers, ports: Mapping[str, int], directory: Path
    ) -> tuple[list[str], dict[str, str]]:
        config = directory / "endpoints.yaml"
        served = {"name": model, "engine": "vllm", "endpoints": [*servers.values()]}
        config.write_text(yaml.safe_dump({"models": [served]}))
        options = {
            "endpoints-config": config,
            "grpc-bind-address": f"127.0.0.1:{ports['grpc']}",
            "http-bind-address": f"127.0.0.1:{ports['http']}",
        }
        words = [f"--{name}={value}" for name, value in options.items()]
        return ["--standalone", *words], {"ROUTING_ALGORITHM": policy, "REDIS_PORT": _NO_REDIS}

    def account(
        self, policy: str, samples: Iterable[Sample], log: str, servers: Servers
    ) -> PickerAccount:
        decisions = _DECIDED.findall(log)
        failed = [
            sample.value
            for sample in samples
            if sample.name == "gateway_request_model_fail_total"
            and sample.labels["status_code"].startswith("5")  # 499: the client has gone
        ]
        used = {strategy for strategy, _ in decisions}
        decided = Counter(address for _, address in decisions)
        return PickerAccount({policy}, used, decided, None, int(sum(failed)))
