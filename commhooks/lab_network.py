"""A topology as an emulated network: interfaces, subnets, wires, and the `ip` and `tc` commands that make them.

Where in the flow: ``core.topology`` -> **lab_network** -> lab (which runs the commands).  Pure: text in, text out.

How it looks: each rank has a network namespace with one interface per NIC.  All the rest is in one more namespace, the
*core*: a bridge per site and NIC (a *subnet*), and for each shared resource a *wire*, which is a pair of interfaces that
every packet of its routes goes through.  A route over several shared resources goes through several wires, one after the
other.  So whatever a topology says of NICs and shared cuts is said by the same two things.

Each direction of a NIC and each wire has a token bucket (`tc tbf`) at its sending end.  The kernel counts 14 bytes of
Ethernet header for each packet of at most 1500, hence the 1448 / 1514 of ``core.topology``.

Invariants: nothing is made outside the namespaces; a resource of the topology is one bucket, or the topology is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from commhooks.core.topology import Route, Topology, payload_bytes_per_s
from commhooks.errors import TopologyError

MOST_RANKS = 250
FASTEST_MBIT_PER_S = 40_000.0  # beyond any emulation; a topology of NVLinks is far above

# Measured with plain sockets (tests/test_lab_rates.py) from 100 to 1000 Mbit/s on a busy machine: 0.999 of the limit.  A packet
# train costs the machine, not the network, so trains are 30,000 bytes: at 15,000 an eight-rank all-reduce spends a third more
# processor time in the kernel and, on two cores, takes a tenth longer.  A bucket holds two trains, so that a timer that comes
# late loses nothing (half of that lost 2-5 %), a queue five.  Queues are a switch's, not a home router's: at 40 ms (400,000
# bytes at 80 Mbit/s) the acknowledgements of one direction wait behind the data of the other, and a flow reached half of its
# rate in its first second; at 4 ms four flows that share a cut lost whole trains and a quarter of their speed.
LEAST_BURST_BYTES = 65_536
BURST_S = 0.0005
GSO_BYTES = 30_000
LEAST_QUEUE_BYTES = 100_000
QUEUE_S = 0.006

Nic = tuple[str | None, str | None]  # names of the resources up and down; None: unlimited


@dataclass(frozen=True)
class Interface:
    """One NIC of one rank.

    Attributes
    ----------
    rank, index : whose, and its number on that rank (``eth0``, ``eth1``).
    up, down : the resources of its two directions; None where the topology has no limit.
    subnet : which subnet's bridge it is plugged into.
    """

    rank: int
    index: int
    up: str | None
    down: str | None
    subnet: int

    @property
    def name(self) -> str:
        """Its name in the rank's namespace."""
        return f"eth{self.index}"

    @property
    def port(self) -> str:
        """The name of its other end, in the core."""
        return f"r{self.rank}e{self.index}"

    @property
    def address(self) -> str:
        """Its IPv4 address."""
        return f"10.77.{self.subnet}.{self.rank + 1}"


@dataclass(frozen=True)
class Bucket:
    """Where a resource is limited: a namespace (a rank, or None for the core) and a device."""

    rank: int | None
    device: str


@dataclass(frozen=True)
class Network:
    """Everything about an emulated network that is known before it exists."""

    topology: Topology
    interfaces: tuple[Interface, ...]
    channels: tuple[tuple[int, ...], ...]  # for each rank, for each channel the number of its interface
    wires: dict[str, int] = field(default_factory=dict)  # resource -> wire number
    paths: dict[tuple[int, int], tuple[str, ...]] = field(default_factory=dict)  # (subnet, subnet) -> wires

    def of(self, rank: int) -> tuple[Interface, ...]:
        """A rank's interfaces."""
        return tuple(i for i in self.interfaces if i.rank == rank)

    def fastest(self, rank: int) -> Interface:
        """The interface with the highest rate (the first of equal ones), for programs that can use only one."""
        capacity = self.topology.capacity
        return max(
            self.of(rank),
            key=lambda i: (min(capacity.get(n or "", float("inf")) for n in (i.up, i.down)), -i.index),
        )

    def buckets(self) -> dict[str, Bucket]:
        """Where each resource is limited."""
        found = {i.up: Bucket(i.rank, i.name) for i in self.interfaces if i.up is not None}
        found |= {i.down: Bucket(None, i.port) for i in self.interfaces if i.down is not None}
        return found | {name: Bucket(None, f"w{number}a") for name, number in self.wires.items()}


