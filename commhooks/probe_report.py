"""What a probe found, for people: the matrix, the resources beside those declared, the worst link, a picture.

Where in the flow: probing -> **report** -> `commhooks probe` prints it.  Pure text, but for the picture.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

from commhooks.core.inference import fair_rates, worst_link
from commhooks.core.topology import Topology, payload_bytes_per_s, rate_text
from commhooks.errors import MissingDependency
from commhooks.probing import Probe
from commhooks.tables import aligned

_MOST_COLUMNS = 16
_OFF = 0.10  # a declared rate that is this far from the measured one is marked


def mbit_per_s(bytes_per_s: float) -> float:
    """The link rate that carries a payload rate."""
    return bytes_per_s / payload_bytes_per_s(1.0)


def text(found: Probe, declared: Topology | None) -> str:
    """Everything, as the command prints it."""
    table = matrix(found) if len(set(found.host_of)) > 1 else ""
    parts = [_head(found), table, resources(found.topology, declared)]
    if declared is not None:
        parts.append(comparison(found, declared))
    parts.append(worst(found.topology))
    return "\n\n".join(part for part in parts if part)


def _head(found: Probe) -> str:
    hosts = len(set(found.host_of))
    if hosts == 1:
        return f"{len(found.host_of)} ranks on 1 host: there is no network between them."
    how = f"{found.rounds} rounds in {found.seconds:.1f} s"
    return f"{len(found.host_of)} ranks on {hosts} host{'s' if hosts > 1 else ''}; {how}. Rates in Mbit/s of the link."


def matrix(found: Probe) -> str:
    """What one flow gets from each rank (row) to each rank (column); ``.`` inside a host.

    By the inferred network: a flow's own measurement may have shared its way with others.
    """
    ranks = range(len(found.host_of))
    width = widths(found.topology)
    shown = list(ranks)[:_MOST_COLUMNS]
    rows = [[f"rank {src}", *(_cell(found, width, src, dst) for dst in shown)] for src in shown]
    table = aligned(["from \\ to", *map(str, shown)], rows)
    left = len(found.host_of) - len(shown)
    return table + (f"\n(and {left} ranks more: --json has them all)" if left else "")


def _cell(found: Probe, width: dict[tuple[int, int], float], src: int, dst: int) -> str:
    inside = found.host_of[src] == found.host_of[dst]
    return "." if inside else f"{mbit_per_s(width[src, dst]):.0f}"


def resources(measured: Topology, declared: Topology | None) -> str:
    """Capacities, with those of the declared topology that have the same name beside them."""
    other = declared.capacity if declared is not None else {}
    header = (
        ["resource", "measured", "declared", "measured/declared"]
        if declared is not None
        else ["resource", "measured"]
    )
    rows = []
    for name in dict.fromkeys([*measured.capacity, *other]):
        row = [name, *(_rate(name, topology.get(name)) for topology in (measured.capacity, other))]
        rows.append(
            [*row, _ratio(measured.capacity.get(name), other.get(name))] if declared is not None else row[:2]
        )
    return aligned(header, rows)


def _rate(name: str, bytes_per_s: float | None) -> str:
    if bytes_per_s is None:
        return "-"
    return rate_text(bytes_per_s) if _is_memory(name) else f"{mbit_per_s(bytes_per_s):.1f}"


def _is_memory(name: str) -> bool:
    return name.endswith(".memory")


def _ratio(measured: float | None, declared: float | None) -> str:
    if not measured or not declared:
        return "-"
    return f"{measured / declared:.2f}" + (" <--" if abs(measured / declared - 1) > _OFF else "")


def widths(topology: Topology) -> dict[tuple[int, int], float]:
    """What one flow per channel can get between each two ranks, bytes/s."""
    ways: dict[tuple[int, int], list[tuple[str, ...]]] = {}
    for route in topology.routes:
        ways.setdefault((route.src, route.dst), []).append(route.resources)
    return {pair: sum(fair_rates(each, topology.capacity)) for pair, each in ways.items()}


def differing(found: Probe, declared: Topology) -> list[tuple[int, int, float, float]]:
    """Pairs of ranks whose measured and declared rates (bytes/s) differ, the most different first."""
    measured, expected = widths(found.topology), widths(declared)
    pairs = [
        (src, dst, rate, expected[src, dst])
        for (src, dst), rate in measured.items()
        if found.host_of[src] != found.host_of[dst]
        and expected.get((src, dst), 0.0) > 0
        and abs(rate / expected[src, dst] - 1) > _OFF
    ]
    return sorted(pairs, key=lambda pair: (-abs(math.log(pair[2] / pair[3])), pair[:2]))


def comparison(found: Probe, declared: Topology) -> str:
    """Whether the declared topology is right about every pair of ranks."""
    pairs = differing(found, declared)
    if not pairs:
        return f"declared ({declared.name}): every pair of ranks is within {_OFF:.0%} of what was measured"
    lines = [
        f"{src}->{dst}: measured {mbit_per_s(rate):.0f}, declared {mbit_per_s(said):.0f}"
        for src, dst, rate, said in pairs[:8]
    ]
    return "\n".join(
        [
            f"declared ({declared.name}): {len(pairs)} pairs of ranks differ by more than {_OFF:.0%}:",
            *(f"  {line}" for line in lines),
            *([f"  and {len(pairs) - 8} more"] if len(pairs) > 8 else []),
        ]
    )


def worst(topology: Topology) -> str:
    """The slowest way between two ranks, and why."""
    link = worst_link(topology)
    if link is None:
        return ""
    rate = _rate(link.resource, link.bytes_per_s) + ("" if _is_memory(link.resource) else " Mbit/s")
    return (
        f"worst link: rank {link.src} -> rank {link.dst}, {rate}, because of "
        f"{link.resource}, which {link.shared_by} of {len(widths(topology))} ways between ranks go through"
    )


def as_json(found: Probe, declared: Topology | None) -> dict[str, Any]:
    """The same for programs; rates in bytes/s of payload."""
    link = worst_link(found.topology)
    return {
        **found.to_json(),
        "capacity_bytes_per_s": found.topology.capacity,
        "declared": None if declared is None else declared.name,
        "declared_bytes_per_s": None if declared is None else declared.capacity,
        "differing_pairs": [] if declared is None else [list(pair) for pair in differing(found, declared)],
        "worst": None
        if link is None
        else {
            "src": link.src,
            "dst": link.dst,
            "bytes_per_s": link.bytes_per_s,
            "resource": link.resource,
            "ways": link.shared_by,
        },
    }


def png(found: Probe) -> bytes:
    """The matrix as a picture.

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
    ranks, width = range(len(found.host_of)), widths(found.topology)
    rates = [
        [
            math.nan if found.host_of[src] == found.host_of[dst] else mbit_per_s(width[src, dst])
            for dst in ranks
        ]
        for src in ranks
    ]
    figure = Figure(figsize=(7, 6), dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(rates, cmap="viridis")
    _label(axes, rates)
    axes.set_xlabel("to rank")
    axes.set_ylabel("from rank")
    axes.set_title(worst(found.topology), fontsize=7)
    figure.colorbar(image, label="Mbit/s")
    target = io.BytesIO()
    figure.savefig(target, format="png", bbox_inches="tight")
    return target.getvalue()


def _label(axes: Any, rates: Sequence[Sequence[float]]) -> None:
    axes.set_xticks(range(len(rates)))
    axes.set_yticks(range(len(rates)))
    if len(rates) <= _MOST_COLUMNS:
        for src, row in enumerate(rates):
            for dst, rate in enumerate(row):
                if not math.isnan(rate):
                    axes.text(dst, src, f"{rate:.0f}", ha="center", va="center", color="white", fontsize=7)
