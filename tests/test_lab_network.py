"""Topologies as networks: which interfaces, subnets, wires; without making any."""

import pytest

from commhooks.core.topology import Resource, Route, Topology, payload_bytes_per_s
from commhooks.core.topology_readers import parse_topology
from commhooks.errors import ConfigError, TopologyError
from commhooks.lab import parse_change, read_topology, resources_named
from commhooks.lab_environment import Place, pacing, variables
from commhooks.lab_network import commands, mbit_per_s, network_of


def network(text):
    return network_of(parse_topology(text))


def rates(text):
    net = network(text)
    return {name: round(mbit_per_s(net.topology.capacity[name]), 6) for name in net.buckets()}


def test_every_resource_is_one_bucket():
    assert rates("nic:200/50,800*2") == {
        "rank0.up": 200, "rank0.down": 50, "rank1.up": 800, "rank1.down": 800, "rank2.up": 800, "rank2.down": 800,
    }  # fmt: skip
    sites = rates("sites:2+2+2@150/600")
    assert sites["site0->site2"] == sites["site2->site1"] == 150 and sites["rank5.up"] == 600
    assert len(sites) == 6 * 2 + 6


def test_a_switch_is_one_subnet_and_sites_are_one_each():
    assert {i.subnet for i in network("nic:200,800*3").interfaces} == {0}
    dealt = network("sites:4+4@200/1000")
    assert [i.subnet for i in dealt.interfaces] == [0, 1] * 4
    assert [i.subnet for i in network("sites:2+3@200/1000;block").interfaces] == [0, 0, 1, 1, 1]
    assert dealt.paths == {(0, 1): ("site0->site1",), (1, 0): ("site1->site0",)}


def test_two_nics_are_two_interfaces_with_a_subnet_each():
    net = network("nic:200+800*2,100")
    assert [(i.rank, i.name, i.up, i.subnet) for i in net.interfaces] == [
        (0, "eth0", "rank0.up", 0), (0, "eth1", "rank0.up.1", 1),
        (1, "eth0", "rank1.up", 0), (1, "eth1", "rank1.up.1", 1),
        (2, "eth0", "rank2.up", 0),
    ]  # fmt: skip
    assert net.channels == ((0, 1), (0, 1), (0, 0))
    assert net.fastest(0).name == "eth1" and net.fastest(2).name == "eth0"


def test_two_ranks_alone_are_a_network_too():
    """Each NIC is used by one rank only in both directions here, which must not be mistaken for a shared cut."""
    assert not network("nic:200,800").wires
    net = network("sites:1+1@100/1000")
    assert list(net.wires) == ["site0->site1", "site1->site0"]


def file_topology(routes, names):
    resources = tuple(Resource(name, payload_bytes_per_s(100.0)) for name in names)
    ranks = 1 + max(max(src, dst) for src, dst, _ in routes)
    return Topology(
        "file",
        ranks,
        resources,
        tuple(Route(src, dst, 0, names) for src, dst, names in routes),
        tuple(f"h{r}" for r in range(ranks)),
    )


def test_a_path_may_lead_through_several_shared_cuts():
    """Racks with an uplink and a downlink each: crossing traffic loads both."""
    rack = (0, 0, 1, 1)
    routes = [
        (
            a,
            b,
            (f"u{a}", *((f"rack{rack[a]}.up", f"rack{rack[b]}.down") if rack[a] != rack[b] else ()), f"d{b}"),
        )
        for a in range(4)
        for b in range(4)
        if a != b
    ]
    names = [f"{d}{r}" for r in range(4) for d in "ud"] + [
        f"rack{r}.{d}" for r in (0, 1) for d in ("up", "down")
    ]
    net = network_of(file_topology(routes, names))
    assert net.paths == {(0, 1): ("rack0.up", "rack1.down"), (1, 0): ("rack1.up", "rack0.down")}
    rules = [
        line
        for line in commands(net, {None: "c", **{r: f"r{r}" for r in range(4)}}).ip[None]
        if "rule" in line
    ]
    assert len(rules) == 4 and sum("iif site" in line for line in rules) == 2


def test_a_nic_that_both_directions_share_is_a_wire():
    """Half duplex: one resource up and down.  It can't be a NIC direction, so it is a cut that all its routes cross."""
    net = network_of(file_topology([(0, 1, ("n0", "n1")), (1, 0, ("n1", "n0"))], ["n0", "n1"]))
    assert set(net.wires) <= {"n0", "n1"} and set(net.buckets()) == {"n0", "n1"}


