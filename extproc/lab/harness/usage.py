"""CPU time and memory that a process uses."""

import os
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used so far (Linux)."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) * _TICK_S


def memory_kb(pid: int) -> float:
    """Return the resident memory of a process in kB (Linux)."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
    return float(line.split()[1])
