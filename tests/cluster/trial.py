"""Trial of the chart in a cluster: changes and failures under load, and what requests lose.

    KUBECONFIG=… python -m tests.cluster.trial --image REPOSITORY:TAG

Needs `kubectl` and `helm` on PATH, a cluster whose nodes have the images or can pull them, 2 cores
and 4 GiB, and clocks that agree within a tenth of a second. Works in the namespace `extproc-trial`
(or `$TRIAL_NAMESPACE`), which it makes and removes. `--api-server-kill COMMAND` is a shell command
that kills the API server; without it that step is not run. With `--inference-pool`, for which the
cluster needs the definition of InferencePools, pollers find the fast replicas through such a pool.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
CHART = HERE.parents[1] / "docs" / "helm"
NAMESPACE = os.environ.get("TRIAL_NAMESPACE", "extproc-trial")
_AFTER_S = 10.0  # load after each step, in which late consequences show


def kubectl(*arguments: str, check: bool = True, stdin: str | None = None) -> str:
    command = ["kubectl", "--namespace", NAMESPACE, *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, input=stdin)
    if check and done.returncode:
        sys.exit(f"trial: {' '.join(command)}: {done.stderr}")
    return done.stdout


@dataclass
class Log:
    """Lines of JSON of a container, read until it ends."""

    pod: str
    namespace: str = NAMESPACE
    lines: list[dict[str, Any]] = field(default_factory=list)

    def follow(self) -> None:
        command = ["kubectl", "--namespace", self.namespace, "logs", "--follow", self.pod]
        while True:  # the API server may be killed: read again from where the log broke off
            since = ["--since=30s"] if self.lines else []
            process = subprocess.Popen(
                [*command, *since], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    self.lines.append(json.loads(line))
            process.wait()
            found = subprocess.run(
                ["kubectl", "--namespace", self.namespace, "get", "pod", self.pod,
                 "--ignore-not-found"],
                check=False, capture_output=True,
            )  # fmt: skip
            if not found.returncode and not found.stdout:
                return
            time.sleep(0.5)


class Logs:
    """Requests in the logs of the load and of Envoy."""

    def __init__(self, envoys: str, namespace: str = NAMESPACE) -> None:
        self._load = Log("load")
        self._selector = [f"--namespace={namespace}", f"--selector={envoys}"]
        self._namespace = namespace
        self._envoys: dict[str, Log] = {}
        threading.Thread(target=self._load.follow, daemon=True).start()
        threading.Thread(target=self._find_envoys, daemon=True).start()

    def _find_envoys(self) -> None:
        while True:
            found = kubectl("get", "pods", *self._selector, "--output=name", check=False)
            for name in found.split():
                if name not in self._envoys:
                    log = self._envoys[name] = Log(name.removeprefix("pod/"), self._namespace)
                    threading.Thread(target=log.follow, daemon=True).start()
            time.sleep(0.5)

    def requests(self, begin_s: float, end_s: float) -> list[dict[str, Any]]:
        """Ended requests that began in this time, each with Envoy's entry as `envoy`."""
        entries = {line["request"]: line for log in self._envoys.values() for line in [*log.lines]}
        ended = {line["id"]: line for line in self._load.lines}
        found = (line for line in ended.values() if begin_s <= line["at"] < end_s)
        return [line | {"envoy": entries.get(line["id"])} for line in found]


@dataclass(frozen=True)
class TrialStep:
    name: str
    act: Callable[[], object]


@dataclass(frozen=True)
class Outcome:
    """Requests of a step, and which of them failed or went unrouted."""

    name: str
    requests: list[dict[str, Any]]

    @property
    def failed(self) -> list[dict[str, Any]]:
        return [item for item in self.requests if item["status"] != 200 or item["error"]]

    @property
    def unrouted(self) -> list[dict[str, Any]]:
        return [item for item in self.requests if item["envoy"] and not item["envoy"]["choice"]]

    @property
    def elsewhere(self) -> int:
        """Number of routed requests that another replica than the first choice served."""
        logged = (item["envoy"] for item in self.requests if item["envoy"])
        choices = ((entry["choice"], entry["upstream"]) for entry in logged if entry["choice"])
        return sum(choice.split(",")[0] != upstream for choice, upstream in choices)

    @property
    def unrouted_s(self) -> float:
        """Longest time from an unrouted request to the last before a routed request."""
        longest = 0.0
        first: float | None = None
        missed = {item["id"] for item in self.unrouted}
        for item in sorted(self.requests, key=lambda item: float(item["at"])):
            if item["id"] not in missed:
                first = None
            else:
                first = item["at"] if first is None else first
                longest = max(longest, item["at"] - first)
        return longest

    def row(self) -> str:
        logged = sum(item["envoy"] is not None for item in self.requests)
        cells = (len(self.requests), logged, len(self.failed), len(self.unrouted))
        numbers = " | ".join(map(str, cells))
        return f"| {self.name} | {numbers} | {self.unrouted_s:.1f} | {self.elsewhere} |"


