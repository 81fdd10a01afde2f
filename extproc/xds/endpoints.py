"""A pool's replicas as the resource that EDS serves."""

from collections.abc import Iterable
from functools import lru_cache

from betterproto2 import encode_varint
from envoy_data_plane.envoy.config.core.v3 import Address, Metadata, SocketAddress
from envoy_data_plane.envoy.config.endpoint.v3 import (
    ClusterLoadAssignment,
    Endpoint,
    LbEndpoint,
)
from envoy_data_plane.google.protobuf import Struct

from extproc.address import split_address
from extproc.server.messages import DESTINATION, METADATA_NAMESPACE
from extproc.xds.members import Member

_LENGTH_DELIMITED = 2
_ENDPOINTS = 2  # field of ClusterLoadAssignment
_LB_ENDPOINTS = 2  # field of LocalityLbEndpoints


def load_assignment(name: str, members: Iterable[Member]) -> bytes:
    """An encoded ``ClusterLoadAssignment``.

    To encode a member takes a millisecond, and few of a thousand change at a time. So each is
    encoded once, and they are put together as protobuf's wire format has it.
    """
    locality = b"".join(_field(_LB_ENDPOINTS, _encoded(member)) for member in members)
    return bytes(ClusterLoadAssignment(cluster_name=name)) + _field(_ENDPOINTS, locality)


@lru_cache(maxsize=16_384)
def _encoded(member: Member) -> bytes:
    host, port = split_address(member.id)
    address = Address(socket_address=SocketAddress(address=host, port_value=port))
    # For clusters that choose by metadata: each member is a subset of its own.
    own = Struct.from_dict({DESTINATION: member.id})
    return bytes(
        LbEndpoint(
            endpoint=Endpoint(address=address),
            health_status=member.health,
            metadata=Metadata(filter_metadata={METADATA_NAMESPACE: own}),
        )
    )


def _field(number: int, value: bytes) -> bytes:
    return encode_varint(number << 3 | _LENGTH_DELIMITED) + encode_varint(len(value)) + value
