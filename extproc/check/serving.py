"""Rules for what Envoy must know of the routers, by how each is configured."""

from collections import defaultdict
from datetime import timedelta

from envoy_data_plane.envoy.config.cluster.v3 import Cluster
from envoy_data_plane.envoy.config.endpoint.v3 import Endpoint
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import ExternalProcessor
from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host.v3 import OverrideHost
from envoy_data_plane.envoy.extensions.transport_sockets.tls.v3 import UpstreamTlsContext

from extproc.check.envoy_file import EnvoyFile
from extproc.check.rules import Rule, bodies_first, is_full_duplex, receiving, skips_responses
from extproc.config import Config
from extproc.envoy.file import Part
from extproc.envoy.finding import Level
from extproc.server.messages import TOLD_NAMESPACE, UNSEEN, expression_of

_NO_TLS = (
    "cluster {!r} speaks plain text, and the router TLS (serve.tls_cert): no request would reach "
    "it. Give the cluster a transport_socket (docs/envoy.md, TLS to the router)"
)
_TLS_ALONE = (
    "cluster {!r} speaks TLS, and the router as it is configured here plain text: no request "
    "would reach it. Set serve.tls_cert and serve.tls_key, or name their file with --config"
)
_WORKERS = (
    "cluster {!r} lists {} of {} workers (serve.workers): the others get no request. "
    "List the ports {} to {}, each as an endpoint"
)
_UNTOLD = (
    "request_header_mode is SKIP and request_attributes lacks headers that the router's settings "
    "name, so that they have no effect. Add {}"
)
_DROPPED = (
    "what the router tells of its decisions (serve.decision_metadata) is dropped. Add "
    f"{TOLD_NAMESPACE} to metadata_options.receiving_namespaces.untyped"
)
_ONE_ALONE = (
    "cluster {!r} takes one address, and the router as it is configured here names two: no request "
    "would go where it says. Set serve.second_choice: false, or name the file that does with "
    "--config"
)
_UNSEEN = (
    "response_header_mode is SKIP, and with route.answer_asked_name the router needs every answer: "
    "these have the replica's name. Leave out the filters local_ratelimit and set_filter_state, "
    f"and this route, which matches their mark {UNSEEN}"
)
_IMPATIENT = (
    "max_message_timeout is {:g} s: where replicas are full, requests do not wait at the router "
    "but in the replicas, which compute some of them twice. Write max_message_timeout: {:g}s "
    "(hold.longest_s)"
)


def rules_for(config: Config) -> list[Rule]:
    """What should hold beside a router with this configuration."""
    serve = config.serve
    wanted = sorted(map(expression_of, config.headers))

    def skipping(file: EnvoyFile) -> list[Part[ExternalProcessor]]:
        return bodies_first(file) if wanted else []

    def tells(part: Part[ExternalProcessor], file: EnvoyFile) -> str | None:
        missing = [one for one in wanted if one not in part.message.request_attributes]
        return _UNTOLD.format(", ".join(missing)) if missing else None

    def naming(file: EnvoyFile) -> list[Part[ExternalProcessor]]:
        return file.filters if config.route.answer_asked_name else []

    def shows_answers(part: Part[ExternalProcessor], file: EnvoyFile) -> str | None:
        return _UNSEEN if skips_responses(part) else None

    def taking_one(file: EnvoyFile) -> list[Part[Cluster]]:
        """Clusters that take no list."""
        return [one for one in file.replica_clusters if not file.all(OverrideHost, within=one)]

    def gets_one(part: Part[Cluster], file: EnvoyFile) -> str | None:
        return _ONE_ALONE.format(part.message.name) if serve.second_choice else None

    longest_s = config.hold.longest_s

    def timing(file: EnvoyFile) -> list[Part[ExternalProcessor]]:
        """Filters in which Envoy counts the time that requests wait for the router."""
        return [one for one in file.filters if longest_s and not is_full_duplex(one)]

    def waits_for_room(part: Part[ExternalProcessor], file: EnvoyFile) -> str | None:
        allowed = (part.message.max_message_timeout or timedelta()).total_seconds()
        return None if allowed >= longest_s else _IMPATIENT.format(allowed, longest_s)

    tls = serve.tls_cert is not None

    def listing(file: EnvoyFile) -> list[Part[Cluster]]:
        """Clusters that list their members, where a router is several processes."""
        clusters = file.router_clusters if serve.workers > 1 else []
        return [part for part in clusters if _ports(part, file)]

    def lists_workers(part: Part[Cluster], file: EnvoyFile) -> str | None:
        ports = min(_ports(part, file), key=len)
        if len(ports) >= serve.workers:
            return None
        first, name = min(ports), part.message.name
        return _WORKERS.format(name, len(ports), serve.workers, first, first + serve.workers - 1)

    def speaking(file: EnvoyFile) -> list[Part[Cluster]]:
        """Clusters of which one end speaks TLS, but for those whose members choose the
        transport, as meshes let them."""
        clusters = [one for one in file.router_clusters if not one.message.transport_socket_matches]
        return [part for part in clusters if tls or file.all(UpstreamTlsContext, within=part)]

    def speaks_alike(part: Part[Cluster], file: EnvoyFile) -> str | None:
        if bool(file.all(UpstreamTlsContext, within=part)) is tls:
            return None
        return (_NO_TLS if tls else _TLS_ALONE).format(part.message.name)

    def telling(file: EnvoyFile) -> list[Part[ExternalProcessor]]:
        return file.filters if serve.decision_metadata else []

    def takes_metadata(part: Part[ExternalProcessor], file: EnvoyFile) -> str | None:
        return None if TOLD_NAMESPACE in receiving(part.message) else _DROPPED

    taken = "Envoy takes what the router tells of decisions, for serve.decision_metadata."
    all_listed = f"All {serve.workers} workers of the router are listed."
    alike = "Envoy and the router speak TLS."
    room = "A request may wait at the router while every replica is full."
    one = "The router names one replica alone to a cluster that takes no list."
    shown = "The router is shown every answer, for route.answer_asked_name."
    told = "The router hears the headers that its settings name."
    return [
        Rule("workers_are_listed", all_listed, Level.WARNING, listing, lists_workers),
        Rule("transport_fits", alike, Level.WARNING, speaking, speaks_alike),
        Rule("every_answer_is_shown", shown, Level.ERROR, naming, shows_answers),
        Rule("waits_for_room", room, Level.WARNING, timing, waits_for_room),
        Rule("one_replica_is_named", one, Level.ERROR, taking_one, gets_one),
        Rule("decision_metadata_is_taken", taken, Level.WARNING, telling, takes_metadata),
        Rule("named_headers_are_told", told, Level.ERROR, skipping, tells),
    ]


def _ports(cluster: Part[Cluster], file: EnvoyFile) -> list[set[int]]:
    """The ports listed for each host."""
    ports: defaultdict[str, set[int]] = defaultdict(set)
    for member in (part.message for part in file.all(Endpoint, within=cluster)):
        if member.address and (address := member.address.socket_address):
            ports[address.address].add(address.port_value or 0)
    return [*ports.values()]