def mbit_per_s(bytes_per_s: float) -> float:
    """The link rate in Mbit/s that carries a payload rate; the inverse of ``payload_bytes_per_s``."""
    return bytes_per_s / payload_bytes_per_s(1.0)


# --- From the topology to the network --------------------------------------------------------------------------------


def network_of(topology: Topology) -> Network:
    """Lay a topology out as a network.

    Raises
    ------
    TopologyError
        It isn't a network of NICs and shared cuts: too many ranks, rates that only a bus has, ranks without a route.
    """
    _check(topology)
    nics = _nics(topology)
    channels = tuple(_channels(topology, rank, nics) for rank in range(topology.world_size))
    own = [sorted(set(numbers)) for numbers in channels]
    plain = [(r, i) for r in range(topology.world_size) for i in own[r]]
    cuts = _cuts(topology, nics, channels)
    subnets = _subnets(plain, cuts)
    if len(subnets) > 250:
        raise TopologyError(f"topology {topology.name!r}: {len(subnets)} subnets; the lab can do 250")
    member = {key: number for number, keys in enumerate(subnets) for key in keys}
    interfaces = tuple(Interface(*key, *_nic_of(key, channels, nics), member[key]) for key in plain)
    _check_whole_nics(topology, interfaces)
    paths = {(member[a], member[b]): cut for (a, b), cut in cuts.items() if cut}
    used = dict.fromkeys(name for path in paths.values() for name in path)
    return Network(topology, interfaces, channels, {name: n for n, name in enumerate(used)}, paths)


def _check(topology: Topology) -> None:
    name = topology.name
    if topology.lossless or any(mbit_per_s(r.bytes_per_s) > FASTEST_MBIT_PER_S for r in topology.resources):
        raise TopologyError(
            f"topology {name!r} isn't a network: its links are faster than {FASTEST_MBIT_PER_S:g} Mbit/s or inside a "
            "machine; the lab emulates nic:…, sites:… and files made of NICs and shared cuts"
        )
    if topology.world_size > MOST_RANKS:
        raise TopologyError(f"topology {name!r}: {topology.world_size} ranks; the lab can do {MOST_RANKS}")
    empty = [r.name for r in topology.resources if r.bytes_per_s <= 0]
    if empty:
        raise TopologyError(
            f"topology {name!r}: resource {empty[0]!r} has rate 0; the lab needs rates above 0"
        )
    routed = {(r.src, r.dst) for r in topology.routes}
    for a in range(topology.world_size):
        for b in range(topology.world_size):
            if a != b and (a, b) not in routed:
                raise TopologyError(
                    f"topology {name!r} has no route {a}->{b}; in the lab every rank must reach every other one "
                    "(the launcher's store is on rank 0)"
                )


def _nics(topology: Topology) -> dict[tuple[int, int], Nic]:
    """The NIC of each (rank, channel): what all its routes begin with and no other rank's do, and likewise at the end."""
    routes_from: dict[tuple[int, int], list[Route]] = {}
    routes_to: dict[tuple[int, int], list[Route]] = {}
    users: dict[str, tuple[set[int], set[int]]] = {}
    for route in topology.routes:
        routes_from.setdefault((route.src, route.channel), []).append(route)
        routes_to.setdefault((route.dst, route.channel), []).append(route)
        for name in route.resources:
            sources, targets = users.setdefault(name, (set(), set()))
            sources.add(route.src)
            targets.add(route.dst)
    nics: dict[tuple[int, int], Nic] = {}
    for key in sorted({*routes_from, *routes_to}):
        up = {r.resources[0] for r in routes_from.get(key, ())}
        down = {r.resources[-1] for r in routes_to.get(key, ())}
        nics[key] = (
            _only(up, key[0], {name: users[name][0] for name in up}),
            _only(down, key[0], {name: users[name][1] for name in down}),
        )
    return nics


def _only(names: set[str], rank: int, users: dict[str, set[int]]) -> str | None:
    """The one name, when it is one and only this rank uses it; otherwise it is a shared cut, and the NIC unlimited."""
    if len(names) != 1:
        return None
    name = next(iter(names))
    return name if users[name] == {rank} else None


def _channels(topology: Topology, rank: int, nics: dict[tuple[int, int], Nic]) -> tuple[int, ...]:
    """For each channel the number of the rank's interface: channels over the same NIC share one."""
    numbers: dict[Nic, int] = {}
    found = []
    for channel in range(topology.channels):
        nic = nics.get((rank, channel), nics.get((rank, 0), (None, None)))
        found.append(numbers.setdefault(nic, len(numbers)))
    return tuple(found)


