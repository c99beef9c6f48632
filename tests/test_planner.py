"""The planner on the networks that decide: shapes, rates, reasons, and Blink's special cases."""

import itertools
import time

import pytest

from commhooks.core.plan import COLLECTIVES, ROOTED, make_plan, ring_plan
from commhooks.core.planner import best_packing, split_bytes
from commhooks.core.topology import Resource, Route, Topology
from commhooks.core.topology_readers import parse_topology
from commhooks.core.treegen import allreduce_bound, check
from commhooks.errors import ConfigError, TopologyError

MB = 1448 / 1514 / 8  # payload MB/s of one Mbit/s


def neighbours(plan):
    return [len({hop.rank for hop in plan.peers(r)}) for r in range(plan.world_size)]


def test_slow_nic_becomes_the_leaf_of_one_chain():
    plan = make_plan(parse_topology("nic:200,800,800,800"))
    assert len(plan.pairs) == 1
    assert neighbours(plan)[0] == 1 and sorted(neighbours(plan)) == [1, 1, 2, 2]
    assert plan.bytes_per_s == pytest.approx(200e6 * MB, rel=1e-6)
    assert "rank0" in plan.reason


@pytest.mark.parametrize("text", ["sites:4+4@200/1000", "sites:4+4@200/1000;block", "sites:3+5@200/1000"])
def test_two_sites_are_a_chain_each_and_one_crossing(text):
    topology = parse_topology(text)
    plan = make_plan(topology)
    assert len(plan.pairs) == 1
    assert max(neighbours(plan)) == 2
    tree = plan.pairs[0].reduce
    crossings = [r for r in range(8) if tree.parent[r] >= 0
                 and len(topology.route_of[r, tree.parent[r], 0].resources) == 3]  # fmt: skip
    assert len(crossings) == 1
    assert plan.bytes_per_s == pytest.approx(200e6 * MB, rel=1e-6)


@pytest.mark.parametrize("text", ["nic:800*4", "nic:800*8", "nic:200*3"])
def test_equal_nics_get_rotated_ring_pairs(text):
    plan = make_plan(parse_topology(text))
    assert plan.pairs == ring_plan(plan.world_size).pairs
    assert plan.shares == pytest.approx(ring_plan(plan.world_size).shares)
    assert plan.bytes_per_s == pytest.approx(plan.bound_bytes_per_s, rel=1e-6)


def test_uneven_nics_meet_the_formula():
    # max(M / B_min, 2 (n-1) M / sum B)
    for rates in ([200, 800, 800, 800], [600, 800, 800, 800], [300, 400, 500, 600, 700]):
        slowest = max(1 / min(rates), 2 * (len(rates) - 1) / sum(rates))
        topology = parse_topology("nic:" + ",".join(map(str, rates)))
        assert allreduce_bound(topology, 1e6 * MB) == pytest.approx(slowest, rel=1e-6)


@pytest.mark.parametrize(
    "text", ["nic:600,800,800,800", "nic:300,400,500,600,700", "nic:200+800,200+800,200+800,800"]
)
def test_harder_networks_stay_near_the_bound(text):
    plan = make_plan(parse_topology(text))
    assert plan.bytes_per_s >= 0.8 * plan.bound_bytes_per_s


def test_second_nics_are_used():
    one, two = (
        make_plan(parse_topology("nic:800*4")),
        make_plan(parse_topology("nic:200+800,200+800,200+800,200+800")),
    )
    assert two.bytes_per_s == pytest.approx(1.25 * one.bytes_per_s, rel=1e-6)
    assert {hop.channel for hop in two.peers(0)} == {0, 1}
    assert max(neighbours(two)) == 2


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("text", ["nic:200,800,800,800", "sites:2+3@150/600", "nic:300/100,400,800/200"])
@pytest.mark.parametrize("driver", ["exact", "paper"])
def test_every_collective_on_every_kind_of_network(collective, text, driver):
    topology = parse_topology(text)
    root = 1 if collective in ROOTED else None
    packing = best_packing(topology, collective, root, driver=driver)
    check(topology, packing)
    plan = make_plan(topology, collective, root, driver=driver)  # proves itself
    assert plan.root == root and plan.bytes_per_s >= 0.85 * plan.bound_bytes_per_s


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_one_rank_has_nothing_to_do(collective):
    plan = make_plan(parse_topology("nic:100"), collective)
    assert plan.peers(0) == frozenset() and plan.shares == (1.0,)


def test_dgx2_gets_one_hop_trees():
    plan = make_plan(parse_topology("dgx-2"))
    assert plan.depth == 2 and len(plan.pairs) == 16
    assert sorted(p.root for p in plan.pairs) == list(range(16))
    assert plan.bytes_per_s == pytest.approx(16 / 30 * 6 * 23e9, rel=1e-6)


