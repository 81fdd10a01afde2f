"""The settings, in one model, which ``extproc/settings.py`` fills from file, environment, flags."""

import re
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal, Self

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
    "route.allow_policy_header": "name the header in route.policy_header; without it none is read",
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
"""Settings of earlier versions by dotted key, each with what to use instead."""


class Section(BaseModel):
    """A part of the configuration: unknown keys are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def _paired(self, first: str, second: str) -> Self:
        if bool(getattr(self, first)) != bool(getattr(self, second)):
            raise ValueError(f"{first} and {second} go together: one is given without the other")
        return self


def _checked(check: Callable[[str], object]) -> AfterValidator:
    """Keeps the text, for which ``check`` raises a ValueError if it cannot be used."""

    def checked(text: str) -> str:
        check(text)
        return text

    return AfterValidator(checked)


def _bare(url: str) -> str:
    return url.strip().removeprefix("http://").removesuffix("/")


_Address = Annotated[str, _checked(split_address)]
_ReplicaAddress = Annotated[str, AfterValidator(_bare), _checked(split_address)]
_ProfileName = Annotated[str, _checked(hardware_profile)]
_RedisUrl = Annotated[str, _checked(connection_options)]
_Port = Annotated[int, Field(ge=1, le=65535)]
_HeaderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]


def _of_kubernetes(name: str) -> str:
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name):
        raise ValueError("a name in Kubernetes has lower-case letters, digits and '-' alone")
    return name


_KubernetesName = Annotated[str, AfterValidator(_of_kubernetes)]


class KubernetesService(Section):
    """A Service of Kubernetes, whose pods are replicas."""

    service: _KubernetesName
    """Name of the Service."""
    port: int | str
    """Port of the pods (targetPort): its number or its name."""
    namespace: _KubernetesName | None = None
    """Namespace of the Service; null: the poller's own."""

    @field_validator("port")
    @classmethod
    def _is_one(cls, port: int | str) -> int | str:
        port = int(port) if isinstance(port, str) and port.isdecimal() else port
        if isinstance(port, str):
            return _of_kubernetes(port)
        if not 1 <= port <= 65535:
            raise ValueError("a port is a number from 1 to 65535, or a name")
        return port

    def __str__(self) -> str:
        name = f"{self.namespace}/{self.service}" if self.namespace else self.service
        return f"Service {name}, port {self.port}"


class ReplicaSource(Section):
    """Replicas: an address, a DNS name, or the pods of a Service of Kubernetes."""

    url: _ReplicaAddress = ""
    """``host:port`` or ``http://host:port`` of one replica."""
    dns: _ReplicaAddress = ""
    """``name:port`` whose addresses are replicas; resolved every 2 s."""
    kubernetes: KubernetesService | None = None
    """Service whose pods are replicas; watched."""
    profile: _ProfileName = DEFAULT_PROFILE
    """Hardware profile that predictions start from."""
    name: str = ""
    """Name for people; by default the address."""
    kv_events_port: _Port | None = None
    """Port on which vLLM publishes KV events, which tell what its prefix cache holds."""
    kv_events_replay_port: _Port | None = None
    """Port on which vLLM replays missed KV events."""

    @property
    def where(self) -> str:
        """Address, DNS name or Service."""
        return self.url or self.dns or str(self.kubernetes)

    @property
    def host_and_port(self) -> tuple[str, int]:
        """Name or IP address, and port, of ``url`` or ``dns``."""
        return split_address(self.url or self.dns)

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if sum(map(bool, (self.url, self.dns, self.kubernetes))) != 1:
            raise ValueError("a replica needs one of 'url', 'dns' and 'kubernetes'")
        return self._paired("kv_events_port", "kv_events_replay_port")

    @property
    def kv_events_ports(self) -> tuple[int, int] | None:
        """Ports of KV events and of their replay; None: not published."""
        if self.kv_events_port is None or self.kv_events_replay_port is None:
            return None
        return self.kv_events_port, self.kv_events_replay_port


