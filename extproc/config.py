"""All settings, which ``extproc/settings.py`` fills from a file, the environment and flags."""

import re
from collections import Counter
from collections.abc import Callable
from functools import cached_property, partial
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from extproc.ground.address import split_address
from extproc.predict.step import DEFAULT_PROFILE, hardware_profile
from extproc.redis_settings import connection_options
from extproc.replica_state import STALE_AFTER_S
from extproc.request.objective import FAIRNESS_ID, NO_OBJECTIVE, OBJECTIVE, TARGETS, Objective

REMOVED: dict[str, str] = {
    "poll.jitter": "each wait varies by a tenth of poll.interval_s",
    "poll.backoff_max_s": "a failing replica is scraped at least every 2 s",
    "poll.ttl_s": "the state of a replica lives for 10 s without a scrape",
    "poll.resolve_s": "DNS names and the replicas file are looked at every 2 s",
    "route.allow_policy_header": "name the header in route.policy_header",
    "route.answer_asked_name": "answers carry the name that the replica serves",
    "route.shadow_policy": "record traffic and compare by extproc what-if (docs/what-if.md)",
    "serve.clear_route_cache": "let the replica cluster follow the choice by override_host",
    "serve.stream_sample": "set serve.chunks_per_s",
    "serve.workers": "run several routers (docs/operations/deploy.md)",
    "xds.listen": "use eds.listen",
    "xds.tls_cert": "use eds.tls_cert",
    "xds.tls_key": "use eds.tls_key",
    "xds.tls_client_ca": "use eds.tls_client_ca",
    "xds.envoy_file": "let Envoy watch files itself, by path_config_source (docs/envoy.md)",
}
"""Removed settings, each with its replacement."""


class Section(BaseModel):
    """Part of the configuration; an unknown key is an error."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def _paired(self, first: str, second: str) -> Self:
        if bool(getattr(self, first)) != bool(getattr(self, second)):
            raise ValueError(f"{first} and {second} go together: set both or neither")
        return self


def _checked(check: Callable[[str], object]) -> AfterValidator:
    """Returns a validator that passes a text on unless ``check`` raises a ValueError."""

    def checked(text: str) -> str:
        check(text)
        return text

    return AfterValidator(checked)


def _bare(url: str) -> str:
    return url.strip().removeprefix("http://").removesuffix("/")


def _check_collector(url: str) -> None:
    parts = urlsplit(url)
    if not parts.hostname or parts.port == 0:
        raise ValueError("must be a URL of the form http://host:port, without port 0")


_ListenAddress = Annotated[str, _checked(split_address)]
_connectable = _checked(partial(split_address, least_port=1))
_Address = Annotated[str, _connectable]
_ReplicaAddress = Annotated[str, AfterValidator(_bare), _connectable]
_CollectorUrl = Annotated[str, Field(pattern=r"^https?://"), _checked(_check_collector)]
_ProfileName = Annotated[str, _checked(hardware_profile)]
_RedisUrl = Annotated[str, _checked(connection_options)]
_Port = Annotated[int, Field(ge=1, le=65535)]
_HeaderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]


def _of_kubernetes(name: str) -> str:
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name):
        raise ValueError("a Kubernetes name has only lower-case letters, digits and '-'")
    return name


_KubernetesName = Annotated[str, AfterValidator(_of_kubernetes)]
_InferencePoolName = Annotated[str, Field(pattern=r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$")]


class KubernetesPods(Section):
    """Pods of a Kubernetes Service or InferencePool."""

    service: _KubernetesName | None = None
    """Name of the Service."""
    port: int | str | None = None
    """Port of the Service's pods (targetPort), a number or a name."""
    inference_pool: _InferencePoolName | None = None
    """Name of the InferencePool, which itself names the ports."""
    namespace: _KubernetesName | None = None
    """Namespace of the Service or InferencePool; null: the poller's own namespace."""

    @field_validator("port")
    @classmethod
    def _check_port(cls, port: int | str | None) -> int | str | None:
        port = int(port) if isinstance(port, str) and port.isdecimal() else port
        if isinstance(port, str):
            return _of_kubernetes(port)
        if port is not None and not 1 <= port <= 65535:
            raise ValueError("a port is a number from 1 to 65535, or a name")
        return port

    @model_validator(mode="after")
    def _check_pods(self) -> Self:
        if (self.service is None) == (self.inference_pool is None):
            raise ValueError("Kubernetes pods need one of 'service' and 'inference_pool'")
        return self._paired("service", "port")

    def __str__(self) -> str:
        prefix = f"{self.namespace}/" if self.namespace else ""
        if self.inference_pool:
            return f"InferencePool {prefix}{self.inference_pool}"
        return f"Service {prefix}{self.service}, port {self.port}"


