"""Every setting, in one model. ``extproc/settings.py`` fills it from file, environment, flags."""

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
from extproc.replica_state import SILENT_AFTER_S
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
    "serve.workers": "run several routers, each with its own configuration (docs/operations.md)",
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


def _that(check: Callable[[str], object]) -> AfterValidator:
    """Text as it stands, where it can be read; ``check`` raises ValueError where it cannot."""

    def checked(text: str) -> str:
        check(text)
        return text

    return AfterValidator(checked)


def _bare(url: str) -> str:
    return url.strip().removeprefix("http://").removesuffix("/")


_Address = Annotated[str, _that(split_address)]
_ReplicaAddress = Annotated[str, AfterValidator(_bare), _that(split_address)]
_ProfileName = Annotated[str, _that(hardware_profile)]
_RedisUrl = Annotated[str, _that(connection_options)]
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
    """Its name."""
    port: int | str
    """The port of its pods (targetPort) as a number, or the name of its port."""
    namespace: _KubernetesName | None = None
    """Where it is; None: where the poller's pod is."""

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
    """One or more replicas: an address, a DNS name that resolves to many, or the pods of a Service
    of Kubernetes."""

    url: _ReplicaAddress = ""
    """``host:port`` or ``http://host:port`` of one replica."""
    dns: _ReplicaAddress = ""
    """``name:port``: every address the name resolves to is a replica; resolved again and again."""
    kubernetes: KubernetesService | None = None
    """Every pod of this Service is a replica; watched."""
    profile: _ProfileName = DEFAULT_PROFILE
    """Hardware profile its prediction starts from."""
    name: str = ""
    """What people call it; the address by default."""
    kv_events_port: _Port | None = None
    """Port on which vLLM publishes KV events: what its prefix cache holds is then known."""
    kv_events_replay_port: _Port | None = None
    """Port on which it replays those that were missed."""

    @property
    def where(self) -> str:
        """What it names: address, DNS name or Service."""
        return self.url or self.dns or str(self.kubernetes)

    @property
    def host_and_port(self) -> tuple[str, int]:
        """Name or IP address, and port, of ``url`` or ``dns``."""
        return split_address(self.url or self.dns)

    @model_validator(mode="after")
    def _one_address(self) -> "ReplicaSource":
        if sum(map(bool, (self.url, self.dns, self.kubernetes))) != 1:
            raise ValueError("a replica needs one of 'url', 'dns' and 'kubernetes'")
        return self

    @model_validator(mode="after")
    def _events_can_be_missed(self) -> "ReplicaSource":
        if (self.kv_events_port is None) != (self.kv_events_replay_port is None):
            raise ValueError(
                "kv_events_port and kv_events_replay_port go together: one is given without the "
                "other"
            )
        return self

    @property
    def kv_events_ports(self) -> tuple[int, int] | None:
        """Where KV events are published and replayed; None: they are not."""
        if self.kv_events_port is None or self.kv_events_replay_port is None:
            return None
        return self.kv_events_port, self.kv_events_replay_port


class RedisSettings(Section):
    """Where replica state is shared."""

    url: _RedisUrl = Field(default="redis://127.0.0.1:6379/0", repr=False)
    """``redis://``, ``rediss://`` (TLS) or ``unix://``; with Sentinels or a Cluster, its login,
    database and TLS options count, its host does not."""
    sentinels: tuple[_Address, ...] = ()
    """Addresses of the Sentinels that watch a primary and its replicas."""
    service: str | None = None
    """Name by which the Sentinels know that primary."""
    sentinel_username: str | None = None
    """User at the Sentinels, where they ask for one."""
    sentinel_password: str | None = Field(default=None, repr=False)
    """Password at the Sentinels."""
    cluster: tuple[_Address, ...] = ()
    """Addresses of a few nodes of a Redis Cluster."""

    @cached_property
    def options(self) -> dict[str, Any]:
        """Arguments of redis-py's clients, from the URL."""
        return connection_options(self.url)

    @model_validator(mode="after")
    def _name_one_form(self) -> Self:
        options = self.options
        if bool(self.sentinels) != bool(self.service):
            raise ValueError("sentinels and service go together: one is given without the other")
        if self.sentinels and self.cluster:
            raise ValueError("Redis has sentinels or is a cluster, not both")
        if self.cluster and options.get("db"):
            raise ValueError("a Redis Cluster has no database but 0")
        if (self.sentinels or self.cluster) and "path" in options:
            raise ValueError("sentinels and cluster need a URL that begins with redis or rediss")
        if not (self.sentinels or self.cluster or options.keys() & {"host", "path"}):
            raise ValueError("the URL of Redis names no host: redis://host:port/0")
        return self


