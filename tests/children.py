"""Worker processes, found from outside."""

import subprocess


def worker_pid(supervisor: int, number: int) -> int:
    """Process id of a running worker of that supervisor."""
    listed = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    )
    processes = (line.split(maxsplit=2) for line in listed.stdout.splitlines())
    (pid,) = (
        int(pid)
        for pid, parent, arguments in processes
        if int(parent) == supervisor and arguments.endswith(f"extproc.proxy.worker {number}")
    )
    return pid
