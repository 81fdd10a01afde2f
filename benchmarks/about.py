"""What a benchmark's result says of how it came about."""

import os
import platform
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any


def about(module: str, argv: Sequence[str]) -> dict[str, Any]:
    """The command, the date (UTC), the machine and the versions."""
    return {
        "command": shlex.join(["python", "-m", module, *argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{_cpu()}, {_cores()} cores, {platform.system()} {platform.release()}",
        "versions": {"python": platform.python_version(), "extproc": version("extproc")},
    }


def _cpu() -> str:
    """The processor's name where the system tells it (Linux), else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1
