"""Trial of ``envoy/envoy_gateway.yaml`` behind Envoy Gateway: changes and failures under load.

    KUBECONFIG=… python -m tests.cluster.envoy_gateway --image REPOSITORY:TAG

Needs what `trial.py` needs, and Envoy Gateway in the namespace `envoy-gateway-system`. The chart is
installed without its Envoy. `--signal COMMAND` is a shell command that sends a signal to a
container: it gets the name of the signal as `$1` and the container's id as `$2`. Without it, the
step with a hanging router is not run.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import yaml

from tests.cluster.trial import (
    HERE,
    Logs,
    Trial,
    TrialStep,
    kubectl,
    parsed,
    report,
    trial_parser,
)

_FILE = HERE.parents[1] / "envoy" / "envoy_gateway.yaml"
_SYSTEM = "envoy-gateway-system"
_ENVOYS = "gateway.envoyproxy.io/owning-gateway-name=eg"
_PEERS = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": _SYSTEM}}}]


class GatewayTrial(Trial):
    def __init__(self, image: str, redis: str, envoy: str, rate: float, signal: str) -> None:
        super().__init__(image, redis, rate, api_server_kill="", pool=False)
        self._parts = self._parts.replace("//extproc-envoy/", f"//extproc-envoy.{_SYSTEM}/")
        self._gateway = (HERE / "gateway.yaml").read_text(encoding="utf-8")
        self._gateway = self._gateway.replace("ENVOY_IMAGE", envoy)
        self._set += ["--set", "envoy.enabled=false"]
        self._set += ["--set-json", f"networkPolicy.gateway={json.dumps(_PEERS)}"]
        self._signal = signal

    def connect(self) -> None:
        """Applies a Gateway, and the file with the names of the trial's Services."""
        kubectl("apply", "--filename=-", stdin=self._gateway)
        resources = list(yaml.safe_load_all(_FILE.read_text(encoding="utf-8")))
        route, *_, extension = (resource["spec"] for resource in resources)
        route["rules"][0]["backendRefs"][0]["name"] = "replicas"
        extension["extProc"][0]["backendRefs"][0]["name"] = "extproc-router"
        kubectl("apply", "--filename=-", stdin=yaml.safe_dump_all(resources))
        kubectl("wait", "--for=condition=Programmed", "gateway/eg", "--timeout=2m")

    @contextmanager
    def installed(self) -> Iterator[None]:
        try:
            with super().installed():
                yield
        finally:
            kubectl("delete", "gatewayclass/eg", "--wait=false", check=False)

    def logs(self) -> Logs:
        return Logs(_ENVOYS, _SYSTEM)

    def steps(self) -> Iterator[TrialStep]:
        yield from self.steady_and_replicas()
        yield TrialStep("drain a replica, and undrain", self.drain)
        yield TrialStep("delete a replica", lambda: self.delete("app=vllm,gpu=fast"))
        yield TrialStep("kill a replica without grace", lambda: self.kill("app=vllm,gpu=fast"))
        yield TrialStep("roll routers", lambda: self.restart("extproc-router"))
        yield TrialStep("kill a router", lambda: self.kill("component=router"))
        if self._signal:
            yield TrialStep("hang a router for 10 s", self.hang)
        yield TrialStep("no router for 15 s", self.without_routers)
        yield TrialStep("kill Redis", lambda: self.kill("app=redis"))
        yield TrialStep("restart the controller", self.restart_controller)
        yield TrialStep("change policies", self.change_policies)
        yield TrialStep("roll Envoy", self.roll_envoy)

    def drain(self) -> None:
        name = self.pods("app=vllm,gpu=fast")[0].removeprefix("pod/")
        command = ("exec", "deploy/extproc-router", "--", "extproc", "replicas")
        kubectl(*command, "drain", name)
        time.sleep(10)
        kubectl(*command, "undrain", name)

    def without_routers(self) -> None:
        routers = self.pods("component=router")
        kubectl("scale", "deployment/extproc-router", "--replicas=0")
        kubectl("delete", *routers, "--force", "--grace-period=0", "--ignore-not-found")
        time.sleep(15)
        self.scale("extproc-router", 2)

    def hang(self) -> None:
        pod = self.pods("component=router")[0]
        path = "--output=jsonpath={.status.containerStatuses[0].containerID}"
        container = kubectl("get", pod, path).removeprefix("containerd://")
        for signal in ("STOP", "CONT"):
            subprocess.run(["sh", "-c", self._signal, "sh", signal, container], check=True)
            time.sleep(10)

    def restart_controller(self) -> None:
        for action in ("restart", "status"):
            kubectl(f"--namespace={_SYSTEM}", "rollout", action, "deployment/envoy-gateway")

    def change_policies(self) -> None:
        for tries in (2, 1):
            patch = json.dumps({"spec": {"retry": {"numRetries": tries}}})
            kubectl("patch", "backendtrafficpolicy/vllm", "--type=merge", f"--patch={patch}")
            path = "/spec/extProc/0/messageTimeout"
            timeout = json.dumps([{"op": "replace", "path": path, "value": f"{tries}s"}])
            kubectl("patch", "envoyextensionpolicy/vllm", "--type=json", f"--patch={timeout}")
            time.sleep(10)

    def roll_envoy(self) -> None:
        pod = {"annotations": {"trial": "rolled"}}
        deployment = {"provider": {"kubernetes": {"envoyDeployment": {"pod": pod}}}}
        patch = json.dumps({"spec": deployment})
        kubectl("patch", "envoyproxy/eg", "--type=merge", f"--patch={patch}")
        time.sleep(5)
        (name,) = kubectl(f"--namespace={_SYSTEM}", "get", "deployments", f"--selector={_ENVOYS}",
                          "--output=name").split()  # fmt: skip
        kubectl(f"--namespace={_SYSTEM}", "rollout", "status", name, "--timeout=4m")


def main() -> int:
    parser = trial_parser("tests.cluster.envoy_gateway", __doc__)
    parser.add_argument("--envoy", default="envoyproxy/envoy:v1.40-latest", help="image of Envoy")
    parser.add_argument("--signal", default="", metavar="COMMAND")
    args = parsed(parser)
    trial = GatewayTrial(args.image, args.redis, args.envoy, args.rate, args.signal)
    return report(trial.run(args.steps))


if __name__ == "__main__":
    sys.exit(main())