def two_servers(nic_bytes_per_s):
    """Two boxes of four GPUs (a fast ring of links in each), each box with one NIC that all its GPUs share."""
    resources = {f"nic{box}.{way}": nic_bytes_per_s for box in (0, 1) for way in ("up", "down")}
    routes = []
    for a, b in itertools.permutations(range(8), 2):
        if a // 4 != b // 4:
            routes.append(Route(a, b, 0, (f"nic{a // 4}.up", f"nic{b // 4}.down")))
        elif (a - b) % 4 in (1, 3):
            resources[f"{a}->{b}"] = 20e9
            routes.append(Route(a, b, 0, (f"{a}->{b}",)))
    boxes = tuple(f"box{r // 4}" for r in range(8))
    return Topology(
        "two servers", 8, tuple(Resource(*r) for r in resources.items()), tuple(routes), boxes, True
    )


@pytest.mark.parametrize("nic", [5e9, 23e9])
def test_three_phases_across_servers(nic):
    # Blink: reduce inside each server, one exchange between the servers, broadcast inside.  Here it falls out: every
    # tree crosses between the servers once, and when the NICs are fast enough, several trees share them.
    topology = two_servers(nic)
    plan = make_plan(topology)
    assert plan.bytes_per_s == pytest.approx(plan.bound_bytes_per_s, rel=1e-6)
    assert plan.bytes_per_s == pytest.approx(min(nic, 4 / 3 * 20e9), rel=1e-6)
    for pair in plan.pairs:
        for tree in (pair.reduce, pair.broadcast):
            assert sum(p >= 0 and v // 4 != p // 4 for v, p in enumerate(tree.parent)) == 1
    assert (len(plan.pairs) > 1) == (nic > 20e9)


def test_hybrid_adds_pcie_to_nvlink():
    nvlink = make_plan(parse_topology("dgx-1v").subset([0, 1, 4]))
    hybrid = make_plan(parse_topology("dgx-1v+pcie").subset([0, 1, 4]))
    assert hybrid.bytes_per_s >= nvlink.bytes_per_s + 4e9
    late = make_plan(parse_topology("dgx-1v+pcie").subset([0, 1, 4]), startup_s={1: 1.0}, n_bytes=100e6)
    on_pcie = sum(s for p, s in zip(late.pairs, late.shares, strict=True) if 1 in p.reduce.channel)
    assert on_pcie < 1e-9


def test_hybrid_split_is_the_papers_formula():
    size, pcie, nvlink, late = 500e6, 8e9, 40e9, 0.004
    expected = (size * pcie - late * pcie * nvlink) / (pcie + nvlink)
    assert split_bytes(size, [nvlink, pcie], [0.0, late]) == pytest.approx([size - expected, expected])
    assert split_bytes(1e6, [nvlink, pcie], [0.0, late]) == pytest.approx([1e6, 0.0])


def test_startup_needs_a_size():
    with pytest.raises(ConfigError, match="n_bytes"):
        make_plan(parse_topology("nic:200+800,200+800"), startup_s={1: 0.1})


def test_disconnected_names_the_cut():
    with pytest.raises(TopologyError, match=r"from ranks \{0, 1\} to ranks \{2, 3\}"):
        make_plan(parse_topology("dgx-1v").subset([0, 1, 6, 7]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("all_to_all",), "expected one of all_reduce"),
        (("all_reduce", 1), "all_reduce has no root"),
        (("broadcast", 9), "root 9; expected a rank 0..1"),
    ],
)
def test_wrong_calls(arguments, message):
    with pytest.raises(ConfigError, match=message):
        make_plan(parse_topology("nic:100,100"), *arguments)
    with pytest.raises(ConfigError, match="driver 'best'"):
        make_plan(parse_topology("nic:100,100"), driver="best")


def test_three_sites_need_three_chains_and_still_two_neighbours():
    plan = make_plan(parse_topology("sites:2+2+2@150/600"))
    assert plan.bytes_per_s == pytest.approx(1.5 * 150e6 * MB, rel=1e-6)
    assert max(neighbours(plan)) == 2


@pytest.mark.parametrize(
    ("text", "limit_s"),
    [
        ("nic:200,800*7", 0.1),
        ("sites:4+4@200/1000", 0.1),
        ("nic:300,400*9,800*54", 2),
        ("sites:128+128@200/1000", 60),
    ],
)
def test_planning_time(text, limit_s):
    topology = parse_topology(text)
    make_plan(parse_topology("nic:1,2,3"))  # imports
    start = time.process_time()
    make_plan(topology)
    assert time.process_time() - start < limit_s


def test_the_same_topology_gives_the_same_plan():
    for text in ("dgx-1v", "nic:300,400,500,600,700"):
        assert make_plan(parse_topology(text)).digest() == make_plan(parse_topology(text)).digest()
