"""What the network is, inferred from how fast flows went alone and together.

Where in the flow: probe (runs the rounds that ``survey`` asks for) -> **inference** -> ``topology`` -> ``planner``.

The model: each *node* (one interface of one host) has a capacity up and a capacity down; nodes fall into *sites*, and between
two sites there may be a shared cut per direction; where single flows between two sites are slower than the cut, each pair
has a *path* of its own as well (a per-flow limit).

Every rate that was seen is at most what the network can do, and on a busy machine often less, so capacities are the
largest sums ever seen; sites are groups of nodes that are slow towards the same others.

Invariants: pure; the same observations give the same topology.

Source: hierarchical grouping by what flows take from each other is the usual way of network tomography from end hosts;
the decision rules and thresholds here are our own.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from commhooks.core.topology import Resource, Route, Topology

# A flow below this share of what both ends can do met something on its way.  Measuring errs by some per cent.
DOUBT = 0.85
# A cut is believed when all flows together stay below this share of what the nodes could do.
CUT = 0.9
# Where no single flow was slow, only a sum this much below shows a cut.
CLEAR_CUT = 0.7
# Two nodes belong together when they differ in their doubts about less than this share of the others.
ALIKE = 0.35
# Capacities that differ by less than this are one capacity: equal cards are the rule, and equal numbers make simpler trees.
LEVEL = 0.06


class Flow(NamedTuple):
    """Bytes from one node to another."""

    src: int
    dst: int


@dataclass(frozen=True)
class Seen:
    """The rates of flows that ran at the same time, in payload bytes/s."""

    flows: tuple[Flow, ...]
    bytes_per_s: tuple[float, ...]

    @property
    def pairs(self) -> Iterable[tuple[Flow, float]]:
        """Each flow and its rate."""
        return zip(self.flows, self.bytes_per_s, strict=True)


@dataclass(frozen=True)
class Estimate:
    """A network of nodes.

    Attributes
    ----------
    up, down : of each node, bytes/s
    site : of each node; sites are numbered by their first node
    cuts : bytes/s of each direction between two sites that is narrower than the nodes
    paths : bytes/s of single flows that are narrower than all that
    rates : the best rate seen of each flow
    """

    up: tuple[float, ...]
    down: tuple[float, ...]
    site: tuple[int, ...]
    cuts: dict[tuple[int, int], float]
    paths: dict[Flow, float]
    rates: dict[Flow, float]


# --- From observations to numbers --------------------------------------------------------------------------------------


def best_rates(seen: Sequence[Seen]) -> dict[Flow, float]:
    """The best rate of each flow in any round."""
    best: dict[Flow, float] = {}
    for each in seen:
        for flow, rate in each.pairs:
            best[flow] = max(rate, best.get(flow, 0.0))
    return best


def nics(nodes: int, seen: Sequence[Seen]) -> tuple[list[float], list[float]]:
    """What each node has sent and received at most, over all its flows of a round."""
    up, down = [0.0] * nodes, [0.0] * nodes
    for each in seen:
        out, into = [0.0] * nodes, [0.0] * nodes
        for flow, rate in each.pairs:
            out[flow.src] += rate
            into[flow.dst] += rate
        up = [max(pair) for pair in zip(up, out, strict=True)]
        down = [max(pair) for pair in zip(down, into, strict=True)]
    return up, down


def doubts(nodes: int, seen: Sequence[Seen]) -> set[Flow]:
    """Flows that never reached what both their ends can do."""
    up, down = nics(nodes, seen)
    return {
        flow for flow, rate in best_rates(seen).items() if rate < DOUBT * min(up[flow.src], down[flow.dst])
    }


def sites_of(nodes: int, doubtful: set[Flow], *, strict: bool) -> tuple[int, ...]:
    """Group nodes that are slow towards the same others.

    Parameters
    ----------
    doubtful : flows that were slower than their ends
    strict : never put two nodes together that are slow between themselves

    Returns
    -------
    tuple of int
        The site of each node.  O(nodes^3).
    """
    slow = {frozenset(flow) for flow in doubtful}
    groups = [[node] for node in range(nodes)]
    while len(groups) > 1:
        distance, one, other = min(
            (_distance(a, b, slow, nodes, strict), i, j)
            for (i, a), (j, b) in combinations(enumerate(groups), 2)
        )
        if distance >= ALIKE:
            break
        groups[one] = sorted(groups[one] + groups.pop(other))
    groups.sort()
    return tuple(next(s for s, group in enumerate(groups) if node in group) for node in range(nodes))


def _distance(
    group: Sequence[int], other: Sequence[int], slow: set[frozenset[int]], nodes: int, strict: bool
) -> float:
    """Average share of other nodes about which two groups' members differ."""
    total = 0.0
    for a in group:
        for b in other:
            apart = frozenset((a, b)) in slow
            if apart and strict:
                return 1.0
            rest = [k for k in range(nodes) if k not in (a, b)]
            differ = sum((frozenset((a, k)) in slow) != (frozenset((b, k)) in slow) for k in rest)
            total += (differ + apart) / (nodes - 1)
    return total / (len(group) * len(other))