class RedisSettings(Section):
    """Redis, through which routers and pollers share state."""

    url: _RedisUrl = Field(default="redis://127.0.0.1:6379/0", repr=False)
    """URL: ``redis://``, ``rediss://`` (TLS) or ``unix://``. With Sentinels or a Cluster, its
    login, database and TLS options count, its host does not."""
    sentinels: tuple[_Address, ...] = ()
    """Addresses of the Sentinels that watch a primary and its replicas."""
    service: str | None = None
    """Name of that primary at the Sentinels."""
    sentinel_username: str | None = None
    """User at the Sentinels, if they ask for one."""
    sentinel_password: str | None = Field(default=None, repr=False)
    """Password at the Sentinels."""
    cluster: tuple[_Address, ...] = ()
    """Addresses of some nodes of a Redis Cluster."""

    @cached_property
    def options(self) -> dict[str, Any]:
        """Arguments of redis-py's clients, from the URL."""
        return connection_options(self.url)

    @model_validator(mode="after")
    def _name_one_form(self) -> Self:
        options = self.options
        self._paired("sentinels", "service")
        if self.sentinels and self.cluster:
            raise ValueError("Redis has sentinels or is a cluster, not both")
        if self.cluster and options.get("db"):
            raise ValueError("a Redis Cluster has no database but 0")
        if (self.sentinels or self.cluster) and "path" in options:
            raise ValueError("sentinels and cluster need a URL that begins with redis or rediss")
        if not (self.sentinels or self.cluster or options.keys() & {"host", "path"}):
            raise ValueError("the URL of Redis names no host: redis://host:port/0")
        return self


class TlsSettings(Section):
    """TLS on a port."""

    tls_cert: Path | None = None
    """PEM file of the certificate and its intermediates; null: plain text."""
    tls_key: Path | None = None
    """PEM file of the certificate's key, without a password."""

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        return self._paired("tls_cert", "tls_key")


class MutualTlsSettings(TlsSettings):
    """TLS on a gRPC port that Envoy connects to."""

    tls_client_ca: Path | None = None
    """PEM file of the authorities of client certificates (mTLS); null: any client may connect."""

    @model_validator(mode="after")
    def _authority_needs_a_certificate(self) -> Self:
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError(
                "tls_client_ca needs tls_cert and tls_key: Envoy shows a certificate "
                "only where it is shown one"
            )
        return self


class ServeSettings(MutualTlsSettings):
    """The ext_proc server."""

    listen: _Address = "127.0.0.1:50051"
    """gRPC address that Envoy connects to."""
    admin: _Address = "127.0.0.1:9090"
    """HTTP address of the page, /metrics, /decisions, /fleet and health."""
    max_streams: int = Field(default=100_000, ge=1, le=10**6)
    """Requests in flight that the router follows; Envoy serves further ones without it."""
    drain_s: float = Field(default=30.0, ge=0)
    """Seconds that open streams have to end on SIGTERM; for the first 1.5 s, new ones are taken."""
    second_choice: bool | None = None
    """Name a second replica for retries: a list, as only Envoy's override_host policy takes it.
    Unset: in every protocol but that of endpoint pickers."""
    chunks_per_s: float = Field(default=50.0, ge=0, le=1e6)
    """Chunks of streamed responses read per second, on average, for token timing and usage;
    responses that replicas store (Responses API) are read in full beside them."""
    hung_s: float = Field(default=20.0, ge=0)
    """Seconds without any answer, to polls and to requests, after which a replica hangs: its
    requests are ended, by 503 where no answer has begun. 0: never."""
    decision_metadata: bool = False
    """Send decisions and predictions to Envoy as metadata ``extproc``, for its access log and
    response headers."""
    decisions_kept: int = Field(default=1000, ge=0)
    """Decision records held in memory; fewer where each compares hundreds of replicas."""


