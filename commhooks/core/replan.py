"""When links no longer run as planned: what the network looks like now, and whether another plan is worth it.

Where in the flow: measured flows -> **replan** -> treegen -> plan, at one agreed step.

Invariants: pure; deterministic on equal input (all ranks feed the same sums, so all decide alike); every decision has its
reason.

A flow tells its network's capacity only while it is backlogged, i.e. while the network and not the sender is the limit.  What
several backlogged flows carry together over a resource is then that resource's capacity, if it is the one that limits them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from commhooks.core.plan import Plan
from commhooks.core.topology import Resource, Topology

OFF_BY = 1.25  # measured against assumed capacity: beyond this factor a resource has changed
ALIKE = 1.05  # uses of two resources within this factor are called equal
WORTH = 1.2  # a new plan must be this much faster than the old one on the network as it is now
WINDOWS = 2  # in a row that must agree before anything is done
MOSTLY_BACKLOGGED = 0.5  # share of a window's communication time below which a flow is limited by its sender


@dataclass(frozen=True)
class Flow:
    """What one link carried in a window.

    Attributes
    ----------
    src, dst, channel : whose link
    bytes_per_s : rate while it was backlogged
    backlogged : share of the window's communication time that it was backlogged
    """

    src: int
    dst: int
    channel: int
    bytes_per_s: float
    backlogged: float


@dataclass(frozen=True)
class Estimate:
    """The topology as measured, and what changed (resource -> old, new capacity)."""

    topology: Topology
    changes: Mapping[str, tuple[float, float]]

    @property
    def words(self) -> str:
        """The changes, for messages."""
        return ", ".join(
            f"{name} {old / 1e6:.1f} -> {new / 1e6:.1f} MB/s" for name, (old, new) in self.changes.items()
        )


def loads(plan: Plan, topology: Topology) -> dict[str, float]:
    """For each resource, how often it carries each byte of an all-reduce under the plan."""
    load: dict[str, float] = {}
    for pair, share in zip(plan.pairs, plan.shares, strict=True):
        for tree, up in ((pair.reduce, True), (pair.broadcast, False)):
            if tree is None:
                continue
            for child, parent in enumerate(tree.parent):
                if parent >= 0:
                    ends = (child, parent) if up else (parent, child)
                    for name in topology.route_of[(*ends, tree.channel[child])].resources:
                        load[name] = load.get(name, 0.0) + share
    return load


def plan_bytes_per_s(plan: Plan, topology: Topology) -> float:
    """The rate that a plan reaches on a topology: the most loaded resource decides."""
    capacity = topology.capacity
    rates = [capacity[name] / load for name, load in loads(plan, topology).items() if load > 0]
    return min(rates, default=float("inf"))


def estimate(topology: Topology, flows: Sequence[Flow]) -> Estimate:
    """Correct the capacities that the backlogged flows contradict.

    A backlogged flow is explained when some resource of its route is used to its assumed capacity.  What isn't explained is
    blamed on as few resources as possible: first the one that most unexplained flows share.
    """
    used = _used(topology, flows)
    changes: dict[str, tuple[float, float]] = {}
    capacity = dict(topology.capacity)
    for name, amount in sorted(used.items()):
        if amount > OFF_BY * capacity[name]:  # carries more than it was thought to be able to
            changes[name] = (capacity[name], amount)
            capacity[name] = amount
    unexplained = [
        flow for flow in flows if _is_limited(flow) and not _explained(topology, flow, used, capacity)
    ]
    while unexplained:
        for name in _shared_by_most(topology, unexplained, used, capacity):
            changes[name] = (topology.capacity[name], used[name])
            capacity[name] = used[name]
        unexplained = [flow for flow in unexplained if not set(_resources(topology, flow)) & set(changes)]
    resources = tuple(Resource(r.name, capacity[r.name]) for r in topology.resources)
    return Estimate(replace(topology, resources=resources), changes)


def _is_limited(flow: Flow) -> bool:
    return flow.backlogged >= MOSTLY_BACKLOGGED and flow.bytes_per_s > 0


def _resources(topology: Topology, flow: Flow) -> tuple[str, ...]:
    route = topology.route_of.get((flow.src, flow.dst, flow.channel))
    return route.resources if route is not None else ()


def _used(topology: Topology, flows: Sequence[Flow]) -> dict[str, float]:
    used: dict[str, float] = {}
    for flow in flows:
        for name in _resources(topology, flow):
            used[name] = used.get(name, 0.0) + flow.bytes_per_s
    return used


def _explained(
    topology: Topology, flow: Flow, used: Mapping[str, float], capacity: Mapping[str, float]
) -> bool:
    return any(used[name] * OFF_BY >= capacity[name] for name in _resources(topology, flow))


def _shared_by_most(
    topology: Topology, flows: Sequence[Flow], used: Mapping[str, float], capacity: Mapping[str, float]
) -> list[str]:
    """The resource on most of the flows' routes; among equals the one closest to its capacity.

    Resources that can't be told apart (they carry the same flows, equally used) are blamed together: a plan that spares both
    ends is right whichever it was.
    """
    carried: dict[str, frozenset[int]] = {}
    for name in {name for flow in flows for name in _resources(topology, flow)}:
        carried[name] = frozenset(at for at, flow in enumerate(flows) if name in _resources(topology, flow))
    ratio = {name: used[name] / capacity[name] for name in carried}
    best = min(carried, key=lambda name: (-len(carried[name]), -ratio[name], name))
    return sorted(
        name for name in carried if carried[name] == carried[best] and ratio[name] >= ratio[best] / ALIKE
    )


@dataclass(frozen=True)
class Verdict:
    """Whether to plan again, for which network, and why."""

    estimate: Estimate | None
    reason: str

    @property
    def plan_again(self) -> bool:
        """Whether a new plan should be made."""
        return self.estimate is not None


class Monitor:
    """Watches windows of flows until they contradict the topology often enough in a row."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._suspicions = 0

    def window(self, flows: Sequence[Flow]) -> Verdict:
        """Take one window's flows in."""
        measured = estimate(self.topology, flows)
        if not measured.changes:
            self._suspicions = 0
            return Verdict(None, "links run as planned")
        self._suspicions += 1
        if self._suspicions < WINDOWS:
            return Verdict(None, f"seen {self._suspicions} of {WINDOWS} times in a row: {measured.words}")
        self._suspicions = 0
        return Verdict(measured, measured.words)

    def accept(self, topology: Topology) -> None:
        """From now on, this is what is assumed."""
        self.topology = topology
        self._suspicions = 0


def worth_it(old: Plan, new: Plan, topology: Topology) -> tuple[bool, str]:
    """Whether to switch, on the network as it is now."""
    before, after = plan_bytes_per_s(old, topology), plan_bytes_per_s(new, topology)
    gain = after / before if before > 0 else float("inf")
    words = f"{before / 1e6:.1f} MB/s with the old plan, {after / 1e6:.1f} MB/s with a new one"
    return gain >= WORTH, f"{words} ({gain:.2f}x; {WORTH:.2f}x is worth a switch)"
