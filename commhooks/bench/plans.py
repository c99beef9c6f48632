"""``commhooks bench plans``: packed trees against rings on every allocation of Blink's machines.

Where in the flow: a command; topology -> ``core.treegen`` (rates, trees), beside ``optima`` (known optima, rings) and
``blink_figures`` (what the authors measured).

A job gets some GPUs of a box; allocations that look alike count once: 46 on a DGX-1V, 14 on a DGX-1P.  Rates are in
links (``lambda`` and ``tau`` are the known optima of broadcast and all-reduce).  The model of NCCL: as many rings as
fit, each moves one link's rate both ways (broadcast 2 per ring, all-reduce n/(n-1)); where none fits, one over PCIe.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import networkx as nx

from commhooks.bench.blink_figures import FIGURES, Measured
from commhooks.bench.optima import min_cut, most_rings, strength
from commhooks.core.topology import Topology
from commhooks.core.topology_gpu import DGX1V_LINKS, NVLINK_BYTES_PER_S, PCIE_BYTES_PER_S
from commhooks.core.topology_readers import parse_topology
from commhooks.core.treegen import check, pack
from commhooks.tables import markdown

BOXES = ("dgx-1v", "dgx-1p")
AGREES = 1e-5  # how near the packing must come to the known optimum
# What one link of the paper's machines gave in its figures (measured / optimum, the median of all allocations).
BROADCAST_GB_PER_S = {"dgx-1v": 21.0, "dgx-1p": 17.0}
ALLREDUCE_GB_PER_S = {
    "dgx-1v": 16.3,
    "dgx-1p": 13.2,
}  # the latter in proportion: the paper shows no such figure


@dataclass(frozen=True)
class Allocation:
    """Some GPUs of a box, for all allocations that look like them."""

    box: str
    gpus: tuple[int, ...]
    graph: nx.Graph

    @property
    def name(self) -> str:
        """The GPUs as the paper's figures write them."""
        return "".join(map(str, self.gpus))

    @property
    def topology(self) -> Topology:
        """The NVLinks among them."""
        return parse_topology(self.box).subset(self.gpus)


@dataclass(frozen=True)
class Row:
    """One allocation's figures; ``cut`` and ``strength`` are lambda and tau."""

    case: str
    ranks: int
    cut: float
    strength: float
    rate: float
    trees: int
    rate_allreduce: float
    trees_allreduce: int
    ring: int
    nccl_model: float
    speedup: float
    broadcast_nccl_model: float
    broadcast_speedup: float
    paper: Measured | None

    @property
    def box(self) -> str:
        """The machine."""
        return self.case.split(":")[0]

    @property
    def broadcast_gb_per_s(self) -> float:
        """What the paper's machine should show for this broadcast."""
        return BROADCAST_GB_PER_S[self.box] * self.rate

    @property
    def allreduce_gb_per_s(self) -> float:
        """What the paper's machine should show for this all-reduce."""
        return ALLREDUCE_GB_PER_S[self.box] * self.rate_allreduce

    @property
    def optimal(self) -> bool:
        """Both rates meet the known optima."""
        return math.isclose(self.rate, self.cut, rel_tol=AGREES) and math.isclose(
            self.rate_allreduce, self.strength, rel_tol=AGREES
        )

    def as_json(self) -> dict[str, object]:
        """The fields under their public names."""
        fields = asdict(self)
        fields["lambda"], fields["tau"] = fields.pop("cut"), fields.pop("strength")
        fields["paper"] = None if self.paper is None else self.paper._asdict()
        fields["model_broadcast_gb_per_s"] = self.broadcast_gb_per_s
        fields["model_allreduce_gb_per_s"] = self.allreduce_gb_per_s
        return fields


def allocations(box: str) -> Iterator[Allocation]:
    """One of each kind of 3 to 8 connected GPUs, under the paper's name where it has one."""
    found: dict[str, list[nx.Graph]] = {}
    named = sorted(tuple(map(int, name)) for name in FIGURES[box])
    everything = [gpus for size in range(3, 9) for gpus in itertools.combinations(range(8), size)]
    kept = []
    for gpus in [*named, *everything]:
        graph = _graph(box, gpus)
        if not nx.is_connected(graph):
            continue
        alike = found.setdefault(nx.weisfeiler_lehman_graph_hash(graph, edge_attr="links"), [])
        if not any(nx.is_isomorphic(graph, other, edge_match=_same_links) for other in alike):
            alike.append(graph)
            kept.append(Allocation(box, gpus, graph))
    yield from sorted(kept, key=lambda a: (len(a.gpus), a.gpus))


def _same_links(one: dict[str, int], other: dict[str, int]) -> bool:
    return one["links"] == other["links"]