class Trial:
    def __init__(
        self, image: str, redis: str, rate: float, api_server_kill: str, pool: bool
    ) -> None:
        repository, _, tag = image.rpartition(":")
        self._set = ["--set", f"image.repository={repository},image.tag={tag}"]
        self._parts = (HERE / "parts.yaml").read_text(encoding="utf-8")
        for name, value in (("REDIS_IMAGE", redis), ("IMAGE", image), ("RATE", str(rate))):
            self._parts = self._parts.replace(name, value)
        self._api_server_kill = api_server_kill
        self._pool = (HERE / "pool.yaml").read_text(encoding="utf-8") if pool else ""
        if pool:
            (fast, slow) = yaml.safe_load((HERE / "values.yaml").read_text())["replicas"]
            sources = [fast | {"kubernetes": {"inference_pool": "vllm"}}, slow]
            self._set += ["--set-json", f"replicas={json.dumps(sources)}"]

    def helm(self, command: str, *more: str, check: bool = True) -> None:
        values = (
            ["--values", str(HERE / "values.yaml"), *self._set] if command != "rollback" else []
        )
        chart = [str(CHART)] if command != "rollback" else []
        arguments = ["helm", "--namespace", NAMESPACE, command, "extproc", *chart, *values, *more]
        done = subprocess.run(arguments, check=False, capture_output=True, text=True)
        if check and done.returncode:
            sys.exit(f"trial: {' '.join(arguments)}: {done.stderr}")

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Installs parts, chart and load, until the block ends."""
        kubectl("create", "namespace", NAMESPACE)
        try:
            load = f"--from-file=load.py={HERE / 'load.py'}"
            kubectl("create", "configmap", "load", load)
            without_load, load_pod = self._parts.rsplit("---\n", 1)
            kubectl("apply", "--filename=-", stdin=without_load)
            if self._pool:
                self.put_pool()
            for name in ("vllm-fast", "vllm-slow", "redis"):
                self.rolled_out(name)
            self.helm("install", "--wait", "--timeout=3m")
            self.connect()
            kubectl("apply", "--filename=-", stdin=load_pod)
            kubectl("wait", "--for=condition=Ready", "pod/load", "--timeout=60s")
            yield
        finally:
            subprocess.run(
                ["helm", "--namespace", NAMESPACE, "uninstall", "extproc"],
                check=False, capture_output=True,
            )  # fmt: skip
            kubectl("delete", "namespace", NAMESPACE, "--wait=false", check=False)

    def connect(self) -> None:
        """Applies the resources that lead requests to the replicas, if the chart has none."""

    def logs(self) -> Logs:
        return Logs("app.kubernetes.io/component=envoy")

    def steady_and_replicas(self) -> Iterator[TrialStep]:
        yield TrialStep("steady", lambda: time.sleep(15))
        yield TrialStep("scale fast replicas 2 → 4", lambda: self.scale("vllm-fast", 4))
        yield TrialStep("scale fast replicas 4 → 1", lambda: self.scale("vllm-fast", 1))
        yield TrialStep("scale fast replicas 1 → 2", lambda: self.scale("vllm-fast", 2))
        yield TrialStep("roll fast replicas", lambda: self.restart("vllm-fast"))

    def steps(self) -> Iterator[TrialStep]:
        yield from self.steady_and_replicas()
        yield TrialStep("delete a replica", lambda: self.delete("app=vllm,gpu=fast"))
        if self._pool:
            yield TrialStep("delete the pool, make it again", self.remake_pool)
            yield TrialStep("pool without pods, and again with", self.empty_pool)
        yield TrialStep("roll routers", lambda: self.restart("extproc-router"))
        yield TrialStep("kill a router", lambda: self.kill("component=router"))
        yield TrialStep("kill both routers", lambda: self.kill("component=router", 2))
        yield TrialStep("kill both pollers", lambda: self.kill("component=poller", 2))
        yield TrialStep("kill both eds", lambda: self.kill("component=eds", 2))
        yield TrialStep("kill Redis", lambda: self.kill("app=redis"))
        if self._api_server_kill:
            yield TrialStep("kill the API server", self.kill_api_server)
        yield TrialStep("upgrade routers and Envoy", lambda: self.upgrade(max_streams=10_000))
        yield TrialStep("roll back", lambda: self.helm("rollback", "--wait", "--timeout=4m"))
        yield TrialStep("stuck upgrade", self.stuck_upgrade)
        yield TrialStep("roll replicas in it", lambda: self.restart("vllm-fast"))
        yield TrialStep("roll the stuck upgrade back", lambda: self.helm("rollback", "--wait"))
        yield TrialStep("kill a replica without grace", lambda: self.kill("app=vllm,gpu=fast"))
        yield TrialStep("roll replicas to pods without preStop", self.drop_pre_stop)
        yield TrialStep("roll pods without preStop", lambda: self.restart("vllm-fast"))

    def rolled_out(self, deployment: str) -> None:
        kubectl("rollout", "status", f"deployment/{deployment}", "--timeout=4m")

    def restart(self, deployment: str) -> None:
        kubectl("rollout", "restart", f"deployment/{deployment}")
        self.rolled_out(deployment)

    def drop_pre_stop(self) -> None:
        path = "/spec/template/spec/containers/0/lifecycle"
        patch = json.dumps([{"op": "remove", "path": path}])
        kubectl("patch", "deployment/vllm-fast", "--type=json", f"--patch={patch}")
        self.rolled_out("vllm-fast")

    def scale(self, deployment: str, replicas: int) -> None:
        kubectl("scale", f"deployment/{deployment}", f"--replicas={replicas}")
        self.rolled_out(deployment)
        time.sleep(15 if deployment.startswith("vllm") else 0)  # preStop of those that end

    def pods(self, selector: str) -> list[str]:
        """Pods that are not about to end."""
        label = selector.replace("component=", "app.kubernetes.io/component=")
        stays = "{{if not .metadata.deletionTimestamp}}pod/{{.metadata.name}} {{end}}"
        template = f"--output=go-template={{{{range .items}}}}{stays}{{{{end}}}}"
        return kubectl("get", "pods", f"--selector={label}", template).split()

    def delete(self, selector: str) -> None:
        kubectl("delete", self.pods(selector)[0])

    def kill(self, selector: str, number: int = 1) -> None:
        kubectl("delete", *self.pods(selector)[:number], "--force", "--grace-period=0")

    def put_pool(self, **labels: str) -> None:
        pool = yaml.safe_load(self._pool)
        pool["spec"]["selector"]["matchLabels"] |= labels
        kubectl("apply", "--filename=-", stdin=json.dumps(pool))

    def remake_pool(self) -> None:
        kubectl("delete", "inferencepool/vllm")
        time.sleep(5)
        self.put_pool()

    def empty_pool(self) -> None:
        self.put_pool(gpu="none")
        time.sleep(5)
        self.put_pool()

    def kill_api_server(self) -> None:
        subprocess.run(["sh", "-c", self._api_server_kill], check=True)
        time.sleep(15)

    def upgrade(self, max_streams: int) -> None:
        changed = f"config.serve.max_streams={max_streams},envoy.requestHeaders={{x-trial}}"
        self.helm("upgrade", "--set", changed, "--wait", "--timeout=4m")

    def stuck_upgrade(self) -> None:
        """Upgrades to routers that cannot reach Redis and never get ready."""
        self.helm("upgrade", "--set", "redis.url=redis://nowhere:6379/0", "--wait",
                  "--timeout=25s", check=False)  # fmt: skip

    def run(self, only: Sequence[str]) -> list[Outcome]:
        with self.installed():
            logs = self.logs()
            time.sleep(_AFTER_S)
            spans: list[tuple[str, float, float]] = []
            for step in self.steps():
                if only and not any(word in step.name for word in only):
                    continue
                began_s = time.time()
                step.act()
                time.sleep(_AFTER_S)
                spans.append((step.name, began_s, time.time()))
                print(f"{step.name}: {spans[-1][2] - began_s:.0f} s", file=sys.stderr, flush=True)
            time.sleep(_AFTER_S)  # the last requests end
            return [Outcome(name, logs.requests(begin, end)) for name, begin, end in spans]


def trial_parser(module: str, about: str | None) -> argparse.ArgumentParser:
    """Returns a parser of the arguments that all trials have."""
    parser = argparse.ArgumentParser(description=about, prog=f"python -m {module}")
    parser.add_argument("--image", required=True, help="image of extproc, REPOSITORY:TAG")
    parser.add_argument("--redis", default="redis:7", help="image of Redis")
    parser.add_argument("--rate", type=float, default=6.0, help="requests per second")
    parser.add_argument("steps", nargs="*", help="only the steps whose names have these words")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Returns the arguments; ends the program if they are wrong or no cluster is named."""
    args = parser.parse_args()
    if not os.environ.get("KUBECONFIG"):
        parser.error("KUBECONFIG names no cluster")
    return args


def main() -> int:
    parser = trial_parser("tests.cluster.trial", __doc__)
    parser.add_argument("--api-server-kill", default="", metavar="COMMAND")
    pool = "find replicas through an InferencePool"
    parser.add_argument("--inference-pool", action="store_true", help=pool)
    args = parsed(parser)
    trial = Trial(args.image, args.redis, args.rate, args.api_server_kill, pool=args.inference_pool)
    return report(trial.run(args.steps))


def report(outcomes: Sequence[Outcome]) -> int:
    whole = Outcome("all", [item for outcome in outcomes for item in outcome.requests])
    print("| step | requests | in Envoy's log | failed | unrouted | for at most, s | elsewhere |")
    print("|---|---|---|---|---|---|---|")
    print("\n".join(outcome.row() for outcome in (*outcomes, whole)))
    for outcome in outcomes:
        for item in outcome.failed:
            print(f"failed, {outcome.name}: {json.dumps(item)}")
    return 0 if outcomes else 1


if __name__ == "__main__":
    sys.exit(main())