class CertificateFiles(Section):
    """TLS on a port."""

    tls_cert: Path | None = None
    """PEM file of the certificate to show, with those between it and its authority; without it,
    the port speaks plain text."""
    tls_key: Path | None = None
    """PEM file of its key, without a password."""

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together: one is given without the other")
        return self


class TlsFiles(CertificateFiles):
    """TLS on a gRPC port that Envoy connects to."""

    tls_client_ca: Path | None = None
    """PEM file of the authorities that sign what Envoy must show (mTLS); without it, whoever
    reaches the port may connect."""

    @model_validator(mode="after")
    def _authority_needs_a_certificate(self) -> Self:
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError(
                "tls_client_ca needs tls_cert and tls_key: Envoy shows a certificate "
                "only where it is shown one"
            )
        return self


_MOST_CHUNKS = 1e6
"""Chunks a second: more than there are."""


class ServeSettings(TlsFiles):
    """The ext_proc server."""

    listen: _Address = "127.0.0.1:50051"
    """gRPC address Envoy connects to."""
    admin: _Address = "127.0.0.1:9090"
    """HTTP address of the page, /metrics, /decisions, /fleet and health."""
    max_streams: int = Field(default=100_000, ge=1, le=10**6)
    """Requests in flight that the router looks after; Envoy goes on with further ones without
    the router."""
    drain_s: float = Field(default=30.0, ge=0)
    """On SIGTERM, open streams have this many seconds to end; in the first 1.5 s new ones are still
    taken."""
    second_choice: bool = True
    """Name a second replica after the first, for retries: a list, as only Envoy's override_host
    policy takes it."""
    chunks_per_s: float = Field(default=50.0, ge=0, le=_MOST_CHUNKS)
    """Chunks of streamed responses that the router reads a second, on average, for token timing and
    usage; those of responses that replicas store (Responses API) it reads beside them, all."""
    hung_s: float = Field(default=20.0, ge=0)
    """A replica that answers nothing for so long, neither polls nor requests, hangs: what it has in
    flight is ended, by 503 where no answer has begun. 0: never."""
    decision_metadata: bool = False
    """Tell Envoy what was decided and predicted, in metadata ``extproc``: for its access log, and
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
    """How a replica is chosen."""

    policy: PolicyName = "completion"
    """Name of the policy that chooses."""
    policy_header: str | None = Field(default=None, pattern=r"^[a-z0-9_-]+$")
    """Request header in which clients may name another policy for one request; null: none."""
    max_ttft_s: float | None = Field(default=None, gt=0)
    """A request whose first token would come later than this, by prediction and on every replica,
    is refused with 429; null: none is."""
    session_header: _HeaderName | None = None
    """Request header whose value names a session: its requests stay with one replica."""
    session_cookie: str | None = Field(default=None, pattern=r"^[!#$%&'*+.^`|~\w-]+$")
    """Cookie that does so, where the header is not there."""
    session_cost_s: float = Field(default=1.0, ge=0)
    """Seconds by which a request may be finished later, by prediction, for staying with its
    session's replica; beyond that it goes to a better one, and the session with it."""
    models: dict[str, ModelTargets] = Field(default_factory=dict)
    """Name that clients ask for → the name it is served by; a list of names under which replicas
    serve one model; or name → weight, to draw one for each request."""
    listed_models_only: bool = True
    """Answer 404 to a request for a model that no replica lists; false: replicas load adapters when
    they are asked for (vLLM's LoRA resolvers)."""
    seed: int | None = None
    """Seed of the generator that breaks ties; None: from the system."""

    @property
    def keeps_sessions(self) -> bool:
        """Whether any request may have one."""
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
    """How a request is measured."""

    bytes_per_token: float = Field(default=4.0, ge=0.5, le=32)
    """Ratio to start from; learned per model from the usage that replicas report."""
    tokenizers: dict[str, Path] = Field(default_factory=dict)
    """Model name → folder with its ``tokenizer.json`` and chat template: know every token of a
    prompt, as vLLM does, instead of estimating how many there are."""
    image_tokens: int = Field(default=576, ge=0)
    """Tokens one image is taken for, to start from; learned per model like the ratio."""
    tenant_header: _HeaderName | None = None
    """Request header that names a tenant, whose output lengths are then learned by themselves."""