def _nic_of(
    key: tuple[int, int], channels: tuple[tuple[int, ...], ...], nics: dict[tuple[int, int], Nic]
) -> Nic:
    rank, index = key
    return nics.get((rank, channels[rank].index(index)), (None, None))


def _check_whole_nics(topology: Topology, interfaces: tuple[Interface, ...]) -> None:
    seen: set[str] = set()
    for interface in interfaces:
        for name in (interface.up, interface.down):
            if name in seen:
                raise TopologyError(
                    f"topology {topology.name!r}: {name!r} is in two NICs of rank {interface.rank}; channels over one NIC "
                    "must share both its directions"
                )
            if name is not None:
                seen.add(name)


Key = tuple[int, int]  # (rank, number of the interface)
Cuts = dict[tuple[Key, Key], tuple[str, ...]]


def _cuts(topology: Topology, nics: dict[Key, Nic], channels: tuple[tuple[int, ...], ...]) -> Cuts:
    """For each pair of interfaces that a route joins, the shared resources between them, in order."""
    cuts: Cuts = {}
    for route in topology.routes:
        names = list(route.resources)
        if nics[route.src, route.channel][0] is not None:
            names = names[1:]
        if names and nics[route.dst, route.channel][1] is not None:
            names = names[:-1]
        pair = (
            (route.src, channels[route.src][route.channel]),
            (route.dst, channels[route.dst][route.channel]),
        )
        if cuts.setdefault(pair, tuple(names)) != tuple(names):
            raise TopologyError(
                f"topology {topology.name!r}: two ways {route.src}->{route.dst} over the same NICs, through "
                f"{cuts[pair]} and {tuple(names)}; the lab can give a pair of NICs only one way"
            )
    return cuts


def _subnets(interfaces: list[Key], cuts: Cuts) -> list[list[Key]]:
    """Sites: interfaces with nothing shared between them and the same cuts to and from everybody else."""
    subnets: list[list[Key]] = []
    for key in interfaces:
        for members in subnets:
            if all(_alike(key, other, interfaces, cuts) for other in members):
                members.append(key)
                break
        else:
            subnets.append([key])
    return subnets


def _alike(a: Key, b: Key, interfaces: list[Key], cuts: Cuts) -> bool:
    if a[0] == b[0] or a[1] != b[1] or cuts.get((a, b)) or cuts.get((b, a)):
        return False  # one rank's two NICs, or second NICs beside first ones, would be one network
    others = [k for k in interfaces if k not in (a, b)]
    return all(_equal(cuts, (a, k), (b, k)) and _equal(cuts, (k, a), (k, b)) for k in others)


def _equal(cuts: Cuts, one: tuple[Key, Key], other: tuple[Key, Key]) -> bool:
    """Whether two pairs have the same cuts; a pair that no route joins has no opinion."""
    return one not in cuts or other not in cuts or cuts[one] == cuts[other]


# --- From the network to commands ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Commands:
    """What to feed to `ip -batch` outside, and to `ip` and `tc` and a shell inside each namespace.

    The key of a namespace is a rank, or None for the core.
    """

    outside: list[str]
    ip: dict[int | None, list[str]]
    tc: dict[int | None, list[str]]
    sysctl: dict[int | None, list[str]]


def commands(network: Network, namespace: dict[int | None, str]) -> Commands:
    """All the commands that make a network.

    Parameters
    ----------
    network
        What to make.
    namespace
        The name of each rank's namespace, and of the core's (key None).
    """
    made = Commands([f"netns add {name}" for name in namespace.values()], {}, {}, {})
    made.ip[None] = ["link set lo up"]
    made.tc[None] = []
    made.sysctl[None] = [*_QUIET, *_NO_FIREWALL, "net/ipv4/ip_forward=1"]
    made.ip[None] += [
        line for subnet in sorted({i.subnet for i in network.interfaces}) for line in _bridge(subnet)
    ]
    for rank in range(network.topology.world_size):
        made.ip[rank] = ["link set lo up"]
        made.tc[rank] = []
        made.sysctl[rank] = list(_QUIET)
        for interface in network.of(rank):
            made.outside.append(_pair(interface, namespace[rank], namespace[None]))
            made.ip[rank] += _rank_end(interface)
            made.ip[None] += [
                f"link set {interface.port} gso_max_size {GSO_BYTES} master {_bridge_name(interface.subnet)} up"
            ]
    made.ip[None] += [line for number in network.wires.values() for line in _wire(number)]
    made.ip[None] += list(_path_rules(network))
    for name, bucket in network.buckets().items():
        made.tc[bucket.rank].append(limit(bucket.device, mbit_per_s(network.topology.capacity[name]), "add"))
    return made


