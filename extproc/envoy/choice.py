"""The ways in which a cluster can follow the router's choice."""

from envoy_data_plane.envoy.config.cluster.v3 import Cluster
from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host.v3 import OverrideHost
from envoy_data_plane.envoy.type.metadata.v3 import MetadataKey

from extproc.proxy.messages import DESTINATION, METADATA_NAMESPACE


def is_destination(cluster: Cluster) -> bool:
    """Whether it goes to any address that metadata or a header names (ORIGINAL_DST)."""
    config = cluster.original_dst_lb_config
    return config is not None and (config.use_http_header or _is_choice(config.metadata_key))


def follows_header(cluster: Cluster) -> bool:
    """Whether it goes to any address that a header names, a client's as well."""
    config = cluster.original_dst_lb_config
    return config is not None and config.use_http_header


def reads_header(policy: OverrideHost) -> bool:
    """Whether the policy takes the choice from the header."""
    return any(source.header.lower() == DESTINATION for source in policy.override_host_sources)


def reads_metadata(policy: OverrideHost) -> bool:
    """Whether the policy takes the choice from metadata."""
    keys = (source.metadata for source in policy.override_host_sources)
    return any(key and key.key == METADATA_NAMESPACE for key in keys)


def _is_choice(key: MetadataKey | None) -> bool:
    if key is None or key.key != METADATA_NAMESPACE:
        return False
    return [part.key for part in key.path] == [DESTINATION]