class ReplicaSource(Section):
    """Replicas: an address, a DNS name, or the pods of a Kubernetes Service or InferencePool."""

    url: _ReplicaAddress = ""
    """``host:port`` or ``http://host:port`` of one replica."""
    dns: _ReplicaAddress = ""
    """``name:port``; each address of the DNS name is a replica. Resolved every 2 s."""
    kubernetes: KubernetesPods | None = None
    """Service or InferencePool whose pods are replicas."""
    profile: _ProfileName = DEFAULT_PROFILE
    """Hardware profile that predictions start from."""
    name: str = ""
    """Name in logs, on pages and in drain commands; by default the address."""
    kv_events_port: _Port | None = None
    """Port on which vLLM publishes KV events: changes of the prefix cache."""
    kv_events_replay_port: _Port | None = None
    """Port on which vLLM replays missed KV events."""

    @property
    def where(self) -> str:
        """Address, DNS name, Service or InferencePool as text, for messages."""
        return self.url or self.dns or str(self.kubernetes)

    @property
    def host_and_port(self) -> tuple[str, int]:
        """Name or IP address, and port, of ``url`` or ``dns``."""
        return split_address(self.url or self.dns)

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if sum(map(bool, (self.url, self.dns, self.kubernetes))) != 1:
            raise ValueError("a replica needs one of 'url', 'dns' and 'kubernetes'")
        return self._paired("kv_events_port", "kv_events_replay_port")

    @property
    def kv_events_ports(self) -> tuple[int, int] | None:
        """Ports of KV events and of their replay; None: the replica publishes no events."""
        if self.kv_events_port is None or self.kv_events_replay_port is None:
            return None
        return self.kv_events_port, self.kv_events_replay_port


class RedisSettings(Section):
    """Redis, through which routers and pollers share state."""

    url: _RedisUrl = Field(default="redis://127.0.0.1:6379/0", repr=False)
    """URL: ``redis://``, ``rediss://`` (TLS) or ``unix://``. With Sentinels or a Cluster, only the
    URL's login, database and TLS options count."""
    password: str | None = Field(default=None, repr=False)
    """Password, not percent-encoded; replaces a password in the URL."""
    sentinels: tuple[_Address, ...] = ()
    """Addresses of the Sentinels that watch a primary and its replicas."""
    service: str | None = None
    """Name by which the Sentinels know the primary."""
    sentinel_username: str | None = None
    """User name for the Sentinels, if they need a login."""
    sentinel_password: str | None = Field(default=None, repr=False)
    """Password for the Sentinels."""
    cluster: tuple[_Address, ...] = ()
    """Addresses of some nodes of a Redis Cluster; a DNS name may stand for several nodes."""

    @cached_property
    def options(self) -> dict[str, Any]:
        """Arguments of redis-py's clients, from the URL and the password."""
        password = {} if self.password is None else {"password": self.password}
        return connection_options(self.url) | password

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        options = self.options
        self._paired("sentinels", "service")
        if self.sentinels and self.cluster:
            raise ValueError("set sentinels or cluster, not both")
        if self.cluster and options.get("db"):
            raise ValueError("a Redis Cluster has only database 0")
        if (self.sentinels or self.cluster) and "path" in options:
            raise ValueError("sentinels and cluster need a URL that begins with redis or rediss")
        if not (self.sentinels or self.cluster or options.keys() & {"host", "path"}):
            raise ValueError("the URL of Redis names no host: redis://host:port/0")
        return self


class TlsSettings(Section):
    """TLS on a port that this process opens."""

    tls_cert: Path | None = None
    """PEM file of the certificate and its intermediates; null: plain text."""
    tls_key: Path | None = None
    """PEM file of the certificate's key, without a password."""

    @model_validator(mode="after")
    def _check_pair(self) -> Self:
        return self._paired("tls_cert", "tls_key")


