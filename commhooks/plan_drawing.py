"""Drawings of a plan: Graphviz dot text and a PNG.

Where in the flow: ``plan`` -> **here** -> ``commhooks plan --format dot|png``.

Each tree has its colour; an edge is labelled with the rate that the tree sends over it.  Mirrored trees (the
same edges both ways) are drawn once with two arrowheads, otherwise the reduction is dashed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commhooks.core.plan import Plan
from commhooks.core.topology import Topology, rate_text
from commhooks.core.trees import TreePair
from commhooks.errors import MissingDependency

# Told apart by people who see colours differently, too (Okabe and Ito); more trees repeat them.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933")


@dataclass(frozen=True)
class Arrow:
    """One edge of one tree as drawn."""

    src: int
    dst: int
    tree: int
    both_ways: bool
    dashed: bool
    bytes_per_s: float


def arrows(plan: Plan) -> Iterator[Arrow]:
    """Every edge to draw, tree by tree."""
    for i, (pair, share) in enumerate(zip(plan.pairs, plan.shares, strict=True)):
        rate = share * plan.bytes_per_s
        mirrored = _mirrored(pair)
        if pair.broadcast is not None:
            for v, p in enumerate(pair.broadcast.parent):
                if p >= 0:
                    yield Arrow(p, v, i, mirrored, False, rate)
        if pair.reduce is not None and not mirrored:
            for v, p in enumerate(pair.reduce.parent):
                if p >= 0:
                    yield Arrow(v, p, i, False, True, rate)


def _mirrored(pair: TreePair) -> bool:
    return (
        pair.reduce is not None and pair.broadcast is not None and pair.reduce.parent == pair.broadcast.parent
    )


def dot(plan: Plan, topology: Topology) -> str:
    """The graph in Graphviz' language; ranks of one host are drawn in one box."""
    lines = [
        "digraph plan {",
        "  node [shape=circle];",
        f"  label={_quoted(f'{topology.name}: {plan.reason}')};",
    ]
    for host in sorted(set(topology.hosts)):
        members = [r for r, h in enumerate(topology.hosts) if h == host]
        lines += [f"  subgraph {_quoted(f'cluster_{host}')} {{", f"    label={_quoted(host)};"]
        lines += [f"    {rank};" for rank in members] + ["  }"]
    for a in arrows(plan):
        style = ", dir=both" if a.both_ways else ", style=dashed" if a.dashed else ""
        colour = COLOURS[a.tree % len(COLOURS)]
        lines.append(f'  {a.src} -> {a.dst} [color="{colour}", label="{rate_text(a.bytes_per_s)}"{style}];')
    return "\n".join([*lines, "}", ""])


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def png(plan: Plan, topology: Topology, path: Path) -> None:
    """Draw the plan into a file.

    Raises
    ------
    MissingDependency
        Without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependency("drawing needs matplotlib: pip install 'commhooks[plot]'") from error
    figure = Figure(figsize=(9, 9), dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.set_aspect("equal")
    places = _places(topology)
    for arrow in arrows(plan):
        _draw(axes, arrow, places, len(plan.pairs))
    for rank, (x, y) in enumerate(places):
        axes.plot([x], [y], "o", markersize=26, color="white", markeredgecolor="black", zorder=3)
        axes.text(x, y, str(rank), ha="center", va="center", zorder=4)
    axes.set_title(f"{topology.name}, {plan.collective}\n{_wrapped(plan.reason)}", fontsize=8)
    _legend(axes, plan)
    figure.savefig(path, format="png", bbox_inches="tight")


def _places(topology: Topology) -> list[tuple[float, float]]:
    """Ranks on a circle, those that share a host side by side."""
    order = sorted(range(topology.world_size), key=lambda r: (topology.hosts.index(topology.hosts[r]), r))
    turn = 2 * math.pi / topology.world_size
    at = {rank: (math.sin(i * turn), math.cos(i * turn)) for i, rank in enumerate(order)}
    return [at[r] for r in range(topology.world_size)]


def _draw(axes: Any, arrow: Arrow, places: Sequence[tuple[float, float]], trees: int) -> None:
    """One curved arrow; each tree bends a little differently, so that they don't cover each other."""
    bend = 0.08 + 0.3 * arrow.tree / max(1, trees - 1) if trees > 1 else 0.08
    (x0, y0), (x1, y1) = places[arrow.src], places[arrow.dst]
    colour = COLOURS[arrow.tree % len(COLOURS)]
    style = {
        "arrowstyle": "<|-|>" if arrow.both_ways else "-|>",
        "connectionstyle": f"arc3,rad={bend}",
        "color": colour,
        "linestyle": "--" if arrow.dashed else "-",
        "shrinkA": 14,
        "shrinkB": 14,
    }
    axes.annotate("", xy=(x1, y1), xytext=(x0, y0), arrowprops=style)
    # Half the bend is where a quadratic curve's middle lies off the chord.
    x, y = (x0 + x1) / 2 + bend / 2 * (y1 - y0), (y0 + y1) / 2 - bend / 2 * (x1 - x0)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.7}
    axes.text(
        x, y, rate_text(arrow.bytes_per_s), color=colour, fontsize=7, ha="center", va="center", bbox=box
    )


def _legend(axes: Any, plan: Plan) -> None:
    for i, (pair, share) in enumerate(zip(plan.pairs[:16], plan.shares[:16], strict=True)):
        label = f"tree {i}, root {pair.root}: {rate_text(share * plan.bytes_per_s)} ({100 * share:.1f} %)"
        axes.plot([], [], color=COLOURS[i % len(COLOURS)], label=label)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0), ncols=2, fontsize=7, frameon=False)


def _wrapped(text: str, width: int = 110) -> str:
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return "\n".join([*lines, line])
