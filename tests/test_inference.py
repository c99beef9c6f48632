"""From measured rates to a topology: the survey run on simulated networks, with noise."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commhooks.core.inference import Flow, Rail, Seen, fair_rates, nics, sites_of, topology_of, worst_link
from commhooks.core.plan import make_plan
from commhooks.core.survey import survey
from commhooks.core.topology_readers import parse_topology

NOISE = 0.05  # a flow is measured up to so much too slow


def surveyed(topology, seed=0, noise=NOISE, busy=0.0):
    """The survey's estimate of a simulated network, and how many rounds it took.

    ``busy``: what every flow of a round with more than two may lose besides.
    """
    chance = random.Random(seed)
    steps = survey(topology.world_size)
    rounds = 0
    try:
        flows = next(steps)
        while True:
            rounds += 1
            rates = fair_rates(
                [topology.route_of[f.src, f.dst, 0].resources for f in flows], topology.capacity
            )
            loss = noise if len(flows) <= 2 else noise + busy
            flows = steps.send([rate * (1 - chance.random() * loss) for rate in rates])
    except StopIteration as end:
        return end.value, rounds


def inferred(topology, **how):
    estimate, _ = surveyed(topology, **how)
    n = topology.world_size
    return topology_of(
        "probe", range(n), [f"host{i}" for i in range(n)], [Rail(("eth0",) * n, estimate)], [0.0] * n
    )


def check(true, found, tolerance=0.10):
    """Same resources with the same capacities, and a plan as fast."""
    assert set(found.capacity) == set(true.capacity)
    for name, capacity in true.capacity.items():
        assert found.capacity[name] == pytest.approx(capacity, rel=tolerance), name
    assert make_plan(found).bytes_per_s == pytest.approx(make_plan(true).bytes_per_s, rel=0.05)


@pytest.mark.parametrize(
    "text",
    [
        "nic:200,800,800,800",
        "nic:800*4",
        "nic:800,200*5",
        "nic:100,100",
        "nic:100,200,400,800,1000,50",
        "nic:800/200,800/200,800/200,800/200,800/200,800/200",
        "sites:2+2@100/800",
        "sites:4+4@200/1000",
        "sites:4+4@200/1000;block",
        "sites:4+4@1500/1000",
        "sites:4+4@1500/1000;block",
        "sites:3+5@400/1000",
        "sites:2+2+2@150/600",
    ],
)
def test_known_networks_are_found(text):
    true = parse_topology(text)
    check(true, inferred(true))


@settings(deadline=None, max_examples=12)
@given(
    st.lists(st.sampled_from([50, 100, 200, 300, 500, 800, 1000]), min_size=3, max_size=7),
    st.integers(0, 1000),
)
def test_cards_of_any_rates_are_found(rates, seed):
    # A card that is faster than all others together can't be filled, nor does it matter.
    rates = [min(rate, sum(rates) - rate) for rate in rates]
    true = parse_topology("nic:" + ",".join(map(str, rates)))
    check(true, inferred(true, seed=seed))


@settings(deadline=None, max_examples=8)
@given(
    st.lists(st.integers(2, 5), min_size=2, max_size=3),
    st.sampled_from([100, 200, 400]),
    st.booleans(),
    st.integers(0, 1000),
)
def test_shared_cuts_are_found(sizes, wan, block, seed):
    true = parse_topology(f"sites:{'+'.join(map(str, sizes))}@{wan}/1000" + (";block" if block else ""))
    found = inferred(true, seed=seed)
    cuts = {name for name in true.capacity if "site" in name}
    assert {name for name in found.capacity if "site" in name} == cuts
    for name in cuts:
        assert found.capacity[name] == pytest.approx(true.capacity[name], rel=0.10)
    assert make_plan(found).bytes_per_s == pytest.approx(make_plan(true).bytes_per_s, rel=0.05)


@pytest.mark.parametrize("seed", range(6))
def test_a_machine_that_slows_whatever_runs_together_makes_no_sites(seed):
    true = parse_topology("sites:4+4@200/1000")
    found = inferred(true, seed=seed, busy=0.4)
    assert {name for name in found.capacity if "site" in name} == {"site0->site1", "site1->site0"}
    assert found.capacity["site0->site1"] == pytest.approx(true.capacity["site0->site1"], rel=0.10)
    assert make_plan(found).bytes_per_s == pytest.approx(make_plan(true).bytes_per_s, rel=0.05)


def test_a_limit_of_single_flows_between_sites_is_no_shared_cut():
    """Each pair across has 100 of its own: in sum 200 cross from two nodes, but no pair gets them."""
    seen_ways = {(a, b): 100.0 if (a < 2) != (b < 2) else 800.0 for a in range(4) for b in range(4) if a != b}

    def rates(flows):
        ways = [(f"u{f.src}", f"d{f.dst}", f"p{f.src}{f.dst}") for f in flows]
        capacity = {f"{d}{n}": 800.0 for d in "ud" for n in range(4)}
        return fair_rates(ways, capacity | {f"p{a}{b}": rate for (a, b), rate in seen_ways.items()})

    steps = survey(4)
    with pytest.raises(StopIteration) as end:
        flows = next(steps)
        while True:
            flows = steps.send(rates(flows))
    found = end.value.value
    assert found.site == (0, 0, 1, 1)
    assert found.cuts == {(0, 1): 200.0, (1, 0): 200.0}
    assert found.paths == {Flow(a, b): 100.0 for (a, b), rate in seen_ways.items() if rate == 100.0}


def test_a_card_that_was_late_in_every_crowded_round_gets_a_turn_alone():
    true = parse_topology("nic:800*5")
    steps = survey(5)
    with pytest.raises(StopIteration) as end:
        flows = next(steps)
        while True:
            rates = fair_rates([true.route_of[f.src, f.dst, 0].resources for f in flows], true.capacity)
            late = 0.6 if len(flows) > 2 else 1.0
            flows = steps.send([rate * (late if f.dst == 3 else 1.0) for f, rate in zip(flows, rates)])
    assert end.value.value.down == pytest.approx([true.capacity["rank3.down"]] * 5)


def test_rounds_grow_slowly():
    assert surveyed(parse_topology("sites:4+4@200/1000"))[1] <= 18
    assert surveyed(parse_topology("nic:1000*24"))[1] <= 28
    assert surveyed(parse_topology("nic:100"))[1] == 0


def test_ranks_of_one_host_share_its_card_and_its_memory():
    # hosts 0 (ranks 0, 2), 1 (rank 1) and 2 (rank 3)
    estimate, _ = surveyed(parse_topology("nic:100,800,800"), noise=0.0)
    found = topology_of(
        "probe", [0, 1, 0, 2], ["a", "b", "c"], [Rail(("eth0",) * 3, estimate)], [5e9, 0.0, 0.0]
    )
    assert found.hosts == ("a", "b", "a", "c")
    assert found.route_of[0, 2, 0].resources == ("host0.memory",)
    assert found.route_of[2, 3, 0].resources == ("host0.up", "rank3.down")
    assert found.capacity["host0.memory"] == 5e9
    assert set(found.capacity) == {
        "host0.memory", "host0.up", "host0.down", "rank1.up", "rank1.down", "rank3.up", "rank3.down"
    }  # fmt: skip
    assert make_plan(found).bytes_per_s == pytest.approx(
        parse_topology("nic:100").capacity["rank0.up"], rel=0.01
    )


def test_two_channels_are_two_cards_unless_they_have_one_interface():
    slow, _ = surveyed(parse_topology("nic:200*3"), noise=0.0)
    fast, _ = surveyed(parse_topology("nic:800*3"), noise=0.0)
    rails = [Rail(("eth0", "eth0", "eth0"), slow), Rail(("eth1", "eth1", "eth1"), fast)]
    found = topology_of("probe", range(3), list("abc"), rails, [0.0] * 3)
    true = parse_topology("nic:200+800*3")
    check(true, found, tolerance=1e-9)
    one = topology_of(
        "probe", range(3), list("abc"), [rails[0], Rail(("eth1", "eth0", "eth1"), fast)], [0.0] * 3
    )
    assert one.route_of[1, 0, 1].resources == ("rank1.up", "rank0.down.1")


def test_the_worst_link_is_named_with_what_makes_it_slow():
    worst = worst_link(inferred(parse_topology("nic:800,800,200/800,800")))
    assert (worst.src, worst.resource, worst.shared_by) == (2, "rank2.up", 3)
    worst = worst_link(inferred(parse_topology("sites:3+3@100/800")))
    assert worst.resource in ("site0->site1", "site1->site0") and worst.shared_by == 9
    assert worst_link(topology_of("alone", [0], ["a"], [], [0.0])) is None


def test_fair_rates_fill_every_bottleneck():
    assert fair_rates([("a",), ("a", "b"), ("b",)], {"a": 10.0, "b": 4.0}) == [8.0, 2.0, 2.0]
    assert fair_rates([], {}) == []


def test_the_sum_of_a_fan_shows_what_a_node_can_do():
    seen = [Seen((Flow(0, 1), Flow(0, 2), Flow(1, 0)), (3.0, 4.0, 5.0)), Seen((Flow(0, 1),), (6.0,))]
    assert nics(3, seen) == ([7.0, 5.0, 0.0], [5.0, 6.0, 4.0])


def test_nodes_that_are_slow_to_the_same_others_are_a_site():
    doubtful = {Flow(a, b) for a in (0, 2, 4) for b in (1, 3)}
    assert sites_of(5, doubtful, strict=True) == (0, 1, 0, 1, 0)
    assert sites_of(3, set(), strict=True) == (0, 0, 0)
    assert sites_of(3, {Flow(a, b) for a in range(3) for b in range(3) if a != b}, strict=True) == (0, 1, 2)