def fair_rates(ways: Sequence[Sequence[str]], capacity: Mapping[str, float]) -> list[float]:
    """Max-min fair rates of flows that run at the same time (progressive filling); O(flows * resources).

    Parameters
    ----------
    ways : the resources of each flow
    capacity : of each resource, bytes/s
    """
    left = dict(capacity)
    rates = [0.0] * len(ways)
    growing = set(range(len(ways)))
    while growing:
        users: dict[str, int] = {}
        for flow in growing:
            for name in ways[flow]:
                users[name] = users.get(name, 0) + 1
        step, full = min((left[name] / count, name) for name, count in users.items())
        for flow in growing:
            rates[flow] += step
        for name, count in users.items():
            left[name] -= step * count
        growing -= {flow for flow in growing if full in ways[flow]}
    return rates


def estimate(nodes: int, seen: Sequence[Seen], site: Sequence[int], believe: float = CUT) -> Estimate:
    """Put numbers to a grouping.

    Parameters
    ----------
    nodes : how many
    seen : all rounds
    site : of each node
    believe : the share of the nodes' own capacity below which a sum of flows shows a cut
    """
    up, down = nics(nodes, seen)
    rates = best_rates(seen)
    cuts: dict[tuple[int, int], float] = {}
    paths: dict[Flow, float] = {}
    for between in sorted({(site[a], site[b]) for a, b in rates if site[a] != site[b]}):
        width = max(_crossing(each, site, between)[1] for each in seen)
        needed = max((_without_cut(each, site, between, up, down) for each in seen), default=0.0)
        if width < believe * needed:
            cuts[between] = width
        paths |= _paths(between, rates, seen, site, up, down, width)
    levels = _levels([*up, *down])
    cut_levels = _levels(list(cuts.values()))
    return Estimate(
        tuple(levels[rate] for rate in up),
        tuple(levels[rate] for rate in down),
        tuple(site),
        {between: cut_levels[width] for between, width in cuts.items()},
        paths,
        rates,
    )


def _crossing(each: Seen, site: Sequence[int], between: tuple[int, int]) -> tuple[list[Flow], float]:
    """The flows of a round from one site to another, and their sum."""
    crossing = [(flow, rate) for flow, rate in each.pairs if (site[flow.src], site[flow.dst]) == between]
    return [flow for flow, _ in crossing], sum(rate for _, rate in crossing)


def _without_cut(
    each: Seen, site: Sequence[int], between: tuple[int, int], up: Sequence[float], down: Sequence[float]
) -> float:
    """What the crossing flows of a round would carry if only the nodes limited them.

    0 for rounds that don't tell, because other flows take from the same nodes.
    """
    flows, _ = _crossing(each, site, between)
    sources, targets = {flow.src for flow in flows}, {flow.dst for flow in flows}
    others = [f for f in each.flows if f not in flows and (f.src in sources or f.dst in targets)]
    if others or not flows:
        return 0.0
    capacity = {f"u{n}": rate for n, rate in enumerate(up)} | {f"d{n}": rate for n, rate in enumerate(down)}
    return sum(fair_rates([(f"u{flow.src}", f"d{flow.dst}") for flow in flows], capacity))


def _paths(
    between: tuple[int, int],
    rates: Mapping[Flow, float],
    seen: Sequence[Seen],
    site: Sequence[int],
    up: Sequence[float],
    down: Sequence[float],
    width: float,
) -> dict[Flow, float]:
    """Per-flow limits between two sites: where a flow alone got less than the cut and its ends allow."""
    alone = [
        rate / min(up[flow.src], down[flow.dst], width)
        for each in seen
        for flow, rate in each.pairs
        if (site[flow.src], site[flow.dst]) == between
        and sum((site[f.src], site[f.dst]) == between for f in each.flows) == 1
    ]
    if not alone or max(alone) >= DOUBT:
        return {}
    flows = [f for f in rates if (site[f.src], site[f.dst]) == between]
    fastest = max(rates[f] for f in flows)
    return {f: fastest if rates[f] > DOUBT * fastest else rates[f] for f in flows}


def _levels(rates: Sequence[float]) -> dict[float, float]:
    """For each rate the median of those that are nearly equal to it."""
    level: dict[float, float] = {}
    group: list[float] = []
    for rate in [*sorted(rates), float("inf")]:
        if group and rate > group[0] * (1 + LEVEL):
            middle = statistics.median(group)
            level |= dict.fromkeys(group, middle)
            group = []
        group.append(rate)
    return level


