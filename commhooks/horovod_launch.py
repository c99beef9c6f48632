"""A Horovod job under torchrun: its variables from torchrun's.

Where in the flow: torchrun -> ``commhooks.horovod.init`` -> **launch** -> Horovod's own start.  Plain torchrun makes every
Horovod process rank 0 of 1, without a word.

Invariants: pure; a job that Horovod's (or MPI's) launcher started is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from commhooks.errors import ConfigError

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OTHER_LAUNCHERS = ("HOROVOD_RANK", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


@dataclass(frozen=True)
class Place:
    """A rank's place: its number, its number on its host, and how many share that host."""

    rank: int
    local_rank: int
    local_size: int


@dataclass(frozen=True)
class Server:
    """Where Horovod's rendezvous server listens."""

    host: str
    port: int


def started_by_torchrun(environ: Mapping[str, str]) -> bool:
    """Whether torchrun's variables are there and no other launcher's."""
    return all(name in environ for name in _NEEDED) and not any(name in environ for name in _OTHER_LAUNCHERS)


def own_place(environ: Mapping[str, str]) -> Place:
    """This process's place according to torchrun.

    Raises
    ------
    ConfigError
        A variable is no number.
    """
    try:
        rank = int(environ["RANK"])
        return Place(rank, int(environ.get("LOCAL_RANK", 0)), int(environ.get("LOCAL_WORLD_SIZE", 1)))
    except ValueError as error:
        raise ConfigError(f"torchrun's variables RANK, LOCAL_RANK, LOCAL_WORLD_SIZE: {error}") from None


def hosts_of(places: Sequence[Place]) -> list[int]:
    """Each rank's host number: a host's ranks follow each other, its first has local rank 0."""
    hosts: list[int] = []
    for place in places:
        hosts.append((hosts[-1] if hosts else -1) + (place.local_rank == 0))
    return hosts


def horovod_variables(
    places: Sequence[Place], rank: int, server: Server, interface: str | None
) -> dict[str, str]:
    """Horovod's variables for one rank.

    Parameters
    ----------
    places : all ranks', in rank order
    rank : whose variables
    server : the rendezvous server
    interface : the network interface for Gloo; None lets Gloo choose
    """
    hosts = hosts_of(places)
    own = places[rank]
    crossing = [host for host, place in zip(hosts, places, strict=True) if place.local_rank == own.local_rank]
    numbers = {
        "RANK": rank,
        "SIZE": len(places),
        "LOCAL_RANK": own.local_rank,
        "LOCAL_SIZE": own.local_size,
        "CROSS_RANK": crossing.index(hosts[rank]),
        "CROSS_SIZE": len(crossing),
        "HOSTNAME": f"host{hosts[rank]}",
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
        "GLOO_RENDEZVOUS_ADDR": server.host,
        "GLOO_RENDEZVOUS_PORT": server.port,
    }
    if interface:
        numbers["GLOO_IFACE"] = interface
    return {f"HOROVOD_{name}": str(value) for name, value in numbers.items()}
