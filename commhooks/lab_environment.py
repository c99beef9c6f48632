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


def variables(place: Place, topology: str, base: Mapping[str, str]) -> dict[str, str]:
    """`base` with everything set that a rank's process needs.

    Parameters
    ----------
    place
        Where the rank runs.
    topology
        The text that names the topology.
    base
        The environment to start from.
    """
    chosen = {"OMP_NUM_THREADS": "1", "COMMHOOKS_TOPOLOGY": topology}
    if len(place.interfaces) > 1:
        chosen["COMMHOOKS_INTERFACE"] = ",".join(place.interfaces)
    if place.fastest == "lo":
        chosen["COMMHOOKS_LINKS"] = "tcp"  # ranks on one host would use its memory, which no pacing slows
    fixed = {
        "RANK": place.rank,
        "WORLD_SIZE": place.world_size,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "GROUP_RANK": place.rank,
        "MASTER_ADDR": place.rendezvous,
        "MASTER_PORT": place.port,
        "GLOO_SOCKET_IFNAME": place.fastest,
    }
    return {**chosen, **base, **{name: str(value) for name, value in fixed.items()}}


def pacing(network: Network, rank: int) -> dict[str, Any]:
    """What a rank's own links must keep to where no network is emulated, in payload bytes/s.

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
