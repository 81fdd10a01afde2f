"""Whether Envoy and the router speak alike: both TLS, or both plain text."""

from envoy_data_plane.envoy.config.cluster.v3 import Cluster

from extproc.check.envoy_file import EnvoyFile
from extproc.check.finding import Finding, Level
from extproc.config import ServeSettings

_NAME = "transport_fits"
_TLS = "envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"


def transport_fits(file: EnvoyFile, serve: ServeSettings) -> list[Finding]:
    """One finding for each router cluster that would not get a connection.

    One that chooses its transport by the member, as meshes let it, is not judged. Nothing where
    both speak plain text.
    """
    tls = serve.tls_cert is not None
    clusters = [one for one in file.router_clusters if not one.message.transport_socket_matches]
    unlike = [part for part in clusters if _speaks_tls(part.message) is not tls]
    if unlike:
        text = _NO_TLS if tls else _TLS_ALONE
        return [
            Finding(_NAME, Level.WARNING, part.where, text.format(part.message.name))
            for part in unlike
        ]
    return (
        [Finding(_NAME, Level.OK, "", "Envoy and the router speak TLS.")]
        if clusters and tls
        else []
    )


_NO_TLS = (
    "cluster {!r} speaks plain text, and the router TLS (serve.tls_cert): no request would reach "
    "it. Give the cluster a transport_socket (docs/envoy.md, TLS to the router)"
)
_TLS_ALONE = (
    "cluster {!r} speaks TLS, and the router as it is configured here plain text: no request "
    "would reach it. Set serve.tls_cert and serve.tls_key, or name their file with --config"
)


def _speaks_tls(cluster: Cluster) -> bool:
    socket = cluster.transport_socket
    config = socket.typed_config if socket else None
    return config is not None and config.type_url.endswith(f"/{_TLS}")