def _graph(box: str, gpus: Sequence[int]) -> nx.Graph:
    graph = nx.Graph()
    graph.add_nodes_from(range(len(gpus)))
    for (a, b), count in DGX1V_LINKS.items():
        if a in gpus and b in gpus:
            graph.add_edge(gpus.index(a), gpus.index(b), links=count if box == "dgx-1v" else 1)
    return graph


def measure(allocation: Allocation) -> Row:
    """Pack it, check the packing, and set it beside rings and the known optima."""
    topology, size = allocation.topology, len(allocation.gpus)
    link = NVLINK_BYTES_PER_S[allocation.box]
    broadcasts = [pack(topology, "broadcast", root) for root in range(size)]
    allreduce = pack(topology, "all_reduce")
    for packing in (*broadcasts, allreduce):
        check(topology, packing)
    rate = min(b.bytes_per_s for b in broadcasts) / link
    rate_allreduce = allreduce.bytes_per_s / link
    rings = most_rings(allocation.graph)
    turn = size / (2 * (size - 1))  # a ring's all-reduce over its broadcast
    ring_rate = 2.0 * rings if rings else PCIE_BYTES_PER_S / link
    return Row(
        f"{allocation.box}:{allocation.name}",
        size,
        min_cut(allocation.graph, 0),
        strength(allocation.graph),
        rate,
        max(len(b.pairs) for b in broadcasts),
        rate_allreduce,
        len(allreduce.pairs),
        rings,
        ring_rate * turn,
        rate_allreduce / (ring_rate * turn),
        ring_rate,
        rate / ring_rate,
        FIGURES[allocation.box].get(allocation.name),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--box", choices=BOXES, action="append", help="only this machine (default: both)")


def main(namespace: argparse.Namespace) -> int:
    """Print the table, or JSON; exit code 1 if any rate misses its known optimum."""
    rows = [measure(a) for box in namespace.box or BOXES for a in allocations(box)]
    if namespace.json:
        print(json.dumps([row.as_json() for row in rows], indent=1))
    else:
        print(_table(rows))
        print()
        for box in BOXES:
            mine = [row for row in rows if row.case.startswith(box)]
            if mine:
                print(_summary(box, mine))
    return 0 if all(row.optimal for row in rows) else 1


def _table(rows: Sequence[Row]) -> str:
    header = ("case", "lambda", "rate", "trees", "tau", "all-reduce", "rings", "NCCL model", "speedup",
              "paper's GB/s (Blink / NCCL)", "our model, GB/s")  # fmt: skip
    return markdown(header, [_cells(row) for row in rows])


def _cells(row: Row) -> list[str]:
    measured = row.paper
    figures = "" if measured is None else f"{measured.blink_broadcast:g} / {measured.nccl_broadcast:g}"
    model = f"{row.broadcast_gb_per_s:.0f}"
    if measured is not None and measured.blink_allreduce is not None:
        figures += f"; {measured.blink_allreduce:g} / {measured.nccl_allreduce:g}"
        model += f"; {row.allreduce_gb_per_s:.0f}"
    numbers = (row.cut, row.rate, row.trees, row.strength, row.rate_allreduce, row.ring, row.nccl_model)
    return [row.case, *(f"{n:.4g}" for n in numbers), f"{row.speedup:.2f}", figures, model]


def _summary(box: str, rows: Sequence[Row]) -> str:
    optimal = sum(row.optimal for row in rows)
    gains = [row.speedup for row in rows]
    lines = [
        f"{box}: {len(rows)} allocations, {optimal} at the known optimum, at most "
        f"{max(row.trees for row in rows)} trees for a broadcast",
        f"  all-reduce against NCCL's rings (model): best {max(gains):.2f}x, geometric mean "
        f"{statistics.geometric_mean(gains):.2f}x; broadcast: best {max(r.broadcast_speedup for r in rows):.2f}x, "
        f"geometric mean {statistics.geometric_mean(r.broadcast_speedup for r in rows):.2f}x",
    ]
    paper = [row for row in rows if row.paper is not None]
    if paper:
        lines.append("  " + _against_figures(paper))
    return "\n".join(lines)


def _against_figures(rows: Sequence[Row]) -> str:
    broadcast = [r.broadcast_gb_per_s / r.paper.blink_broadcast for r in rows if r.paper]
    allreduce = [
        r.allreduce_gb_per_s / r.paper.blink_allreduce for r in rows if r.paper and r.paper.blink_allreduce
    ]
    words = f"our model over the paper's figure: broadcast {_spread(broadcast)}"
    return words + (f", all-reduce {_spread(allreduce)}" if allreduce else "")


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
