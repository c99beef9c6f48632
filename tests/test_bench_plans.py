"""Blink's 46 + 14 allocations: optimal rates by independent methods, few trees, and the gain over rings."""

import json
import statistics
from argparse import Namespace

import networkx as nx
import pytest

from commhooks.bench import plans
from commhooks.bench.optima import min_cut, most_rings, strength
from commhooks.bench.plans import allocations, measure


def graph(*edges):
    result = nx.Graph()
    for a, b, links in edges:
        result.add_edge(a, b, links=links)
    return result


def test_optima_on_graphs_known_by_heart():
    triangle = graph((0, 1, 1), (1, 2, 1), (0, 2, 1))
    assert (min_cut(triangle, 0), strength(triangle), most_rings(triangle)) == (2, 1.5, 1)
    path = graph((0, 1, 2), (1, 2, 1))
    assert (min_cut(path, 0), strength(path), most_rings(path)) == (1, 1, 0)
    k4 = graph(*((a, b, 2) for a in range(4) for b in range(a)))
    assert (min_cut(k4, 3), strength(k4), most_rings(k4)) == (6, 4, 3)


@pytest.mark.parametrize(("box", "count", "ringless"), [("dgx-1v", 46, 21), ("dgx-1p", 14, 5)])
def test_every_allocation(box, count, ringless):
    rows = [measure(allocation) for allocation in allocations(box)]
    assert len(rows) == count and sum(row.ring == 0 for row in rows) == ringless
    for row in rows:
        assert row.optimal, row
        assert row.trees <= 6, row
        assert row.paper is not None  # every class is one of the paper's labels
        assert row.broadcast_gb_per_s == pytest.approx(row.paper.blink_broadcast, rel=0.75)
    if box == "dgx-1v":
        assert max(row.speedup for row in rows) >= 8
        assert statistics.geometric_mean(row.speedup for row in rows) >= 2
        assert statistics.median(
            row.broadcast_gb_per_s / row.paper.blink_broadcast for row in rows
        ) == pytest.approx(1, abs=0.05)


@pytest.fixture
def few(monkeypatch):
    """Only the three smallest allocations."""
    monkeypatch.setattr(plans, "allocations", lambda box: list(allocations(box))[:3])


@pytest.mark.usefixtures("few")
def test_json_has_the_documented_fields(capsys):
    assert plans.main(Namespace(box=["dgx-1p"], json=True)) == 0
    rows = json.loads(capsys.readouterr().out)
    wanted = {"case", "lambda", "tau", "rate", "trees", "rate_allreduce", "ring", "nccl_model", "speedup"}
    assert wanted <= set(rows[0]) and rows[0]["case"] == "dgx-1p:367"


@pytest.mark.usefixtures("few")
def test_table_ends_with_the_summary(capsys):
    assert plans.main(Namespace(box=None, json=False)) == 0
    out = capsys.readouterr().out
    assert "| dgx-1p:567 | 2 | 2 |" in out and "3 at the known optimum" in out