class MutualTlsSettings(TlsSettings):
    """TLS on a gRPC port that Envoy connects to, with client certificates (mTLS)."""

    tls_client_ca: Path | None = None
    """PEM file of the authorities that sign client certificates (mTLS); null: any client may
    connect."""

    @model_validator(mode="after")
    def _check_authority(self) -> Self:
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError(
                "tls_client_ca needs tls_cert and tls_key: client certificates need TLS"
            )
        return self


class ServeSettings(MutualTlsSettings):
    """The ext_proc server."""

    listen: _ListenAddress = "127.0.0.1:50051"
    """gRPC address that Envoy connects to."""
    admin: _ListenAddress = "127.0.0.1:9090"
    """HTTP address of the page, /metrics, /decisions, /fleet and health."""
    mode: Literal["route", "observe"] = "route"
    """route: choose a replica for each request. observe: leave the choice to Envoy, and only
    predict and record; no request is changed, queued or refused."""
    share: float = Field(default=1.0, ge=0, le=1)
    """Share of the requests that mode route steers; the other requests are observed. A hash of the
    session or, without a session, of the request id decides."""
    max_streams: int = Field(default=100_000, ge=1, le=10**6)
    """Most open streams, one for each request; Envoy serves further requests without the router."""
    drain_s: float = Field(default=30.0, ge=0)
    """Grace period in seconds for open streams after SIGTERM; in its first 1.5 s, new streams are
    still accepted."""
    second_choice: bool | None = None
    """Name a second replica, for retries; only Envoy's override_host policy accepts two addresses.
    Null: true, except in the protocol of endpoint pickers."""
    chunks_per_s: float = Field(default=50.0, ge=0, le=1e6)
    """Chunks of streamed responses read per second, on average, for token timing and usage; stored
    responses (Responses API) are read in full and do not count."""
    hung_s: float = Field(default=20.0, ge=0)
    """Seconds without an answer to polls and requests after which a replica counts as hung: the
    router ends the replica's requests, with 503 if no response has begun. 0: never."""
    decision_metadata: bool = False
    """Send decisions and predictions to Envoy as metadata ``extproc``, for its access log and
    response headers."""
    decisions_kept: int = Field(default=1000, ge=0)
    """Decision records held in memory; fewer if each record compares hundreds of replicas."""

    @property
    def steers_all(self) -> bool:
        """True if the router chooses for every request."""
        return self.mode == "route" and self.share >= 1.0


def _as_targets(value: object) -> object:
    """Reads ``name: other`` as ``name: {other: 1}``."""
    if not isinstance(value, (str, list, tuple, dict)):
        raise ValueError("must be a name, a list of names, or names with weights")
    return {value: 1.0} if isinstance(value, str) else value


ModelTargets = Annotated[
    Annotated[tuple[str, ...], Field(min_length=1), Tag("list")]
    | Annotated[dict[str, Annotated[float, Field(ge=0)]], Tag("weights")],
    Discriminator(lambda value: "weights" if isinstance(value, dict) else "list"),
    BeforeValidator(_as_targets),
]


PolicyName = Literal[
    "completion",
    "least_request",
    "round_robin",
    "random",
    "power_of_two",
    "least_kv",
    "queue_kv",
    "lmetric",
    "cache_aware",
]


