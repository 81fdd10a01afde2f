"""AIBrix's gateway, the program ``gateway-plugins``; it runs alone, without its Redis."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar

import yaml
from prometheus_client.samples import Sample

from benchmarks.compare.contenders import Servers
from benchmarks.compare.pickers import Account, Product

# A line of its log for each request: its metrics do not name policies.
_DECIDED = re.compile(r'routing_strategy="?([\w-]+).*?target_pod_ip="?([\d.:]+)')
_NOBODY = "1"  # a port without Redis: it would use one that happens to run on this machine


class AIBrix(Product):
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
        return ["--standalone", *words], {"ROUTING_ALGORITHM": policy, "REDIS_PORT": _NOBODY}

    def account(
        self, policy: str, samples: Iterable[Sample], log: str, servers: Servers
    ) -> Account:
        made = _DECIDED.findall(log)
        failed = [
            one.value
            for one in samples
            if one.name == "gateway_request_model_fail_total"
            and one.labels["status_code"].startswith("5")  # 499: the client has gone
        ]
        used = {strategy for strategy, _ in made}
        decided = Counter(address for _, address in made)
        return Account({policy}, used, decided, None, int(sum(failed)))
