"""The hosts of Horovod's ranks: which rank is where, and whether they find each other.

Horovod's ranks listen at the address that their own host's name resolves to, there. Where that is
one that other hosts cannot reach, Horovod ends or hangs without a word; here it is said before.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Where a rank is among hosts: `local` counts the ranks of its host, `cross` the hosts that
    have a rank with the same local one."""

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def places(hosts: Sequence[str]) -> list[Place]:
    """The places of all ranks, from their host names, in the order of ranks.

    Example:
        >>> places(["a", "a", "b"])[1]
        Place(local_rank=1, local_size=2, cross_rank=0, cross_size=1)
    """
    local_ranks = [Counter(hosts[:rank])[host] for rank, host in enumerate(hosts)]
    return [
        Place(
            local_rank=local_rank,
            local_size=hosts.count(host),
            cross_rank=local_ranks[:rank].count(local_rank),
            cross_size=local_ranks.count(local_rank),
        )
        for rank, (host, local_rank) in enumerate(zip(hosts, local_ranks, strict=True))
    ]


def address_of(host: str) -> str | None:
    """What `host` resolves to on this one; None if to nothing."""
    try:
        return socket.gethostbyname(host)
    except OSError:
        return None


def own_address(alone: bool) -> str:
    """The address of this host, by its own name.

    Args:
        alone: whether all ranks are on this host.

    Raises:
        RuntimeError: it has none, or one that other hosts cannot reach.
    """
    host = socket.gethostname()
    return _reachable(host, address_of(host), alone)


def require_reachable(addresses: Mapping[str, str | None]) -> None:
    """Raise RuntimeError for the first of all hosts that the ranks on others, or its own, cannot
    reach by the address that its name has there."""
    for host, address in addresses.items():
        _reachable(host, address, alone=len(addresses) == 1)


def _reachable(host: str, address: str | None, alone: bool) -> str:
    if address is None or (not alone and address.startswith("127.")):
        raise RuntimeError(
            f"Horovod finds host {host!r} by its name, which there"
            f" {'has no address' if address is None else f'is the address {address}'}."
            f" Put a line with the address of its network and {host!r} into its /etc/hosts"
            ' (and take it off the line with 127.0.1.1), or take `transport="torch"`.'
        )
    return address