class ObjectiveSettings(Section):
    """A kind of requests, by what they aim for; times in seconds since they came."""

    priority: int = Field(default=0, ge=-1000, le=1000)
    """Of requests that wait, those of a higher one go first, at the router and in replicas that run
    ``--scheduling-policy priority``."""
    ttft_s: float | None = Field(default=None, gt=0)
    """Until the first token."""
    tpot_s: float | None = Field(default=None, gt=0)
    """For each further token, on average."""
    completion_s: float | None = Field(default=None, gt=0)
    """Until the last token."""
    sheddable: bool = False
    """Whether a request is refused with 429 where it would miss a target, by prediction."""
    tenants: tuple[str, ...] = ()
    """Tenants whose requests have it, where no header names another."""
    models: tuple[str, ...] = ()
    """Models whose requests have it, where their tenant has none."""

    def named(self, name: str) -> Objective:
        """The objective."""
        targets = (self.ttft_s, self.tpot_s, self.completion_s)
        seconds = (inf if one is None else one for one in targets)
        return Objective(name, self.priority, self.sheddable, *seconds)


_LONGEST_HELD_S = 3600.0
"""Envoy takes no longer ``override_message_timeout``."""


class HoldSettings(Section):
    """Requests that wait at the router while no replica can carry them to their end."""

    longest_s: float = Field(default=300.0, ge=0, le=_LONGEST_HELD_S)
    """Seconds for which Envoy is asked to wait; a second earlier a request is refused with 429.
    Envoy's ``max_message_timeout`` has to be as long: where it is shorter none waits, and with 0
    neither."""
    most: int = Field(default=10_000, ge=1)
    """Requests that wait at a time; further ones are refused with 429."""
    objectives: dict[str, ObjectiveSettings] = Field(default_factory=dict)
    """Name → priority, targets, and whose requests have it."""
    objective_header: _HeaderName | None = None
    """Request header that names the objective; one that is not named here, and none, has priority
    0."""
    allow_inference_headers: bool = False
    """Whether the headers count by which llm-d and the Gateway API Inference Extension name an
    objective, a tenant (fairness id) and targets."""

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
        """By what chooses it, and its name."""
        return {
            (kind, name): one.named(objective)
            for objective, one in self.objectives.items()
            for kind, names in (("", [objective]), ("tenant", one.tenants), ("model", one.models))
            for name in names
        }

    def objective(self, name: str, tenant: str, *models: str) -> Objective:
        """What a request aims for: by the name in its header, or else by its tenant, or its model
        by any of these names."""
        found = self._objectives
        if not found:
            return NO_OBJECTIVE
        keys = (("", name), ("tenant", tenant), *(("model", model) for model in models))
        return next((found[key] for key in keys if key in found), NO_OBJECTIVE)

    @cached_property
    def has_priorities(self) -> bool:
        """Whether any request may have another than 0."""
        return any(objective.priority for objective in self.objectives.values())