class RouteSettings(Section):
    """Choice of a replica for each request."""

    policy: PolicyName = "completion"
    """Policy that chooses the replica."""
    policy_header: str | None = Field(default=None, pattern=r"^[a-z0-9_-]+$")
    """Request header that names another policy for the request; null: no header."""
    max_ttft_s: float | None = Field(default=None, gt=0)
    """Limit on the predicted seconds to the first token: a request that would take longer on every
    replica is refused with 429; null: no limit."""
    session_header: _HeaderName | None = None
    """Request header that names a session, whose requests stay with one replica."""
    session_cookie: str | None = Field(default=None, pattern=r"^[!#$%&'*+.^`|~\w-]+$")
    """Cookie that names the session if a request lacks the header."""
    session_cost_s: float = Field(default=1.0, ge=0)
    """Longest predicted delay, in seconds, that a request accepts to stay with its session's
    replica. If the delay is longer, the session moves to a better replica."""
    models: dict[str, ModelTargets] = Field(default_factory=dict)
    """For each name in requests: a served name; a list of names under which replicas serve the
    model; or served names with weights, by which a name is drawn for each request."""
    listed_models_only: bool = True
    """Answer 404 for a model that no replica lists. Set false if replicas load adapters on request
    (vLLM's LoRA resolvers)."""
    seed: int | None = None
    """Seed of the random generator that breaks ties; null: a random seed."""

    @field_validator("models")
    @classmethod
    def _check_models(cls, models: dict[str, ModelTargets]) -> dict[str, ModelTargets]:
        for name, targets in models.items():
            if isinstance(targets, dict) and not any(targets.values()):
                raise ValueError(f"{name!r} has no weight above 0")
            for other in models.keys() & set(targets) - {name}:
                if isinstance(targets, tuple) or isinstance(models[other], dict):
                    raise ValueError(
                        f"{name!r} stands for {other!r}, which itself stands for other names: "
                        "give the name that replicas serve"
                    )
        return models


class RequestSettings(Section):
    """Prompt tokens and tenants."""

    bytes_per_token: float = Field(default=4.0, ge=0.5, le=32)
    """Bytes per token at first; learned for each model from the usage that replicas report."""
    tokenizers: dict[str, Path] = Field(default_factory=dict)
    """Model name → folder with ``tokenizer.json`` and chat template, to count tokens as vLLM does
    instead of estimating their number."""
    image_tokens: int = Field(default=576, ge=0)
    """Tokens per image at first; learned for each model."""
    tenant_header: _HeaderName | None = None
    """Request header that names the tenant: each tenant has its own share of the queue and learned
    output lengths."""


class ObjectiveSettings(Section):
    """Priority and targets of some requests; targets count from a request's arrival."""

    priority: int = Field(default=0, ge=-1000, le=1000)
    """Higher priorities go first, in the queue and in replicas that run ``--scheduling-policy
    priority``."""
    ttft_s: float | None = Field(default=None, gt=0)
    """Seconds to the first token."""
    tpot_s: float | None = Field(default=None, gt=0)
    """Seconds for each token after the first, on average."""
    completion_s: float | None = Field(default=None, gt=0)
    """Seconds to the last token."""
    sheddable: bool = False
    """Refuse a request with 429, on arrival or later, once no replica meets its targets."""
    tenants: tuple[str, ...] = ()
    """Tenants with this objective, unless a header names another objective."""
    models: tuple[str, ...] = ()
    """Models with this objective, unless the tenant has an objective."""

    def named(self, name: str) -> Objective:
        targets = (self.ttft_s, self.tpot_s, self.completion_s)
        seconds = (inf if target is None else target for target in targets)
        return Objective(name, self.priority, self.sheddable, *seconds)


_LONGEST_HELD_S = 3600.0  # the longest ``override_message_timeout`` that Envoy accepts


