"""``commhooks bench bandwidths``: speed-up against bandwidth, for each model, beside the fluid limit and P3's paper.

Where in the flow: a command -> ``commhooks lab … -- commhooks bench train`` for each model and bandwidth, one at a time ->
table, JSON, picture.

Bandwidths are in units of the model's balance point, at which plain DDP's communication takes as long as the computing; so a
scaled replay and the paper's machines share an axis.

Invariants: one lab at a time, because it is timed; a point that fails ends the command with its words.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from commhooks.bench.harness import positive_numbers, pyplot
from commhooks.bench.models import model_spec
from commhooks.bench.p3_figures import P3_FIGURE_7, relative
from commhooks.bench.suite import run_call
from commhooks.bench.suite_calls import Call
from commhooks.core.fluid import fluid_limits
from commhooks.errors import CommhooksError
from commhooks.tables import markdown

_NETWORK = "nic:200,200,200,200"
_LIMIT_S = 600.0

Row = Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--models", default="resnet50,vgg19,sockeye", help="comma-separated (resnet50,vgg19,sockeye)"
    )
    parser.add_argument(
        "--bandwidths", default="0.5,0.75,1,1.5", help="in units of the balance point (0.5,0.75,1,1.5)"
    )
    parser.add_argument("--peer", default="p3-baseline", help="p3-baseline or ddp (p3-baseline)")
    parser.add_argument("--seconds", type=float, default=20.0, help="time for the rounds of a point (20)")
    parser.add_argument("--plot", metavar="FILE", help="draw a picture")


def main(namespace: argparse.Namespace) -> int:
    """Run all points, print, draw."""
    models = [name.strip() for name in namespace.models.split(",") if name.strip()]
    for model in models:
        model_spec(model)
    bandwidths = positive_numbers("--bandwidths", namespace.bandwidths)
    rows = [
        _point(model, bandwidth, namespace.peer, namespace.seconds)
        for model in models
        for bandwidth in bandwidths
    ]
    print(json.dumps(rows, indent=2) if namespace.json else table(rows))
    if namespace.plot:
        draw(rows, namespace.plot)
    return 0


def _point(model: str, bandwidth: float, peer: str, seconds: float) -> dict[str, Any]:
    balance = 1 / bandwidth
    print(f"{model} at {bandwidth:g} of its balance point", file=sys.stderr, flush=True)
    words = ("bench", "train", "--model", model, "--balance", f"{balance:g}", "--peers", peer)
    call = Call(model, (*words, "--seconds", f"{seconds:g}"), (), _NETWORK, limit_s=_LIMIT_S)
    done = run_call(call, quick=False)
    if done.problem:
        raise CommhooksError(f"{call.command(False)} {done.problem}")
    row = done.figures[0]
    stem = peer.replace("-", "_")
    print(f"    {row[f'speedup_{stem}']:.2f}x", file=sys.stderr, flush=True)
    return {
        "model": model,
        "bandwidth": bandwidth,
        "peer": peer,
        "peer_s": row[f"{stem}_s"],
        "peer_min_s": row[f"{stem}_min_s"],
        "peer_max_s": row[f"{stem}_max_s"],
        "commhooks_s": row["commhooks_s"],
        "commhooks_min_s": row["commhooks_min_s"],
        "commhooks_max_s": row["commhooks_max_s"],
        "speedup": row[f"speedup_{stem}"],
        "fluid_limit": round(fluid_speedup(model, bandwidth), 4),
        "paper": _paper(model, bandwidth),
    }


def fluid_speedup(model: str, bandwidth: float) -> float:
    """What ideal priority across the barrier gains over a plain barrier, without latency."""
    limits = fluid_limits(model_spec(model).shares(), 1 / bandwidth)
    return limits.plain / limits.priority


def _paper(model: str, bandwidth: float) -> float | None:
    """The paper's speed-up there, between its two nearest points; None outside of them."""
    if model not in P3_FIGURE_7:
        return None
    points = relative(P3_FIGURE_7[model])
    for (low, a), (high, b) in zip(points, points[1:], strict=False):
        if low <= bandwidth <= high:
            return round(a + (b - a) * (bandwidth - low) / (high - low), 4)
    return None


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    return markdown(
        ("model", "bandwidth", "peer's step (s)", "commhooks (s)", "speed-up", "fluid limit", "P3's paper"),
        [
            [
                row["model"],
                f"{row['bandwidth']:g}",
                f"{row['peer_s']:.3f}",
                f"{row['commhooks_s']:.3f}",
                f"{row['speedup']:.2f}",
                f"{row['fluid_limit']:.2f}",
                "–" if row["paper"] is None else f"{row['paper']:.2f}",
            ]
            for row in rows
        ],
    )


def draw(rows: Sequence[Row], path: str) -> None:
    """One panel per model: measured, fluid limit, the paper's points.

    Raises
    ------
    MissingDependency
        matplotlib isn't there.
    """
    drawing = pyplot()
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, panels = drawing.subplots(
        1, len(models), figsize=(4 * len(models), 3.6), sharey=True, squeeze=False
    )
    grid = [0.25 + 0.025 * k for k in range(91)]
    for axes, model in zip(panels[0], models, strict=True):
        mine = sorted((row["bandwidth"], row["speedup"]) for row in rows if row["model"] == model)
        axes.plot(grid, [fluid_speedup(model, x) for x in grid], color="0.6", label="fluid limit of priority")
        if model in P3_FIGURE_7:
            theirs = [point for point in relative(P3_FIGURE_7[model]) if point[0] <= grid[-1]]
            axes.plot(
                *zip(*theirs, strict=True), "x--", color="tab:orange", label="P3 over its baseline (paper)"
            )
        axes.plot(
            *zip(*mine, strict=True), "o-", color="tab:blue", label=f"commhooks over {rows[0]['peer']} (lab)"
        )
        axes.set_title(model)
        axes.set_xlabel("bandwidth (1: communication = computing)")
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("speed-up")
    panels[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    drawing.close(figure)