_TIMEOUTS = 3
"""In a row, and a scrape has failed: vLLM under load is late with its page now and then, one that
hangs always."""
POLL_JITTER = 0.1
"""Fraction by which each wait is stretched or cut at most, so that scrapes spread out."""


class PollSettings(Section):
    """How replicas are scraped."""

    interval_s: float = Field(default=0.2, gt=0, le=1)
    """Seconds between two scrapes of a replica; predictions live on fresh figures."""
    timeout_s: float = Field(default=1.0, gt=0)
    """A scrape that takes longer is late: nothing is learned from it. One that takes three times as
    long has failed: with the wait before it less than the 5 s after which a replica is silent."""
    admin: _Address = "127.0.0.1:9089"
    """HTTP address of the poller's /metrics and health."""

    @field_validator("timeout_s")
    @classmethod
    def _late_is_not_silent(cls, timeout_s: float, info: ValidationInfo) -> float:
        if "interval_s" not in info.data:
            return timeout_s  # the interval is wrong itself
        longest_s = info.data["interval_s"] * (1 + POLL_JITTER) + _TIMEOUTS * timeout_s
        if longest_s >= SILENT_AFTER_S:
            raise ValueError(
                f"{_TIMEOUTS} times this, and the wait before (poll.interval_s), are "
                f"{longest_s:g} s and must be less than {SILENT_AFTER_S:g} s: a replica that "
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
    """Folder to write it to, a few files for each router and pool; None: nothing is recorded."""
    max_bytes: int = Field(default=1_000_000_000, ge=1_000_000)
    """Of the files of one router and pool together; what is oldest goes first."""


class EdsSettings(TlsFiles):
    """The server of EDS, from which Envoy takes the replicas."""

    listen: _Address = "127.0.0.1:18000"
    """gRPC address that Envoy takes the replicas from."""


class AdminSettings(CertificateFiles):
    """Who may look at the admin addresses of routers and pollers."""

    token_file: Path | None = None
    """File with the token to show (``Authorization: Bearer …``), watched; without it, whoever
    reaches the port may look. Health needs none."""


class TraceSettings(Section):
    """Spans of decisions (OpenTelemetry)."""

    endpoint: str | None = Field(default=None, pattern=r"^https?://")
    """Base URL of the collector to send them to by OTLP over HTTP; null: none are made. Needs the
    extra ``traces``."""


class LogSettings(Section):
    """Logs go to standard error, one JSON object or one line of text each."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least important lines to write: debug, info, warning or error."""
    format: Literal["json", "text"] = "text"
    """text or json."""


PoolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")]


class PoolReplicas(Section):
    """Which replicas a pool has, and how they schedule."""

    replicas: tuple[ReplicaSource, ...] = ()
    """``host:port, …``, or a list of replicas with ``url``, ``dns`` or ``kubernetes``,
    ``profile`` and ``name``."""
    replicas_file: Path | None = None
    """YAML list in the form of ``replicas``; watched."""
    priority_scheduling: bool = False
    """Set it where all replicas run vLLM with ``--scheduling-policy priority``."""

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
    """Prefix of every Redis key: routers and pollers of one pool share it."""
    pools: dict[PoolName, PoolReplicas] = Field(default_factory=dict)
    """Name → ``replicas``, ``replicas_file``, ``priority_scheduling`` of a further pool; an Envoy
    route says which."""
    state: Literal["redis", "memory"] = "redis"
    """``memory``: one router polls the replicas itself and shares nothing; it needs no Redis."""
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
        """Those that name an objective; the first that is there counts."""
        return self._believed(self.hold.objective_header, OBJECTIVE)

    @cached_property
    def tenant_headers(self) -> tuple[str, ...]:
        """Those that name a tenant, likewise."""
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