class HoldSettings(Section):
    """Queue of requests that no replica has room for."""

    longest_s: float = Field(default=300.0, ge=0, le=_LONGEST_HELD_S)
    """Seconds that the router asks Envoy to wait for a queued request; one second before this time
    ends, the router refuses the request with 429. Envoy's ``max_message_timeout`` must be at least
    as long, or Envoy goes on without the router. 0: no request waits."""
    empty_s: float = Field(default=60.0, ge=0, le=_LONGEST_HELD_S)
    """Seconds that a request waits if no replica serves its model, but one did in the last hour. If
    none does in this time, the answer is 503. At most ``longest_s``. 0: no wait."""
    most: int = Field(default=10_000, ge=1)
    """Most requests in the queue. If another request has to wait, the router refuses one of the
    lowest priority with 429: the newest of the tenant with the most queued requests."""
    objectives: dict[str, ObjectiveSettings] = Field(default_factory=dict)
    """Objectives by name: priority, targets, tenants and models."""
    objective_header: _HeaderName | None = None
    """Request header that names the objective; else the tenant or model selects an objective."""
    allow_inference_headers: bool = False
    """Accept the headers by which llm-d and the Gateway API Inference Extension name an objective,
    a tenant (fairness id) and targets."""

    @field_validator("objectives")
    @classmethod
    def _check_names(cls, given: dict[str, ObjectiveSettings]) -> dict[str, ObjectiveSettings]:
        for kind in ("tenants", "models"):
            names = Counter(name for item in given.values() for name in set(getattr(item, kind)))
            if twice := [name for name, count in names.items() if count > 1]:
                raise ValueError(f"{kind} in several objectives: {', '.join(sorted(twice))}")
        return given

    @model_validator(mode="after")
    def _check_targets(self) -> Self:
        for name, item in self.objectives.items():
            has_target = self.allow_inference_headers or item.named(name).has_target
            if item.sheddable and not has_target:
                raise ValueError(
                    f"objective {name!r} is sheddable and has no target: "
                    "set ttft_s, tpot_s or completion_s"
                )
        return self

    @cached_property
    def _objectives(self) -> dict[tuple[str, str], Objective]:
        """Objectives by ``("tenant", tenant)``, ``("model", model)`` and, for the objective's own
        name, ``("", name)``."""
        return {
            (kind, name): item.named(objective)
            for objective, item in self.objectives.items()
            for kind, names in (("", [objective]), ("tenant", item.tenants), ("model", item.models))
            for name in names
        }

    def objective(self, name: str, tenant: str, *models: str) -> Objective:
        """Finds an objective by its own ``name``, else by the tenant, else by the models."""
        found = self._objectives
        if not found:
            return NO_OBJECTIVE
        keys = (("", name), ("tenant", tenant), *(("model", model) for model in models))
        return next((found[key] for key in keys if key in found), NO_OBJECTIVE)

    @cached_property
    def has_priorities(self) -> bool:
        """True if an objective has a priority other than 0."""
        return any(objective.priority for objective in self.objectives.values())


_TIMEOUTS = 3  # timeouts until a scrape has failed: vLLM under load is late now and then
POLL_JITTER = 0.1  # largest fraction by which a wait varies, so that scrapes spread


class PollSettings(Section):
    """Scrapes of replicas."""

    interval_s: float = Field(default=0.2, gt=0, le=1)
    """Seconds between two scrapes of a replica."""
    timeout_s: float = Field(default=1.0, gt=0)
    """Seconds after which a scrape is late, and its figures teach nothing. A scrape has failed
    after three times this timeout. A replica is stale after 5 s, so three times the timeout plus
    ``interval_s`` must be less than 5 s."""
    admin: _ListenAddress = "127.0.0.1:9089"
    """HTTP address of the poller's /metrics and health."""

    @field_validator("timeout_s")
    @classmethod
    def _check_timeout(cls, timeout_s: float, info: ValidationInfo) -> float:
        if "interval_s" not in info.data:
            return timeout_s  # the interval has an error of its own
        longest_s = info.data["interval_s"] * (1 + POLL_JITTER) + _TIMEOUTS * timeout_s
        if longest_s >= STALE_AFTER_S:
            raise ValueError(
                f"{_TIMEOUTS} × poll.timeout_s + poll.interval_s (with jitter) is {longest_s:g} s, "
                f"and must be less than {STALE_AFTER_S:g} s: a replica that answers late would "
                "count as stale"
            )
        return timeout_s

    @property
    def give_up_s(self) -> float:
        """Seconds after which an unanswered scrape has failed."""
        return _TIMEOUTS * self.timeout_s


class RecordSettings(Section):
    """Record of the traffic, without prompts and answers, for ``extproc what-if``."""

    path: Path | None = None
    """Folder for the record, a few files for each router and pool; null: no record."""
    max_bytes: int = Field(default=1_000_000_000, ge=1_000_000)
    """Most bytes in all files of one router and pool; the oldest file is deleted first."""


class EdsSettings(MutualTlsSettings):
    """EDS server, which gives Envoy the replicas."""

    listen: _ListenAddress = "127.0.0.1:18000"
    """gRPC address at which Envoy asks ``extproc eds`` for the replicas."""


class AdminSettings(TlsSettings):
    """Access to the admin addresses of routers and pollers."""

    token_file: Path | None = None
    """File with the bearer token that requests must carry, except requests for health; read again
    when the file changes. Null: no request needs a token."""


