"""EndpointSlices: what Kubernetes says of the pods of a Service.

Slices and not pods: they say all that matters here (address, port, readiness, whether a pod is
about to end), follow the Service's selector, and whoever reads them need not be allowed to read
pods.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from extproc.ground.address import join_address


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, alias_generator=to_camel)


class Metadata(_Part):
    """Of one slice, or of a list."""

    name: str = ""
    resource_version: str = ""


class _Conditions(_Part):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class _TargetRef(_Part):
    name: str = ""


class _Endpoint(_Part):
    addresses: tuple[str, ...]
    conditions: _Conditions = _Conditions()
    target_ref: _TargetRef = _TargetRef()


class _Port(_Part):
    name: str | None = None
    port: int | None = None


class EndpointSlice(_Part):
    """One of the slices of a Service, in discovery.k8s.io/v1."""

    metadata: Metadata = Metadata()
    address_type: str = ""
    endpoints: tuple[_Endpoint, ...] | None = None
    ports: tuple[_Port, ...] | None = None


class EndpointSliceList(_Part):
    """All of them."""

    metadata: Metadata
    items: tuple[EndpointSlice, ...] | None = None


@dataclass(frozen=True, slots=True)
class Pod:
    """A replica, as Kubernetes sees it."""

    name: str
    """Empty where the endpoint is no pod."""
    ready: bool
    """False: it is not to be used."""
    terminating: bool
    """It is about to end, and gets nothing new; it may still be serving."""


def pods_of(slices: Iterable[EndpointSlice], port: int | str) -> dict[str, Pod]:
    """The pods in all slices of a Service, by ``ip:port``; of two families, IPv4.

    The port is a pod's own, or the name by which slices have it. A pod may be in two slices for a
    moment, and the older one may say less.
    """
    slices = [one for one in slices if one.address_type in ("IPv4", "IPv6")]
    family = min((one.address_type for one in slices), default="")
    found: dict[str, Pod] = {}
    for one in slices:
        number = _number(one, port)
        if number is None or one.address_type != family:
            continue
        for endpoint in one.endpoints or ():
            address = join_address(endpoint.addresses[0], number)  # others are the same pod's
            pod = _pod(endpoint)
            other = found.get(address, pod)
            found[address] = Pod(
                pod.name, pod.ready or other.ready, pod.terminating or other.terminating
            )
    return dict(sorted(found.items()))


def _number(one: EndpointSlice, port: int | str) -> int | None:
    if isinstance(port, int):
        return port
    return next((known.port for known in one.ports or () if known.name == port), None)


def _pod(endpoint: _Endpoint) -> Pod:
    """What is not said follows: a pod is ready, and serves if it is ready.

    One that terminates is not ready, whether or not it serves still.
    """
    said = endpoint.conditions
    ready, terminating = said.ready is not False, bool(said.terminating)
    serving = ready if said.serving is None else said.serving
    return Pod(endpoint.target_ref.name, ready or (terminating and serving), terminating)