def _as_targets(value: object) -> object:
    """``name: other`` is short for a draw with one outcome."""
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
    """Choice of a replica."""

    policy: PolicyName = "completion"
    """Policy that chooses."""
    policy_header: str | None = Field(default=None, pattern=r"^[a-z0-9_-]+$")
    """Request header that names another policy for one request; null: none."""
    max_ttft_s: float | None = Field(default=None, gt=0)
    """Seconds to the first token: a request that would take longer, by prediction and on every
    replica, is refused with 429; null: none is."""
    session_header: _HeaderName | None = None
    """Request header that names a session, whose requests stay with one replica."""
    session_cookie: str | None = Field(default=None, pattern=r"^[!#$%&'*+.^`|~\w-]+$")
    """Cookie that names the session where the header is missing."""
    session_cost_s: float = Field(default=1.0, ge=0)
    """Seconds of predicted delay that a request accepts to stay with its session's replica; beyond
    that the session moves to a better one."""
    models: dict[str, ModelTargets] = Field(default_factory=dict)
    """Requested name → served name, list of the names under which replicas serve one model, or name
    → weight to draw one for each request."""
    listed_models_only: bool = True
    """Answer 404 for a model that no replica lists; false: replicas load adapters on request
    (vLLM's LoRA resolvers)."""
    seed: int | None = None
    """Seed of the generator that breaks ties; null: from the system."""

    @property
    def keeps_sessions(self) -> bool:
        return self.session_header is not None or self.session_cookie is not None

    @field_validator("models")
    @classmethod
    def _lead_somewhere(cls, models: dict[str, ModelTargets]) -> dict[str, ModelTargets]:
        for name, targets in models.items():
            if isinstance(targets, dict) and not any(targets.values()):
                raise ValueError(f"of {name!r}, no weight is above 0")
            for other in models.keys() & set(targets) - {name}:
                if isinstance(targets, tuple) or isinstance(models[other], dict):
                    raise ValueError(
                        f"{name!r} leads to {other!r}, which leads further: "
                        "name there what replicas serve"
                    )
        return models


class RequestSettings(Section):
    """Measurement of requests."""

    bytes_per_token: float = Field(default=4.0, ge=0.5, le=32)
    """Bytes per token to start from; learned for each model from the usage that replicas report."""
    tokenizers: dict[str, Path] = Field(default_factory=dict)
    """Model name → folder with ``tokenizer.json`` and chat template, to count tokens as vLLM does
    instead of estimating them."""
    image_tokens: int = Field(default=576, ge=0)
    """Tokens per image to start from; learned for each model."""
    tenant_header: _HeaderName | None = None
    """Request header that names a tenant, whose output lengths are learned separately."""


class ObjectiveSettings(Section):
    """Priority and targets of a kind of requests; targets count from their arrival."""

    priority: int = Field(default=0, ge=-1000, le=1000)
    """Priority: higher ones go first, at the router and in replicas that run ``--scheduling-policy
    priority``."""
    ttft_s: float | None = Field(default=None, gt=0)
    """Seconds to the first token."""
    tpot_s: float | None = Field(default=None, gt=0)
    """Seconds for each further token, on average."""
    completion_s: float | None = Field(default=None, gt=0)
    """Seconds to the last token."""
    sheddable: bool = False
    """Refuse a request with 429 if it would miss a target, by prediction."""
    tenants: tuple[str, ...] = ()
    """Tenants with this objective, unless a header names another."""
    models: tuple[str, ...] = ()
    """Models with this objective, unless their tenant has one."""

    def named(self, name: str) -> Objective:
        targets = (self.ttft_s, self.tpot_s, self.completion_s)
        seconds = (inf if one is None else one for one in targets)
        return Objective(name, self.priority, self.sheddable, *seconds)


_LONGEST_HELD_S = 3600.0  # Envoy takes no longer ``override_message_timeout``