# --- From numbers to a topology ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rail:
    """One channel between hosts, measured.

    Attributes
    ----------
    port : for each host the name of its interface on this channel; channels over one interface have the same
    estimate : of the nodes, which are the hosts in order
    """

    port: tuple[str, ...]
    estimate: Estimate


def topology_of(
    name: str,
    host_of: Sequence[int],
    host_names: Sequence[str],
    rails: Sequence[Rail],
    memory_bytes_per_s: Sequence[float],
) -> Topology:
    """Ranks on measured hosts.

    Parameters
    ----------
    name : for people
    host_of : the host of each rank
    host_names : a name for each host
    rails : one per channel
    memory_bytes_per_s : of each host, what its ranks copy from each other at once; unused for a rank alone
    """
    cards = _Cards(host_of, rails)
    resources = dict(cards.capacity)
    for host, rate in enumerate(memory_bytes_per_s):
        if list(host_of).count(host) > 1:
            resources[f"host{host}.memory"] = rate
    routes: list[Route] = []
    for src, here in enumerate(host_of):
        for dst, there in enumerate(host_of):
            if src == dst:
                continue
            if here == there:
                routes.append(Route(src, dst, 0, (f"host{here}.memory",)))
                continue
            for channel in range(len(rails)):
                routes.append(Route(src, dst, channel, cards.way(here, there, channel)))
    used = {name for route in routes for name in route.resources}
    kept = tuple(Resource(n, rate) for n, rate in resources.items() if n in used)
    return Topology(name, len(host_of), kept, tuple(routes), tuple(host_names[h] for h in host_of))


class _Cards:
    """Names and capacities of what lies between hosts."""

    def __init__(self, host_of: Sequence[int], rails: Sequence[Rail]) -> None:
        self._rails = rails
        self._label = [
            f"rank{list(host_of).index(h)}" if list(host_of).count(h) == 1 else f"host{h}"
            for h in range(max(host_of) + 1)
        ]
        self._index: dict[tuple[int, str], int] = {}
        for rail in rails:
            for host, port in enumerate(rail.port):
                count = sum(other == host for other, _ in self._index)
                self._index.setdefault((host, port), count)
        self.capacity: dict[str, float] = {}
        for channel, rail in enumerate(rails):
            self._measure(channel, rail)

    def _measure(self, channel: int, rail: Rail) -> None:
        found = rail.estimate
        for host in range(len(rail.port)):
            for direction, rates in (("up", found.up), ("down", found.down)):
                name = self._nic(host, channel, direction)
                self.capacity[name] = max(rates[host], self.capacity.get(name, 0.0))
        for (a, b), width in found.cuts.items():
            self.capacity[f"site{a}->site{b}" + _suffix(channel)] = width
        for flow, width in found.paths.items():
            self.capacity[self._path(flow, channel)] = width

    def _nic(self, host: int, channel: int, direction: str) -> str:
        number = self._index[host, self._rails[channel].port[host]]
        return f"{self._label[host]}.{direction}" + _suffix(number)

    def _path(self, flow: Flow, channel: int) -> str:
        return f"path{flow.src}->{flow.dst}" + _suffix(channel)

    def way(self, here: int, there: int, channel: int) -> tuple[str, ...]:
        """The resources from one host to another."""
        found = self._rails[channel].estimate
        between = (found.site[here], found.site[there])
        cut = (f"site{between[0]}->site{between[1]}" + _suffix(channel),) if between in found.cuts else ()
        path = (self._path(Flow(here, there), channel),) if (here, there) in found.paths else ()
        return (self._nic(here, channel, "up"), *cut, *path, self._nic(there, channel, "down"))


def _suffix(number: int) -> str:
    return f".{number}" if number else ""


# --- The slowest ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Worst:
    """The slowest way between two ranks, and the resource that makes it slow."""

    src: int
    dst: int
    bytes_per_s: float
    resource: str
    shared_by: int  # how many ordered pairs of ranks go through that resource


def worst_link(topology: Topology) -> Worst | None:
    """The slowest pair of ranks (over its best channel); None where there is nothing to compare.

    Of equally slow pairs the one whose bottleneck most pairs share is named: that one hurts most.
    """
    users: dict[str, set[tuple[int, int]]] = {}
    ways: dict[tuple[int, int], tuple[float, str]] = {}
    for route in topology.routes:
        width, name = min((topology.capacity[n], n) for n in route.resources)
        for each in route.resources:
            users.setdefault(each, set()).add((route.src, route.dst))
        ways[route.src, route.dst] = max(ways.get((route.src, route.dst), (0.0, "")), (width, name))
    if not ways:
        return None
    (src, dst), (width, name) = min(ways.items(), key=lambda way: (way[1][0], -len(users[way[1][1]]), way[0]))
    return Worst(src, dst, width, name, len(users[name]))
