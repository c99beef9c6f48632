"""The MSCCL file, run by an interpreter that counts contributions."""

import xml.etree.ElementTree as ET
from collections import Counter, defaultdict, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commhooks.core.msccl import apportion, msccl_xml
from commhooks.core.plan import chain_plan, make_plan, ring_plan, star_plan
from commhooks.core.topology_readers import parse_topology
from commhooks.errors import ConfigError


def run(text):
    """Execute the file: returns {(gpu, chunk): Counter of contributing gpus}."""
    algo = ET.fromstring(text)
    own = algo.get("coll") == "allgather"
    memory, blocks, done, wires = {}, [], set(), defaultdict(deque)
    for gpu in algo:
        rank, per = int(gpu.get("id")), int(gpu.get("i_chunks"))
        for chunk in range(int(algo.get("nchunksperloop"))):
            mine = not own or chunk // per == rank
            memory[rank, chunk] = Counter([rank]) if mine else Counter()
        blocks += [(rank, tb, deque(tb)) for tb in gpu]
    moved = True
    while moved:
        moved = False
        for rank, tb, steps in blocks:
            while steps and _perform(rank, tb, steps[0], memory, done, wires):
                done.add((rank, tb.get("id"), steps.popleft().get("s")))
                moved = True
    assert not any(steps for _, _, steps in blocks), "deadlock"
    assert not any(wires.values()), "sent but never received"
    return memory


def _perform(rank, tb, step, memory, done, wires):
    if step.get("depid") != "-1" and (rank, step.get("depid"), step.get("deps")) not in done:
        return False
    chunks = range(int(step.get("srcoff")), int(step.get("srcoff")) + int(step.get("cnt")))
    if step.get("type") == "s":
        wires[rank, int(tb.get("send")), tb.get("chan")].append([memory[rank, c].copy() for c in chunks])
        return True
    wire = wires[int(tb.get("recv")), rank, tb.get("chan")]
    if not wire:
        return False
    for chunk, value in zip(chunks, wire.popleft(), strict=True):
        memory[rank, chunk] = value if step.get("type") == "r" else memory[rank, chunk] + value
    return True


PLANS = [
    ring_plan(4),
    star_plan(5),
    chain_plan([3, 1, 0, 2]),
    make_plan(parse_topology("dgx-1v").subset([1, 2, 4, 5, 6])),
    make_plan(parse_topology("nic:600,800,800,800")),
]


@pytest.mark.parametrize("plan", PLANS)
def test_all_reduce_counts_every_rank_once(plan):
    for value in run(msccl_xml(plan)).values():
        assert value == Counter(range(plan.world_size))


@pytest.mark.parametrize("collective", ["broadcast", "reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("name", ["dgx-1v", "nic:200,800,800,800"])
def test_other_collectives(collective, name):
    topology = parse_topology(name).subset([0, 1, 2, 3])
    plan = make_plan(topology, collective)
    memory = run(msccl_xml(plan))
    everyone = Counter(range(4))
    chunks = 1 + max(chunk for _, chunk in memory)
    for (rank, chunk), value in memory.items():
        owner = chunk // (chunks // 4)
        if collective == "broadcast":
            assert value == Counter([0])
        elif collective == "all_gather":
            assert value == Counter([owner])
        elif rank == (0 if collective == "reduce" else owner):
            assert value == everyone


def test_gather_is_refused():
    with pytest.raises(ConfigError, match="no gather in that format"):
        msccl_xml(make_plan(parse_topology("nic:100,100"), "gather"))


@settings(deadline=None)
@given(st.lists(st.floats(1e-6, 1), min_size=1, max_size=12), st.integers(0, 50))
def test_apportioning_keeps_the_total(shares, extra):
    counts = apportion(shares, len(shares) + extra)
    assert sum(counts) == len(shares) + extra and min(counts) >= 1