_QUIET = [  # no IPv6 chatter, no detours, answers only from the interface that was asked
    "net/ipv6/conf/all/disable_ipv6=1",
    "net/ipv6/conf/default/disable_ipv6=1",
    "net/ipv4/conf/all/rp_filter=0",
    "net/ipv4/conf/default/rp_filter=0",
    "net/ipv4/conf/all/send_redirects=0",
    "net/ipv4/conf/default/send_redirects=0",
    "net/ipv4/conf/all/arp_ignore=1",
    "net/ipv4/conf/all/arp_announce=2",
]


# Where the kernel has it: a bridge that shows each packet to the firewall takes a twentieth of a busy machine.
_NO_FIREWALL = [f"net/bridge/bridge-nf-call-{tables}=0" for tables in ("iptables", "ip6tables", "arptables")]


def limit(device: str, rate_mbit_per_s: float, verb: str) -> str:
    """The `tc` line that sets (``add``, ``change``) a device's token bucket."""
    bits_per_s = max(8_000, round(rate_mbit_per_s * 1e6))
    burst = max(LEAST_BURST_BYTES, round(bits_per_s / 8 * BURST_S))
    queue = max(LEAST_QUEUE_BYTES, round(bits_per_s / 8 * QUEUE_S))
    return f"qdisc {verb} dev {device} root tbf rate {bits_per_s}bit burst {burst} limit {queue}"


def _bridge_name(subnet: int) -> str:
    return f"site{subnet}"


def _gateway(subnet: int) -> str:
    return f"10.77.{subnet}.254"


def _bridge(subnet: int) -> list[str]:
    name = _bridge_name(subnet)
    return [
        f"link add name {name} type bridge stp_state 0 forward_delay 0 mcast_snooping 0",
        f"addr add {_gateway(subnet)}/24 dev {name}",
        f"link set {name} gso_max_size {GSO_BYTES} up",
    ]


def _pair(interface: Interface, rank_namespace: str, core_namespace: str) -> str:
    return (
        f"link add name {interface.name} netns {rank_namespace} type veth "
        f"peer name {interface.port} netns {core_namespace}"
    )


def _rank_end(interface: Interface) -> list[str]:
    name, gateway = interface.name, _gateway(interface.subnet)
    lines = [
        f"link set {name} gso_max_size {GSO_BYTES} up",
        f"addr add {interface.address}/24 dev {name}",
        # What is sent from this interface's address leaves by it, whatever the other interfaces reach.
        f"route add 10.77.{interface.subnet}.0/24 dev {name} src {interface.address} table {100 + interface.index}",
        f"route add default via {gateway} dev {name} table {100 + interface.index}",
        f"rule add from {interface.address} lookup {100 + interface.index} priority 100",
    ]
    return lines + ([f"route add default via {gateway} dev {name}"] if interface.index == 0 else [])


def _wire(number: int) -> list[str]:
    """Both ends of a wire, and the routing table that sends everything into it."""
    near, far, mac = f"w{number}a", f"w{number}b", f"02:77:00:00:{number >> 8:02x}:{number & 255:02x}"
    return [
        f"link add name {near} type veth peer name {far} address {mac}",
        f"link set {near} gso_max_size {GSO_BYTES} up",
        f"link set {far} gso_max_size {GSO_BYTES} up",
        f"neigh add 169.254.0.1 lladdr {mac} nud permanent dev {near}",
        f"route add default via 169.254.0.1 dev {near} onlink table {_table(number)}",
    ]


def _table(wire: int) -> int:
    return 1000 + wire


def _path_rules(network: Network) -> Iterator[str]:
    """Policy routing: at each stage of a path, by where a packet came in, into the next wire; after the last, home."""
    for (src, dst), path in sorted(network.paths.items()):
        entrances = [_bridge_name(src), *(f"w{network.wires[name]}b" for name in path)]
        for entrance, name in zip(entrances, path, strict=False):
            yield (
                f"rule add iif {entrance} from 10.77.{src}.0/24 to 10.77.{dst}.0/24 "
                f"lookup {_table(network.wires[name])} priority 1000"
            )
