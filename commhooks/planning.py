"""From settings to a plan: which topology, and which planner.

Where in the flow: config + host labels -> **planning** -> plan (rank 0; the others receive it).

With ``topology=probe`` the ranks measure the network together before the first plan.

Invariants: every choice has its reason in the plan; a topology for another number of ranks is refused.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from commhooks import probe_cache
from commhooks.bootstrap import Rendezvous
from commhooks.config import Config
from commhooks.core.inference import worst_link
from commhooks.core.plan import Plan, make_plan, ring_plan, star_plan
from commhooks.core.planner import ring_bytes_per_s
from commhooks.core.topology import Resource, Route, Topology, rate_text
from commhooks.core.topology_readers import parse_topology
from commhooks.errors import CommhooksError, TopologyError
from commhooks.hosts import Placement
from commhooks.probing import Probe, probe
from commhooks.startup import Planned, Planner

log = logging.getLogger(__name__)

# Only the ratio matters where nothing was measured: memory is an order of magnitude faster than a network card.
_NOMINAL_NIC_BYTES_PER_S = 1e9 / 8
_NOMINAL_MEMORY_BYTES_PER_S = 10e9


def planner_for(
    config: Config, world_size: int, cache_home: str | None = None, subgroup: Subgroup | None = None
) -> Planner:
    """The planner that `Engine.start` calls on rank 0 with every rank's host label.

    Parameters
    ----------
    cache_home : where measured topologies are remembered; None: ``~/.cache``
    subgroup : which of the job's ranks these are, when not all
    """
    return NetworkPlanner(config, world_size, probe_cache.folder(cache_home), subgroup)


class Subgroup(NamedTuple):
    """Some of a job's ranks."""

    ranks: Sequence[int]
    of: int


class NetworkPlanner:
    """Plans for the topology that the settings name, or that is measured when they say ``probe``."""

    def __init__(
        self, config: Config, world_size: int, cache: Path | None, subgroup: Subgroup | None = None
    ) -> None:
        self._subgroup = subgroup
        self._config = config
        self._world_size = world_size
        self._cache = cache
        self._prepared = config.topology != "probe" or world_size == 1
        self._topology: Topology | None = None

    def prepare(self, rendezvous: Rendezvous, placements: Sequence[Placement]) -> None:
        """Measure, once (collective).

        Raises
        ------
        TopologyError, PeerLost, CommTimeout, ConfigError
            The probe failed, and ``probe_fallback`` is off.
        """
        if self._prepared:
            return
        self._prepared = True
        addresses = [address for address, _ in placements[rendezvous.rank].tcp]
        try:
            found = probe(rendezvous, self._config, addresses, self._cache)
        except CommhooksError as error:
            if not self._config.probe_fallback:
                raise
            log.warning("the network can't be measured, it is taken for uniform (probe_fallback): %s", error)
            return
        self._topology = found.topology
        if rendezvous.rank == 0:
            log.info(summary(found))

    def __call__(self, hosts: Sequence[str], collective: str, root: int | None) -> Planned:
        topology = self._topology
        if self._config.topology not in ("uniform", "probe"):
            topology = read_topology(self._config.topology, self._world_size, self._subgroup)
        plan = plan_for(self._config, self._world_size, hosts, collective, root, topology)
        native = ring_bytes_per_s(topology) if topology is not None else None
        return Planned(plan, native or 0.0, topology)


def plan_for(
    config: Config,
    world_size: int,
    hosts: Sequence[str],
    collective: str = "all_reduce",
    root: int | None = None,
    topology: Topology | None = None,
) -> Plan:
    """Plan a collective; without a topology for hosts of which nothing is known.

    Raises
    ------
    TopologyError
        The topology doesn't connect the ranks.
    """
    if collective == "all_reduce" and (config.schedule == "ring" or world_size == 1):
        return ring_plan(world_size)
    if topology is not None:
        return make_plan(topology, collective, root)
    if collective == "all_reduce":
        return _uniform(hosts)
    return make_plan(host_topology(hosts), collective, root)


def summary(found: Probe) -> str:
    """One line on what was measured."""
    worst = worst_link(found.topology)
    slowest = (
        ""
        if worst is None
        else (
            f"; slowest: {worst.src}->{worst.dst} with {rate_text(worst.bytes_per_s)}, because of {worst.resource}"
        )
    )
    how = "remembered from an earlier run" if found.cached else f"measured in {found.seconds:.1f} s"
    return f"network {how}: {len(found.topology.resources)} resources{slowest}"


def read_topology(text: str, world_size: int, subgroup: Subgroup | None = None) -> Topology:
    """A topology string, or the file that `text` names; a subgroup gets its part of the whole job's topology."""
    path = Path(text)
    topology = parse_topology(path.read_text() if path.is_file() else text)
    if subgroup is not None and topology.world_size == subgroup.of:
        return topology.subset(subgroup.ranks)
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