@pytest.mark.parametrize(
    ("text", "words"),
    [("dgx-1v", "isn't a network"), ("nic:100000,100000", "faster than"), ("nic:10*251", "251 ranks")],
)
def test_what_no_network_can_be_is_refused(text, words):
    with pytest.raises(TopologyError, match=words):
        network(text)


def test_ranks_without_a_route_are_refused():
    with pytest.raises(TopologyError, match="no route 1->0"):
        network_of(file_topology([(0, 1, ("a",))], ["a"]))


def test_two_ways_over_the_same_nics_are_refused():
    both = [Route(0, 1, 0, ("u", "x", "d")), Route(0, 1, 1, ("u", "y", "d"))]
    back = [Route(1, 0, 0, ("v", "e")), Route(1, 0, 1, ("v", "e"))]
    resources = tuple(Resource(name, 1e7) for name in "uvxyde")
    with pytest.raises(TopologyError, match="only one way"):
        network_of(Topology("file", 2, resources, tuple(both + back), ("a", "b")))


def test_a_nic_that_is_half_another_one_is_refused():
    routes = [Route(0, 1, 0, ("u", "d")), Route(0, 1, 1, ("x", "d"))]
    routes += [Route(1, 0, channel, ("v", "e")) for channel in (0, 1)]
    resources = tuple(Resource(name, 1e7) for name in "uvxde")
    with pytest.raises(TopologyError, match="'e' is in two NICs of rank 0"):
        network_of(Topology("file", 2, resources, tuple(routes), ("a", "b")))


def test_the_text_of_a_topology(tmp_path):
    with pytest.raises(TopologyError, match="nic:800\\*4"):
        read_topology("uniform")
    with pytest.raises(TopologyError, match="not known"):
        read_topology("nothing")
    path = tmp_path / "net.json"
    import json

    path.write_text(json.dumps(parse_topology("nic:200,800").to_json()))
    text, topology = read_topology(str(path))
    assert text == str(path) and topology.world_size == 2


def test_resources_are_named_exactly_by_pattern_or_as_the_wan():
    net = network("sites:2+2@200/1000")
    assert [r.name for r in resources_named(net, "wan")] == ["site0->site1", "site1->site0"]
    assert [r.name for r in resources_named(net, "rank1.*")] == ["rank1.up", "rank1.down"]
    assert [r.name for r in resources_named(net, "site1->site0")] == ["site1->site0"]
    with pytest.raises(TopologyError, match=r"'rank9.up'; there are .*rank0.up.*wan"):
        resources_named(net, "rank9.up")


def test_changes():
    change = parse_change("2.5:site0->site1=100")
    assert (change.after_s, change.resource, change.mbit_per_s) == (2.5, "site0->site1", 100)
    for wrong in (
        "",
        "5",
        "5:wan",
        "5:wan=",
        "5:=3",
        "wan=100",
        "-1:wan=100",
        "5:wan=0",
        "5:wan=-3",
        "x:wan=1",
    ):
        with pytest.raises(ConfigError, match="SECONDS:RESOURCE=MBIT"):
            parse_change(wrong)


def test_the_environment_of_a_rank():
    net = network("nic:200+800*2,100")
    base = {"OMP_NUM_THREADS": "3", "GLOO_SOCKET_IFNAME": "eth9", "RANK": "7", "HOME": "/root"}
    environ = variables(Place.emulated(net, 2, 29500), "nic:…", base)
    assert {n: environ[n] for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")} == {
        "RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "2",
    }  # fmt: skip
    assert (environ["GLOO_SOCKET_IFNAME"], environ["COMMHOOKS_INTERFACE"]) == ("eth0", "eth0,eth0")
    assert environ["MASTER_ADDR"] == "10.77.1.1" and environ["MASTER_PORT"] == "29500"
    assert environ["OMP_NUM_THREADS"] == "3" and environ["HOME"] == "/root"
    assert environ["COMMHOOKS_TOPOLOGY"] == "nic:…"
    assert (
        variables(Place.emulated(net, 0, 1), "x", {"COMMHOOKS_TOPOLOGY": "probe"})["COMMHOOKS_TOPOLOGY"]
        == "probe"
    )


def test_pacing_is_the_narrowest_resource_to_each_peer():
    assert pacing(network("nic:200,800,800"), 1) == {
        "pacing_bytes_per_s": {"0": payload_bytes_per_s(200), "2": payload_bytes_per_s(800)}
    }
