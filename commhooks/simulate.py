"""``commhooks simulate``: the duration of a training step in virtual time, for a model, a topology and each schedule.

Where in the flow: a command; model shapes + topology -> ``core.treegen`` (rates) -> ``core.virtual_step`` -> a table or JSON.
Needs no cluster, no torch and no network.

Invariants: deterministic; with thousands of ranks a ``nic:`` topology is summed up rather than packed (each rank's NIC and
the sum of all bound any all-reduce), and the answer says so.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from commhooks.bench.harness import ratio, render
from commhooks.bench.models import MODEL_NAMES, ModelSpec, model_spec
from commhooks.core.fluid import fluid_limits, ring_s
from commhooks.core.slicing import P3_SLICE_NUMEL
from commhooks.core.topology import Topology
from commhooks.core.topology_readers import FORMS, nic_rates
from commhooks.core.treegen import allreduce_bound
from commhooks.core.virtual_step import VirtualLayer, VirtualNetwork, VirtualSchedule, virtual_step_s
from commhooks.errors import ConfigError
from commhooks.lab import read_topology

_ITEM_BYTES = 4
_DDP_BUCKET_NUMEL = 25 * (1 << 20) // _ITEM_BYTES
# Beyond this a topology's routes (one per pair) and its packing take minutes.
_MOST_PACKED_RANKS = 128
SCHEDULES = ("ddp", "trees", "priority")


@dataclass(frozen=True)
class Rates:
    """What a network's all-reduce costs per byte: by DDP's ring in rank order, and by packed trees."""

    name: str
    ranks: int
    ring_s_per_byte: float
    trees_s_per_byte: float
    reason: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--model", default="resnet50", help=f"one of {', '.join(MODEL_NAMES)} (resnet50)")
    parser.add_argument("--topology", required=True, metavar="TOPOLOGY", help=FORMS)
    parser.add_argument(
        "--compute-s", type=float, help="seconds of computing in a step (default: --balance decides)"
    )
    parser.add_argument(
        "--balance",
        type=float,
        default=1.0,
        help="seconds of communication, for plain DDP's ring on this network, per second of computing (1)",
    )
    parser.add_argument("--latency-ms", type=float, default=0.1, help="of one message (0.1)")
    parser.add_argument(
        "--slice-numel", type=int, default=P3_SLICE_NUMEL, help="largest slice, in elements (50000)"
    )


def main(namespace: argparse.Namespace) -> int:
    """Simulate and print."""
    if namespace.balance <= 0 or namespace.latency_ms < 0 or namespace.slice_numel < 1:
        raise ConfigError(
            f"--balance {namespace.balance:g}, --latency-ms {namespace.latency_ms:g}, --slice-numel "
            f"{namespace.slice_numel}: expected a balance above 0, a latency from 0, a slice of at least 1 element"
        )
    model = model_spec(namespace.model)
    rates = rates_of(namespace.topology)
    compute_s = namespace.compute_s or model.numel * _ITEM_BYTES * rates.ring_s_per_byte / namespace.balance
    if compute_s <= 0:
        raise ConfigError(f"--compute-s {compute_s:g}: expected more than 0 (one rank alone has no balance)")
    rows = list(simulate(model, rates, compute_s, namespace.latency_ms / 1e3, namespace.slice_numel))
    print(render(rows, namespace.json, [rates.reason]))
    return 0


def rates_of(text: str) -> Rates:
    """The network's rates: packed where that is affordable, else summed up.

    Raises
    ------
    ConfigError
        Too many ranks for a topology that isn't NICs on one switch.
    """
    if text.startswith("nic:"):
        nics = nic_rates(text)
        if len(nics) > _MOST_PACKED_RANKS:
            return _summed(text, nics)
    _, network = read_topology(text)
    if network.world_size > _MOST_PACKED_RANKS:
        raise ConfigError(
            f"topology {text!r} has {network.world_size} ranks; beyond {_MOST_PACKED_RANKS} only NICs on one switch "
            "(nic:…) can be simulated"
        )
    return _packed(text, network)


def _packed(text: str, network: Topology) -> Rates:
    if network.world_size == 1:
        return Rates(text, 1, 0.0, 0.0, "one rank: nothing travels")
    return Rates(
        text,
        network.world_size,
        ring_s(network, 1.0),
        allreduce_bound(network, 1.0),
        f"trees run at the optimum of the packing's linear program over {network.world_size} ranks",
    )


def _summed(text: str, nics: Sequence[tuple[float, float]]) -> Rates:
    ranks = len(nics)
    slowest = min(min(nic) for nic in nics)
    total = min(sum(up for up, _ in nics), sum(down for _, down in nics))
    return Rates(
        text,
        ranks,
        2 * (ranks - 1) / ranks / slowest,
        max(1 / slowest, 2 * (ranks - 1) / total),
        f"{ranks} ranks: trees run at the bound max(1 / slowest NIC, 2 (n - 1) / all NICs), not packed",
    )


def simulate(
    model: ModelSpec, rates: Rates, compute_s: float, latency_s: float, slice_numel: int
) -> Iterator[dict[str, Any]]:
    """One row per schedule.

    Parameters
    ----------
    model : in forward order
    rates : of the network
    compute_s : seconds of computing in a step
    latency_s : of one message
    slice_numel : largest slice
    """
    layers = [
        VirtualLayer(layer.numel, share.compute * compute_s / 3, share.compute * compute_s * 2 / 3)
        for layer, share in zip(model.layers, model.shares(), strict=True)
    ]
    ring = VirtualNetwork(rates.ring_s_per_byte, max(1, 2 * (rates.ranks - 1)), latency_s, whole=False)
    # A balanced pair of trees over n ranks is as deep as two binary trees; chains are deeper, stars shallower.
    hops = max(1, 2 * math.ceil(math.log2(max(2, rates.ranks))))
    trees = VirtualNetwork(rates.trees_s_per_byte, hops, latency_s, whole=True)
    ways = {
        "ddp": (ring, VirtualSchedule(None, _DDP_BUCKET_NUMEL, by_layer=False, barrier=True)),
        "trees": (trees, VirtualSchedule(slice_numel, _DDP_BUCKET_NUMEL, by_layer=False, barrier=True)),
        "priority": (trees, VirtualSchedule(slice_numel, 0, by_layer=True, barrier=False)),
    }
    plain_s = virtual_step_s(layers, *ways["ddp"], _ITEM_BYTES)
    for schedule in SCHEDULES:
        network, way = ways[schedule]
        comm_s = model.numel * _ITEM_BYTES * network.s_per_byte
        step_s = virtual_step_s(layers, network, way, _ITEM_BYTES)
        limits = fluid_limits(model.shares(), comm_s / compute_s)
        yield {
            "case": rates.name,
            "model": model.name,
            "ranks": rates.ranks,
            "schedule": schedule,
            "compute_s": round(compute_s, 6),
            "comm_s": round(comm_s, 6),
            "step_s": round(step_s, 6),
            "bound_s": round(compute_s * (limits.plain if way.barrier else limits.priority), 6),
            "speedup": ratio(plain_s, step_s),
        }
