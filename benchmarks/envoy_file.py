"""The project's Envoy file, changed for a measurement."""

from extproc.lab.harness.envoy_config import Bootstrap, manager_of

_ASKING = ("local_ratelimit", "set_filter_state", "ext_proc", "buffer")


def drop_ext_proc(bootstrap: Bootstrap) -> None:
    """From now on it asks no router, and holds nothing back for its answer."""
    filters = manager_of(bootstrap)["http_filters"]
    filters[:] = [one for one in filters if one["name"].rpartition(".")[2] not in _ASKING]
