"""A real Prometheus with the shipped scrape interval and alert rules."""

import shutil
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from extproc.lab.harness.processes import Process, ProcessError, answers, free_port
from extproc.lab.harness.stack import Stack

_SHIPPED = Path(__file__).parents[2] / "docs" / "observability"
RULES = _SHIPPED / "rules.yaml"


class Prometheus:
    """Prometheus that scrapes a stack, with an empty database at its start."""

    def __init__(self, process: Process, url: str, session: aiohttp.ClientSession) -> None:
        self._process = process
        self._url = url
        self._session = session

    @classmethod
    async def start(
        cls, stack: Stack, directory: Path, session: aiohttp.ClientSession
    ) -> "Prometheus":
        """Start the program and return once it is ready.

        Raises:
            ProcessError: Prometheus is not installed, or did not start.
        """
        if (program := shutil.which("prometheus")) is None:
            raise ProcessError("no prometheus found: install it (apt install prometheus)")
        file = _write_configuration(stack, directory)
        url = f"http://127.0.0.1:{free_port()}"
        argv = [
            program,
            f"--config.file={file}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address={url.removeprefix('http://')}",
        ]
        log, ready = directory / "prometheus.log", answers(f"{url}/-/ready")
        process = await Process.start("prometheus", argv, log=log, ready=ready)
        return cls(process, url, session)

    async def stop(self) -> None:
        await self._process.stop()

    async def holds(self, expression: str) -> bool:
        """Return True if the PromQL expression has a result now."""
        return bool((await self._get("query", query=expression))["result"])

    async def firing(self) -> dict[str, str]:
        """Return the summary of each alert that fires now, by name."""
        return {
            alert["labels"]["alertname"]: alert["annotations"]["summary"]
            for alert in (await self._get("alerts"))["alerts"]
            if alert["state"] == "firing"
        }

    async def _get(self, path: str, **query: str) -> Any:
        async with self._session.get(f"{self._url}/api/v1/{path}", params=query) as response:
            return (await response.json())["data"]


def _write_configuration(stack: Stack, directory: Path) -> Path:
    """Write the shipped configuration with the addresses of the stack; return its file."""
    config = yaml.safe_load((_SHIPPED / "prometheus.yml").read_text(encoding="utf-8"))
    config["rule_files"] = [str(RULES)]
    targets = {
        "router": [stack.address(f"{name}-admin") for name in stack.routers],
        "poller": [stack.address(f"{name}-admin") for name in stack.pollers],
        "envoy": [stack.address("envoy-admin")],
    }
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": targets[job["job_name"]]}]
    directory.mkdir(parents=True)
    file = directory / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    return file


def longest_s(alert: str) -> float:
    """Return the ``for`` of a shipped alert, in seconds."""
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            if rule["alert"] == alert:
                number, unit = float(rule["for"][:-1]), rule["for"][-1]
                return number * {"s": 1.0, "m": 60.0}[unit]
    raise LookupError(alert)
