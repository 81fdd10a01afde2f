"""What the system lets a process have."""

import resource
from contextlib import suppress

_FILES = 10_240  # asked for where a process may have any number: more is refused on macOS


def allow_many_connections() -> None:
    """Each request in flight is an open file; as many as the system lets this process have."""
    few, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if few == resource.RLIM_INFINITY:
        return
    files = max(few, _FILES) if most == resource.RLIM_INFINITY else most
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
