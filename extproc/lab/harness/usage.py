"""Usage of the machine by processes: CPU, memory and open files."""

import os
import resource
from contextlib import suppress
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_FILES = 10_240  # open files where the limit is infinite: macOS refuses more


def cpu_s(pid: int) -> float:
    """Return the seconds of CPU that a process has used (Linux)."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) * _TICK_S


def memory_kb(pid: int) -> float:
    """Return the resident memory of a process (Linux)."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
    return float(line.split()[1])


def allow_many_connections() -> None:
    """Raise the limit of open files: each request in flight needs a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    files = max(soft, _FILES) if hard == resource.RLIM_INFINITY else hard
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