class HoldSettings(Section):
    """Requests that wait at the router while no replica can carry them to their end."""

    longest_s: float = Field(default=300.0, ge=0, le=_LONGEST_HELD_S)
    """Seconds for which Envoy is asked to wait; a second earlier a request is refused with 429.
    Envoy's ``max_message_timeout`` must be as long, or Envoy goes on without the router. 0: none
    waits."""
    empty_s: float = Field(default=60.0, ge=0, le=_LONGEST_HELD_S)
    """Seconds for which a request waits while no replica serves its model, if one did within the
    last hour; then it is answered with 503. At most ``longest_s``. 0: no request waits for that."""
    most: int = Field(default=10_000, ge=1)
    """Requests that wait at a time; further ones are refused with 429."""
    objectives: dict[str, ObjectiveSettings] = Field(default_factory=dict)
    """Objectives by name: priority, targets, tenants and models."""
    objective_header: _HeaderName | None = None
    """Request header that names the objective; without a known name, the priority is 0."""
    allow_inference_headers: bool = False
    """Accept the headers by which llm-d and the Gateway API Inference Extension name an objective,
    a tenant (fairness id) and targets."""

    @field_validator("objectives")
    @classmethod
    def _are_told_apart(cls, given: dict[str, ObjectiveSettings]) -> dict[str, ObjectiveSettings]:
        for kind in ("tenants", "models"):
            names = Counter(name for one in given.values() for name in set(getattr(one, kind)))
            if twice := [name for name, count in names.items() if count > 1]:
                raise ValueError(f"several objectives have the {kind} {', '.join(sorted(twice))}")
        return given

    @model_validator(mode="after")
    def _sheds_what_is_late(self) -> "HoldSettings":
        for name, one in self.objectives.items():
            if one.sheddable and not (self.allow_inference_headers or one.named(name).has_target):
                raise ValueError(
                    f"objective {name!r} is sheddable and has no target: a request is refused that "
                    "would miss ttft_s, tpot_s or completion_s"
                )
        return self

    @cached_property
    def _objectives(self) -> dict[tuple[str, str], Objective]:
        """Objectives by what chooses them, and its name."""
        return {
            (kind, name): one.named(objective)
            for objective, one in self.objectives.items()
            for kind, names in (("", [objective]), ("tenant", one.tenants), ("model", one.models))
            for name in names
        }

    def objective(self, name: str, tenant: str, *models: str) -> Objective:
        """The objective named by the header, or else by the tenant, or the model (by any name)."""
        found = self._objectives
        if not found:
            return NO_OBJECTIVE
        keys = (("", name), ("tenant", tenant), *(("model", model) for model in models))
        return next((found[key] for key in keys if key in found), NO_OBJECTIVE)

    @cached_property
    def has_priorities(self) -> bool:
        """Some objective has another priority than 0."""
        return any(objective.priority for objective in self.objectives.values())


_TIMEOUTS = 3  # after which a scrape has failed: vLLM under load is late now and then
POLL_JITTER = 0.1  # largest fraction by which a wait is stretched or cut, so that scrapes spread


class PollSettings(Section):
    """Scrapes of replicas."""

    interval_s: float = Field(default=0.2, gt=0, le=1)
    """Seconds between two scrapes of a replica."""
    timeout_s: float = Field(default=1.0, gt=0)
    """Seconds after which a scrape is late: nothing is learned from it. After three times as long
    it has failed; that and the wait before it must be less than the 5 s after which a replica is
    silent."""
    admin: _Address = "127.0.0.1:9089"
    """HTTP address of the poller's /metrics and health."""

    @field_validator("timeout_s")
    @classmethod
    def _late_is_not_silent(cls, timeout_s: float, info: ValidationInfo) -> float:
        if "interval_s" not in info.data:
            return timeout_s  # the interval is wrong itself
        longest_s = info.data["interval_s"] * (1 + POLL_JITTER) + _TIMEOUTS * timeout_s
        if longest_s >= STALE_AFTER_S:
            raise ValueError(
                f"{_TIMEOUTS} times this, and the wait before (poll.interval_s), are "
                f"{longest_s:g} s and must be less than {STALE_AFTER_S:g} s: a replica that "
                "answers late would count as silent"
            )
        return timeout_s

    @property
    def give_up_s(self) -> float:
        """Seconds after which a scrape that is not answered has failed."""
        return _TIMEOUTS * self.timeout_s


