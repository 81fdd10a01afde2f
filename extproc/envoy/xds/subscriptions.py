"""State-of-the-world xDS, for one stream: what Envoy asked for, was sent, and took or refused.

Protocol: https://www.envoyproxy.io/docs/envoy/latest/api-docs/xds_protocol
"""

import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from envoy_data_plane.envoy.service.discovery.v3 import DiscoveryRequest, DiscoveryResponse
from envoy_data_plane.google.protobuf import Any

from extproc.envoy.xds.catalog import (
    CLUSTERS,
    ENDPOINTS,
    LISTENERS,
    ROUTES,
    WILDCARDS,
    Catalog,
    Selection,
)

logger = logging.getLogger(__name__)

_ORDER = (CLUSTERS, ENDPOINTS, LISTENERS, ROUTES)
"""What is named comes before what names it."""
_NAMING_CLUSTERS = (LISTENERS, ROUTES)


@dataclass(slots=True)
class _Subscription:
    names: frozenset[str]
    nonce: str = ""
    """Of the last response."""
    sent: Selection | None = None
    """What was in it."""
    again: bool = False
    """Whether that is to be sent once more."""
    answered: bool = True
    """Whether Envoy said if it took that."""
    refused: bool = False
    """Whether it said that it did not."""

    def has(self, selected: Selection | None) -> bool:
        """Whether Envoy took just these; or there is nothing to take."""
        taken = self.answered and not self.refused
        return selected is None or (taken and self.sent == selected)


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
        if subscription.answered:
            return  # it only asks for more, or repeats itself
        subscription.answered, subscription.refused = True, request.error_detail is not None
        if request.error_detail is not None:
            extra = self._of(request.type_url) | {"reason": request.error_detail.message}
            logger.error("envoy refused what it was sent", extra=extra)

    def due(self) -> Iterator[DiscoveryResponse]:
        """What Envoy does not have yet; a version that it refused is not sent again.

        Clusters are made before what names them changes, and broken after.
        """
        for type_url in _ORDER:
            subscription = self._by_type.get(type_url)
            if subscription is None or (type_url in _NAMING_CLUSTERS and not self._clusters_stand):
                continue
            selected = self._selected(type_url)
            if type_url == CLUSTERS:
                selected = self._with_those_still_named(selected)
            if selected is None or (selected == subscription.sent and not subscription.again):
                continue
            subscription.nonce = str(next(self._nonces))
            subscription.sent, subscription.again = selected, False
            subscription.answered = subscription.refused = False
            if type_url == CLUSTERS and ENDPOINTS in self._by_type:
                # A cluster that changed waits for endpoints, though these did not change.
                self._by_type[ENDPOINTS].again = True
            resources = [value for _, value in sorted(selected.resources.items())]
            yield DiscoveryResponse(
                version_info=selected.version,
                resources=[Any(type_url=type_url, value=value) for value in resources],
                type_url=type_url,
                nonce=subscription.nonce,
            )

    def _selected(self, type_url: str) -> Selection | None:
        subscription = self._by_type.get(type_url)
        return None if subscription is None else self._catalog.select(type_url, subscription.names)

    @property
    def _clusters_stand(self) -> bool:
        """Whether Envoy, as far as it asks here, has each cluster that there is.

        It answers no sooner than it has warmed them, that is, has their endpoints.
        """
        if (selected := self._selected(CLUSTERS)) is None:
            return True
        clusters = self._by_type[CLUSTERS]
        sent = clusters.sent.resources if clusters.sent else {}
        return clusters.answered and selected.resources.items() <= sent.items()

    def _with_those_still_named(self, selected: Selection | None) -> Selection | None:
        """And the clusters that are no more, until Envoy took what names them no longer."""
        sent = self._by_type[CLUSTERS].sent
        naming = [one for one in _NAMING_CLUSTERS if one in self._by_type]
        if selected is None or sent is None or all(map(self._is_taken, naming)):
            return selected
        return Selection({**sent.resources, **selected.resources})

    def _is_taken(self, type_url: str) -> bool:
        return self._by_type[type_url].has(self._selected(type_url))

    def _warn_of_unknown(self, type_url: str, names: frozenset[str]) -> None:
        served = self._catalog.names(type_url)
        if unknown := sorted(names - set(served) - {"*"}):
            extra = {"asked": ", ".join(unknown), "served": ", ".join(served) or "nothing"}
        elif type_url in WILDCARDS and self._catalog.select(type_url, names) is None:
            extra = {"asked": "all", "served": "nothing: set xds.envoy_file"}
        else:
            return
        logger.warning("envoy asks for what is not served", extra=extra | self._of(type_url))

    def _of(self, type_url: str) -> dict[str, str]:
        kind = type_url.rpartition(".")[2]
        return {"type": kind, "node": self._node, "peer": self._peer}
