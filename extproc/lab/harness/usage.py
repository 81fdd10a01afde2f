"""Usage of the machine by processes: CPU and memory."""

import os
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Return the seconds of CPU that a process has used (Linux)."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) * _TICK_S


def memory_kb(pid: int) -> float:
    """Return the resident memory of a process (Linux)."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
    return float(line.split()[1])
