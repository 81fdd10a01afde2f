"""What there is to say about the files that list replicas."""

from extproc.config import Config
from extproc.envoy.finding import Finding, Level
from extproc.poll.discovery import read_replicas

_UNUSABLE = "cannot be used: {}: none of its replicas is polled. Put it right, or replicas_file"


def check_replicas_files(config: Config) -> list[Finding]:
    """An error for each that cannot be used now; pollers and routers wait for it to come."""
    found = []
    for path in (pool.replicas_file for pool in config.each_pool):
        try:
            if path is not None:
                read_replicas(path)
        except (OSError, ValueError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            where = f"replicas_file {path}"
            found.append(Finding("replicas", Level.ERROR, where, _UNUSABLE.format(reason)))
    return found