class TraceSettings(Section):
    """OpenTelemetry spans of requests."""

    endpoint: _CollectorUrl | None = None
    """Base URL of the collector, for OTLP over HTTP; null: no spans. Needs the extra ``traces``."""


class LogSettings(Section):
    """Logs on standard error, one line for each event."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is written: debug, info, warning or error."""
    format: Literal["json", "text"] = "text"
    """Format of the lines: text or json."""


PoolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")]


class PoolReplicas(Section):
    """Replicas of a pool, and their scheduling."""

    replicas: tuple[ReplicaSource, ...] = ()
    """Replicas: ``host:port, …``, or a list whose entries have ``url``, ``dns`` or ``kubernetes``,
    and may have ``profile`` and ``name``."""
    replicas_file: Path | None = None
    """File with a YAML list in the form of ``replicas``, read again after changes."""
    priority_scheduling: bool = False
    """True if all replicas run vLLM with ``--scheduling-policy priority``."""

    @field_validator("replicas", mode="before")
    @classmethod
    def _read_addresses(cls, value: object) -> object:
        """Reads ``host:port, …`` and ``[host:port, …]`` as entries with ``url``."""
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        if isinstance(value, (list, tuple)):
            return [{"url": item} if isinstance(item, str) else item for item in value]
        return value


class Config(PoolReplicas):
    """The whole configuration of a router and a poller."""

    pool: PoolName = "default"
    """Name of the pool, the same for all its routers and pollers; a prefix of its Redis keys."""
    pools: dict[PoolName, PoolReplicas] = Field(default_factory=dict)
    """Further pools by name, each with ``replicas``, ``replicas_file`` and ``priority_scheduling``;
    the Envoy route selects the pool."""
    state: Literal["redis", "memory"] = "redis"
    """Store of replica states: ``redis``; or ``memory``, if a single router polls the replicas."""
    redis: RedisSettings = RedisSettings()
    serve: ServeSettings = ServeSettings()
    route: RouteSettings = RouteSettings()
    request: RequestSettings = RequestSettings()
    hold: HoldSettings = HoldSettings()
    poll: PollSettings = PollSettings()
    eds: EdsSettings = EdsSettings()
    admin: AdminSettings = AdminSettings()
    log: LogSettings = LogSettings()
    traces: TraceSettings = TraceSettings()
    record: RecordSettings = RecordSettings()

    @field_validator("pools")
    @classmethod
    def _check_pools(
        cls, pools: dict[str, PoolReplicas], info: ValidationInfo
    ) -> dict[str, PoolReplicas]:
        own = info.data.get("pool")
        if own in pools:
            raise ValueError(
                f"{own!r} is already the name of the first pool (key 'pool'): choose another name"
            )
        return pools

    @cached_property
    def headers(self) -> frozenset[str]:
        """Request headers that settings name, in lower case."""
        route = self.route
        named = [
            route.policy_header,
            route.session_header,
            "cookie" if route.session_cookie else None,
            *self.tenant_headers,
            *self.objective_headers,
            *(TARGETS if self.hold.allow_inference_headers else ()),
        ]
        return frozenset(name.lower() for name in named if name)

    @cached_property
    def objective_headers(self) -> tuple[str, ...]:
        """Headers that name an objective; the first header that the request has counts."""
        return self._with_inference_headers(self.hold.objective_header, OBJECTIVE)

    @cached_property
    def tenant_headers(self) -> tuple[str, ...]:
        """Headers that name a tenant; the first header that the request has counts."""
        return self._with_inference_headers(self.request.tenant_header, FAIRNESS_ID)

    def _with_inference_headers(self, own: str | None, known: tuple[str, ...]) -> tuple[str, ...]:
        others = known if self.hold.allow_inference_headers else ()
        return (own.lower(), *others) if own else others

    @property
    def each_pool(self) -> "tuple[Config, ...]":
        """Return a configuration for each pool, as if the process had this pool alone. The first
        is for the pool that the key ``pool`` names."""
        others = (
            self.model_copy(update={**dict(replicas), "pool": name, "pools": {}})
            for name, replicas in self.pools.items()
        )
        return self, *others
