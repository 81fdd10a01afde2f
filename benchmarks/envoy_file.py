"""The project's Envoy file, changed for a measurement; as the tree that YAML makes of it."""

from typing import Any

_ASKING = ("local_ratelimit", "set_filter_state", "ext_proc", "buffer")


def manager(bootstrap: Any) -> Any:
    """What the file says of HTTP connections."""
    (listener,) = bootstrap["static_resources"]["listeners"]
    return listener["filter_chains"][0]["filters"][0]["typed_config"]


def drop_ext_proc(bootstrap: Any) -> None:
    """From now on it asks no router, and holds nothing back for its answer."""
    filters = manager(bootstrap)["http_filters"]
    filters[:] = [one for one in filters if one["name"].rpartition(".")[2] not in _ASKING]