class RecordSettings(Section):
    """A record of the traffic, without prompts and answers, for ``extproc what-if``."""

    path: Path | None = None
    """Folder for the record, a few files for each router and pool; null: no record."""
    max_bytes: int = Field(default=1_000_000_000, ge=1_000_000)
    """Bytes of the files of one router and pool together; the oldest go first."""


class EdsSettings(MutualTlsSettings):
    """The server of EDS, from which Envoy takes the replicas."""

    listen: _Address = "127.0.0.1:18000"
    """gRPC address that Envoy takes the replicas from."""


class AdminSettings(TlsSettings):
    """Access to the admin addresses of routers and pollers."""

    token_file: Path | None = None
    """File with the bearer token to show, watched; null: no token. Health needs none."""


class TraceSettings(Section):
    """Spans of decisions (OpenTelemetry)."""

    endpoint: str | None = Field(default=None, pattern=r"^https?://")
    """Base URL of the collector, for OTLP over HTTP; null: no spans. Needs the extra ``traces``."""


class LogSettings(Section):
    """Logs, on standard error: one JSON object or one line of text each."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is written: debug, info, warning or error."""
    format: Literal["json", "text"] = "text"
    """Format of the lines: text or json."""


PoolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")]


class PoolReplicas(Section):
    """Replicas of a pool, and how they schedule."""

    replicas: tuple[ReplicaSource, ...] = ()
    """Replicas: ``host:port, …``, or a list with ``url``, ``dns`` or ``kubernetes``, ``profile``
    and ``name``."""
    replicas_file: Path | None = None
    """File with a YAML list in the form of ``replicas``; watched."""
    priority_scheduling: bool = False
    """True if all replicas run vLLM with ``--scheduling-policy priority``."""

    @field_validator("replicas", mode="before")
    @classmethod
    def _addresses_too(cls, value: object) -> object:
        """``replicas: [host:port, …]`` is short for a list of ``url``."""
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        if isinstance(value, (list, tuple)):
            return [{"url": item} if isinstance(item, str) else item for item in value]
        return value


class Config(PoolReplicas):
    """The whole configuration of a router and a poller."""

    pool: PoolName = "default"
    """Name of the pool, a prefix of its Redis keys: routers and pollers of one pool share it."""
    pools: dict[PoolName, PoolReplicas] = Field(default_factory=dict)
    """Further pools by name: ``replicas``, ``replicas_file``, ``priority_scheduling``; an Envoy
    route says which."""
    state: Literal["redis", "memory"] = "redis"
    """Place of replica state; ``memory``: one router polls the replicas itself, without Redis."""
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
    def _not_twice(
        cls, pools: dict[str, PoolReplicas], info: ValidationInfo
    ) -> dict[str, PoolReplicas]:
        own = info.data.get("pool")
        if own in pools:
            raise ValueError(f"{own!r} is the name of the pool itself (key 'pool'): take another")
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
        """Headers that name an objective; the first that is there counts."""
        return self._believed(self.hold.objective_header, OBJECTIVE)

    @cached_property
    def tenant_headers(self) -> tuple[str, ...]:
        """Headers that name a tenant, likewise."""
        return self._believed(self.request.tenant_header, FAIRNESS_ID)

    def _believed(self, own: str | None, known: tuple[str, ...]) -> tuple[str, ...]:
        others = known if self.hold.allow_inference_headers else ()
        return (own.lower(), *others) if own else others

    @property
    def each_pool(self) -> "tuple[Config, ...]":
        """A configuration for each pool, as if it were the only one; first its own."""
        others = (
            self.model_copy(update={**dict(replicas), "pool": name, "pools": {}})
            for name, replicas in self.pools.items()
        )
        return self, *others
