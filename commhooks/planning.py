"""From settings to a plan: which topology, and which planner.

Where in the flow: config + host labels -> **planning** -> plan (rank 0; the others receive it).

Invariants: every choice has its reason in the plan; a topology for another number of ranks is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from commhooks.config import Config
from commhooks.core.plan import Plan, make_plan, ring_plan, star_plan
from commhooks.core.planner import ring_bytes_per_s
from commhooks.core.topology import Resource, Route, Topology
from commhooks.core.topology_readers import parse_topology
from commhooks.errors import TopologyError
from commhooks.startup import Planned, Planner

# Only the ratio matters where nothing was measured: memory is an order of magnitude faster than a network card.
_NOMINAL_NIC_BYTES_PER_S = 1e9 / 8
_NOMINAL_MEMORY_BYTES_PER_S = 10e9


def planner_for(config: Config, world_size: int) -> Planner:
    """The planner that `Engine.start` calls on rank 0 with every rank's host label."""

    def planner(hosts: Sequence[str], collective: str, root: int | None) -> Planned:
        plan = plan_for(config, world_size, hosts, collective, root)
        if config.topology == "uniform":
            return Planned(plan, 0.0, None)
        topology = read_topology(config.topology, world_size)
        return Planned(plan, ring_bytes_per_s(topology) or 0.0, topology)

    return planner


def plan_for(
    config: Config,
    world_size: int,
    hosts: Sequence[str],
    collective: str = "all_reduce",
    root: int | None = None,
) -> Plan:
    """Plan a collective.

    Raises
    ------
    TopologyError
        The topology is unknown, malformed, or for another number of ranks.
    """
    if collective == "all_reduce" and (config.schedule == "ring" or world_size == 1):
        return ring_plan(world_size)
    if config.topology != "uniform":
        return make_plan(read_topology(config.topology, world_size), collective, root)
    if collective == "all_reduce":
        return _uniform(hosts)
    return make_plan(host_topology(hosts), collective, root)


def read_topology(text: str, world_size: int) -> Topology:
    """A topology string, or the file that `text` names."""
    path = Path(text)
    topology = parse_topology(path.read_text() if path.is_file() else text, world_size)
    if topology.world_size != world_size:
        raise TopologyError(
            f"COMMHOOKS_TOPOLOGY={text!r} describes {topology.world_size} ranks, but the group has {world_size}; "
            "give one NIC per rank, or 'uniform'"
        )
    return topology


def _uniform(hosts: Sequence[str]) -> Plan:
    """Nothing is known but who shares a host."""
    sizes = Counter(hosts)
    if len(sizes) == 1:
        return star_plan(len(hosts))
    if len(sizes) == len(hosts):
        return ring_plan(len(hosts))
    return make_plan(host_topology(hosts))


def host_topology(hosts: Sequence[str]) -> Topology:
    """One network card per host, shared by its ranks; memory inside."""
    names = sorted(set(hosts), key=list(hosts).index)
    resources: list[Resource] = []
    for number in range(len(names)):
        resources.append(Resource(f"host{number}:up", _NOMINAL_NIC_BYTES_PER_S))
        resources.append(Resource(f"host{number}:down", _NOMINAL_NIC_BYTES_PER_S))
        resources.append(Resource(f"host{number}:memory", _NOMINAL_MEMORY_BYTES_PER_S))
    routes: list[Route] = []
    for src, src_host in enumerate(hosts):
        for dst, dst_host in enumerate(hosts):
            if src == dst:
                continue
            here, there = names.index(src_host), names.index(dst_host)
            way = (f"host{here}:memory",) if here == there else (f"host{here}:up", f"host{there}:down")
            routes.append(Route(src, dst, 0, way))
    return Topology(
        "hosts", len(hosts), tuple(resources), tuple(routes), tuple(f"host{names.index(h)}" for h in hosts)
    )
