"""State-of-the-world xDS, for one stream: what Envoy asked for, was sent, and took or refused.

Protocol: https://www.envoyproxy.io/docs/envoy/latest/api-docs/xds_protocol
"""

import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from envoy_data_plane.envoy.service.discovery.v3 import DiscoveryRequest, DiscoveryResponse
from envoy_data_plane.google.protobuf import Any

from extproc.xds.catalog import CLUSTERS, ENDPOINTS, LISTENERS, ROUTES, WILDCARDS, Catalog

logger = logging.getLogger(__name__)

_ORDER = (CLUSTERS, ENDPOINTS, LISTENERS, ROUTES)
"""What is named comes before what names it."""


@dataclass(slots=True)
class _Subscription:
    names: frozenset[str]
    nonce: str = ""
    """Of the last response."""
    sent: str | None = None
    """Version in it; None: to be sent, whatever Envoy has."""
    answered: bool = True
    """Whether Envoy said if it took that."""


class Subscriptions:
    """What one stream is subscribed to."""

    def __init__(self, catalog: Catalog, peer: str) -> None:
        self._catalog = catalog
        self._peer = peer
        self._node = ""
        self._by_type: dict[str, _Subscription] = {}
        self._nonces = itertools.count(1)

    def take(self, request: DiscoveryRequest) -> None:
        """A first request subscribes; later ones answer the last response, or ask for more."""
        if request.node is not None and request.node.id:
            self._node = request.node.id
        names = frozenset(request.resource_names)
        subscription = self._by_type.get(request.type_url)
        if subscription is None:
            self._by_type[request.type_url] = _Subscription(names)
            self._warn_of_unknown(request.type_url, names)
            return
        if request.response_nonce != subscription.nonce:
            return  # older than the last response, which Envoy will answer too
        self._warn_of_unknown(request.type_url, names - subscription.names)
        subscription.names = names
        if request.error_detail is not None and not subscription.answered:
            extra = self._of(request.type_url) | {"reason": request.error_detail.message}
            logger.error("envoy refused what it was sent", extra=extra)
        subscription.answered = True

    def due(self) -> Iterator[DiscoveryResponse]:
        """What Envoy does not have yet; a version that it refused is not sent again."""
        for type_url in _ORDER:
            subscription = self._by_type.get(type_url)
            if subscription is None:
                continue
            selected = self._catalog.select(type_url, subscription.names)
            if selected is None or selected.version == subscription.sent:
                continue
            subscription.nonce = str(next(self._nonces))
            subscription.sent = selected.version
            subscription.answered = False
            if type_url == CLUSTERS and ENDPOINTS in self._by_type:
                # A cluster that changed waits for endpoints, though these did not change.
                self._by_type[ENDPOINTS].sent = None
            yield DiscoveryResponse(
                version_info=selected.version,
                resources=[Any(type_url=type_url, value=value) for value in selected.resources],
                type_url=type_url,
                nonce=subscription.nonce,
            )

    def _warn_of_unknown(self, type_url: str, names: frozenset[str]) -> None:
        served = self._catalog.names(type_url)
        if unknown := sorted(names - set(served) - {"*"}):
            extra = {"asked": ", ".join(unknown), "served": ", ".join(served) or "nothing"}
            logger.warning("envoy asks for what is not served", extra=extra | self._of(type_url))
        elif not served and type_url in WILDCARDS:
            extra = {"asked": "all", "served": "nothing: set xds.envoy_file"}
            logger.warning("envoy asks for what is not served", extra=extra | self._of(type_url))

    def _of(self, type_url: str) -> dict[str, str]:
        kind = type_url.rpartition(".")[2]
        return {"type": kind, "node": self._node, "peer": self._peer}
