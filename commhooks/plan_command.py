"""``commhooks plan``: the trees for a topology, offline.

Where in the flow: a command; string or file -> ``core.topology`` -> ``core.planner`` -> text, JSON, dot, PNG, XML.
Needs no cluster, no torch, and no network.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commhooks.core.msccl import msccl_xml
from commhooks.core.plan import COLLECTIVES, Plan
from commhooks.core.planner import best_packing, plan_of, resource_loads, ring_bytes_per_s
from commhooks.core.topology import Topology, rate_text
from commhooks.core.topology_readers import FORMS, from_file_text, parse_topology
from commhooks.core.treegen import DRIVERS, Packing
from commhooks.errors import ConfigError, TopologyError
from commhooks.plan_drawing import dot, png
from commhooks.tables import aligned

FORMATS = ("text", "json", "dot", "png", "msccl-xml")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--topology", required=True, metavar="TOPOLOGY", help=FORMS)
    parser.add_argument(
        "--ranks",
        metavar="LIST",
        help="only these ranks, as in 1,4,5,7 or 0-3 (for uniform: how many, as in 8)",
    )
    parser.add_argument("--collective", choices=COLLECTIVES, default="all_reduce")
    parser.add_argument(
        "--root", type=int, metavar="RANK", help="for broadcast, reduce and gather (default 0)"
    )
    parser.add_argument("--driver", choices=DRIVERS, default="exact", help="exact, or as in Blink's paper")
    parser.add_argument("--format", choices=FORMATS, default="text")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write there instead of standard output")
    parser.add_argument(
        "--mb", type=float, default=25.0, metavar="MB", help="size for the times (default 25)"
    )
    parser.add_argument(
        "--explain", action="store_true", help="the bound, what sets it, and a ring beside it"
    )


@dataclass(frozen=True)
class Answer:
    """A plan with what is needed to explain it."""

    topology: Topology
    packing: Packing
    plan: Plan
    n_bytes: float
    chosen: tuple[int, ...] | None  # the topology's ranks that are 0, 1, ... here; None: all
    ring: float | None  # bytes/s of a ring in rank order; None if there is no such ring

    @property
    def seconds(self) -> float:
        """Predicted time for all bytes, without latency."""
        return self.n_bytes / self.plan.bytes_per_s

    @property
    def gain(self) -> float | None:
        """How much faster than the ring."""
        return (
            self.plan.bytes_per_s / self.ring if self.ring and math.isfinite(self.plan.bytes_per_s) else None
        )


def main(namespace: argparse.Namespace) -> int:
    """Plan, prove, print.

    Raises
    ------
    TopologyError, ConfigError
        For what can't be planned; the message says what to write instead.
    """
    answer = _answer(namespace)
    kind = "json" if namespace.json else namespace.format
    if kind == "png":
        path = namespace.output or Path("plan.png")
        png(answer.plan, answer.topology, path)
        print(f"wrote {path}", file=sys.stderr)
        return 0
    text = _rendered(answer, kind, namespace.explain)
    if namespace.output is None:
        print(text, end="" if text.endswith("\n") else "\n")
    else:
        namespace.output.write_text(text if text.endswith("\n") else text + "\n")
    return 0


def _answer(namespace: argparse.Namespace) -> Answer:
    if not (math.isfinite(namespace.mb) and namespace.mb > 0):
        raise ConfigError(f"--mb {namespace.mb}; expected a size above 0")
    topology = read_topology(namespace.topology, namespace.ranks)
    n_bytes = namespace.mb * 1e6
    packing = best_packing(
        topology, namespace.collective, namespace.root, driver=namespace.driver, n_bytes=n_bytes
    )
    plan = plan_of(topology.world_size, packing)
    plan.prove()
    chosen = (
        None if namespace.ranks is None or namespace.topology == "uniform" else tuple(_ranks(namespace.ranks))
    )
    return Answer(topology, packing, plan, n_bytes, chosen, ring_bytes_per_s(topology, namespace.collective))


def read_topology(text: str, ranks: str | None = None) -> Topology:
    """A topology string or file, and only some of its ranks.

    Raises
    ------
    TopologyError
        For what is neither, or for ranks that aren't there.
    """
    if text == "uniform":
        if ranks is None:
            raise TopologyError("topology 'uniform' has no number of ranks of its own; say --ranks 8")
        wanted = _ranks(ranks)
        return parse_topology(text, wanted[0] if len(wanted) == 1 else len(wanted))
    path = Path(text)
    if path.is_file():
        topology = from_file_text(_read(path), text)
    elif ("/" in text and ":" not in text) or path.suffix in (".json", ".xml", ".txt"):
        raise TopologyError(f"topology file {text!r} isn't there")
    else:
        topology = parse_topology(text)
    return topology if ranks is None else topology.subset(_ranks(ranks))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise TopologyError(f"topology file {path}: {error}") from error


def _ranks(text: str) -> list[int]:
    chosen: list[int] = []
    for item in text.split(","):
        first, dash, last = item.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise TopologyError(
                f"ranks {text!r}: {item!r}; expected numbers and ranges, as in 1,4,5,7 or 0-3"
            )
        chosen += range(int(first), int(last) + 1) if dash else [int(first)]
    return chosen


def _rendered(answer: Answer, kind: str, explain: bool) -> str:
    if kind == "json":
        return json.dumps(as_json(answer), indent=1)
    if kind == "dot":
        return dot(answer.plan, answer.topology)
    if kind == "msccl-xml":
        return msccl_xml(answer.plan, answer.topology.name)
    return as_text(answer) + ("\n\n" + explanation(answer) if explain else "")


def as_json(answer: Answer) -> dict[str, Any]:
    """Everything that the text says, and the plan itself."""
    plan, packing = answer.plan, answer.packing
    return {
        "topology": answer.topology.name,
        "topology_digest": answer.topology.digest(),
        "world_size": plan.world_size,
        "ranks": None if answer.chosen is None else list(answer.chosen),
        "collective": plan.collective,
        "root": plan.root,
        "bytes_per_s": _finite(plan.bytes_per_s),
        "bound_bytes_per_s": _finite(plan.bound_bytes_per_s),
        "bottleneck": list(packing.bottleneck),
        "bytes": answer.n_bytes,
        "seconds": answer.seconds,
        "ring_bytes_per_s": answer.ring,
        "gain_over_ring": answer.gain,
        "reason": plan.reason,
        "digest": plan.digest(),
        "trees": [
            {"root": p.root, "share": s, "bytes_per_s": _finite(s * plan.bytes_per_s), "depth": p.depth}
            for p, s in zip(plan.pairs, plan.shares, strict=True)
        ],
        "plan": plan.to_json(),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def as_text(answer: Answer) -> str:
    """The plan for people: one line of reason, then the trees."""
    plan = answer.plan
    rows = []
    for i, (pair, share) in enumerate(zip(plan.pairs, plan.shares, strict=True)):
        shapes = [f"{word} {_edges(tree, arrow)}" for word, tree, arrow in
                  (("reduce", pair.reduce, "->"), ("broadcast", pair.broadcast, "<-")) if tree is not None]  # fmt: skip
        if (
            pair.reduce is not None
            and pair.broadcast is not None
            and pair.reduce.parent == pair.broadcast.parent
        ):
            shapes = [f"both ways {_edges(pair.reduce, '-')}"]
        rows.append((str(i), str(pair.root), rate_text(share * plan.bytes_per_s), f"{100 * share:.1f} %",
                     str(pair.depth), "; ".join(shapes)))  # fmt: skip
    header = ("tree", "root", "rate", "share", "hops", "edges")
    title = f"{answer.topology.name}: {plan.collective}" + (
        f" from {plan.root}" if plan.root is not None else ""
    )
    if answer.chosen is not None:
        title += f"\nranks 0-{plan.world_size - 1} here are {', '.join(map(str, answer.chosen))} there"
    return f"{title}\n{plan.reason}\n\n{aligned(header, rows)}"


def _edges(tree: Any, arrow: str) -> str:
    """Child and parent of every edge, from the root down; a second channel is marked."""
    marks = (f"{v}{arrow}{tree.parent[v]}" + (f"({tree.channel[v]})" if tree.channel[v] else "")
             for v in tree.order[1:])  # fmt: skip
    return " ".join(marks) or "nothing"


def explanation(answer: Answer) -> str:
    """Rate, bound, bottleneck, ring, expected gain."""
    plan, packing = answer.plan, answer.packing
    if plan.world_size == 1:
        return "one rank: nothing moves"
    lines = [
        f"rate        {rate_text(plan.bytes_per_s)}; {answer.n_bytes / 1e6:g} MB take {answer.seconds:.4g} s",
        f"bound       {rate_text(plan.bound_bytes_per_s)}: no plan is faster (the prices below prove it)",
        f"reached     {100 * plan.bytes_per_s / plan.bound_bytes_per_s:.2f} % of the bound",
    ]
    if answer.ring is None:
        lines.append("ring        there is none in rank order")
    elif answer.gain is not None:
        lines += [
            f"ring        {rate_text(answer.ring)} in rank order; {answer.n_bytes / answer.ring:.4g} s",
            f"gain        {answer.gain:.2f}x, {answer.n_bytes / answer.ring - answer.seconds:.4g} s less for every "
            f"{answer.n_bytes / 1e6:g} MB that a step waits for",
        ]
    loads = resource_loads(answer.topology, packing)
    prices = dict(packing.duals)
    most = max(prices.values(), default=1.0)
    busiest = sorted(loads, key=lambda n: (-prices.get(n, 0.0), -loads[n], n))[:12]
    rows = [
        (
            n,
            rate_text(answer.topology.capacity[n]),
            f"{100 * loads[n]:.0f} %",
            f"{prices.get(n, 0.0) / most:.2f}",
        )
        for n in busiest
    ]
    lines += ["", aligned(("resource", "capacity", "used", "price"), rows)]
    if len(loads) > len(rows):
        lines.append(f"and {len(loads) - len(rows)} more")
    return "\n".join(lines)
