"""The environment of a lab's rank: what a launcher would set, and what commhooks needs to know of the network.

Where in the flow: lab_network -> **lab_environment** -> the variables of each rank's process.  Pure.

Invariants: the caller's own choices (threads, topology, interface of commhooks) stay; what names the rank, the rendezvous and
the interfaces of the emulated host is always set, because the caller's values can't be right there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from commhooks.lab_network import Network


@dataclass(frozen=True)
class Place:
    """Where a rank runs.

    Attributes
    ----------
    rank, world_size : its number, and how many there are.
    interfaces : for each channel of the topology the interface to use.
    fastest : the interface for programs that can use only one.
    rendezvous, port : where rank 0 serves the launcher's store.
    """

    rank: int
    world_size: int
    interfaces: tuple[str, ...]
    fastest: str
    rendezvous: str
    port: int

    @staticmethod
    def emulated(network: Network, rank: int, port: int) -> Place:
        """A rank with a host of its own."""
        return Place(
            rank,
            network.topology.world_size,
            tuple(f"eth{number}" for number in network.channels[rank]),
            network.fastest(rank).name,
            network.fastest(0).address,
            port,
        )

    @staticmethod
    def local(rank: int, world_size: int, port: int) -> Place:
        """A rank among others on this host, joined by loopback."""
        return Place(rank, world_size, ("lo",), "lo", "127.0.0.1", port)


def variables(place: Place, topology: str | None, base: Mapping[str, str]) -> dict[str, str]:
    """`base` with everything set that a rank's process needs.

    Parameters
    ----------
    place
        Where the rank runs.
    topology
        The text that names the topology; None: the default.
    base
        The environment to start from.
    """
    chosen = {"OMP_NUM_THREADS": "1"} | ({} if topology is None else {"COMMHOOKS_TOPOLOGY": topology})
    if len(place.interfaces) > 1:
        chosen["COMMHOOKS_INTERFACE"] = ",".join(place.interfaces)
    fixed = {
        "RANK": place.rank,
        "WORLD_SIZE": place.world_size,
        **_on_host(place),
        "MASTER_ADDR": place.rendezvous,
        "MASTER_PORT": place.port,
        "GLOO_SOCKET_IFNAME": place.fastest,
    }
    return {**chosen, **base, **{name: str(value) for name, value in fixed.items()}}


def _on_host(place: Place) -> dict[str, int]:
    """A rank's number on its host: on loopback all share one, in the lab each has its own."""
    if place.fastest == "lo":
        return {"LOCAL_RANK": place.rank, "LOCAL_WORLD_SIZE": place.world_size, "GROUP_RANK": 0}
    return {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": place.rank}


def pacing(network: Network, rank: int) -> dict[str, Any]:
    """What a rank's own links must keep to where no network is emulated, in payload bytes/s.

    An approximation: each link is paced by itself (the kernel does it, per socket), so links that share a resource don't
    slow each other.

    Returns
    -------
    dict
        ``{"pacing_bytes_per_s": {peer: rate}}``: the narrowest resource on the way to each peer (as a string, for JSON).
    """
    capacity = network.topology.capacity
    rates: dict[str, float] = {}
    for route in network.topology.routes:
        if route.src == rank:
            rate = min(capacity[name] for name in route.resources)
            rates[str(route.dst)] = rates.get(str(route.dst), 0.0) + rate
    return {"pacing_bytes_per_s": rates}
