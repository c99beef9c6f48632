"""``commhooks bench allreduce``: one all-reduce, Gloo's and ours in turn, in one run.

Where in the flow: a command -> launch (the ranks) -> harness (timing) -> ``commhooks.all_reduce`` and ``dist.all_reduce``.

Invariants: both results are checked against the sum computed from the ranks' known inputs before anything is timed, and
ours must be bit-identical on all ranks; a tensor of ``--mb 25`` has 25e6 bytes (1 MB = 1e6 bytes).
"""

from __future__ import annotations

import argparse
from typing import Any

from commhooks.bench import launch
from commhooks.bench.harness import Contender, GlooEnsemble, null_note, ratio, render, side_by_side
from commhooks.errors import CommhooksError, ConfigError
from commhooks.lab import read_topology


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--mb", type=float, default=25.0, help="size of the tensor in 1e6 bytes (25)")
    parser.add_argument(
        "--ranks",
        type=int,
        default=4,
        help="local ranks to start when no launcher did (4); else the launcher's",
    )
    parser.add_argument(
        "--rounds", type=int, help="rounds (default: as many as fit into --seconds, at least 5)"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="time for the rounds (20)")


def main(namespace: argparse.Namespace) -> int:
    """Time, and print on rank 0."""
    if namespace.mb <= 0:
        raise ConfigError(f"--mb {namespace.mb:g}: expected a size above 0")
    if not launch.launched():
        return launch.start_local(namespace.ranks, _arguments(namespace))
    with launch.process_group():
        rows, notes = _measure(namespace)
    if launch.rank() == 0:
        print(render(rows, namespace.json, notes))
    return 0


def _arguments(namespace: argparse.Namespace) -> list[str]:
    words = ["bench", "allreduce", "--mb", str(namespace.mb), "--seconds", str(namespace.seconds)]
    words += ["--rounds", str(namespace.rounds)] if namespace.rounds is not None else []
    return words + (["--json"] if namespace.json else [])


def _measure(namespace: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    import torch
    import torch.distributed as dist

    import commhooks

    numel = max(1, round(namespace.mb * 1e6 / 4))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tensor = torch.empty(numel, dtype=torch.float32)
    # Two buffers: a contender's own pages stay warm for it, and neither reads what the other has just written.
    other = torch.empty(numel, dtype=torch.float32)
    contenders = [
        Contender(
            "peer", lambda: dist.all_reduce(tensor), lambda: _check(dist.all_reduce, tensor, rank, ranks)
        ),
        Contender("commhooks", lambda: commhooks.all_reduce(other), lambda: _check_ours(other, rank, ranks)),
    ]
    zero = tensor.zero_, other.zero_
    contenders = [Contender(c.name, c.work, c.check, z) for c, z in zip(contenders, zero, strict=True)]
    timings = side_by_side(
        contenders, GlooEnsemble(), rounds=namespace.rounds, budget_s=namespace.seconds, fewest=5
    )
    peer, ours = timings["peer"], timings["commhooks"]
    topology = launch.settings().topology
    bound_s = _bound_s(topology, ranks, numel * 4)
    row = {
        "case": topology if bound_s is not None else "local",
        "ranks": ranks,
        "bytes": numel * 4,
        "peer": "gloo",
        **peer.fields("peer"),
        **ours.fields("commhooks"),
        "bound_s": None if bound_s is None else round(bound_s, 6),
        "speedup": ratio(peer.median_s, ours.median_s),
        "of_bound": ratio(bound_s, ours.median_s),
        "rounds": len(ours.durations_s),
        "null_speedup": round(peer.null_ratio, 4),
    }
    return [row], [null_note("gloo", peer)]


def _bound_s(topology: str, ranks: int, n_bytes: int) -> float | None:
    """The linear program's bound; None for a topology that says nothing of rates."""
    if topology in ("uniform", "probe"):
        return None
    from commhooks.core.treegen import allreduce_bound

    network = read_topology(topology)[1]
    if network.world_size != ranks:
        raise ConfigError(f"topology {topology!r} has {network.world_size} ranks, this run has {ranks}")
    return allreduce_bound(network, n_bytes)


# --- Checks ------------------------------------------------------------------------------------------------------------


def _check(all_reduce: Any, tensor: Any, rank: int, ranks: int) -> None:
    """Whole numbers, different on every rank and at every place, whose float32 sums are exact."""
    import torch

    pattern = torch.arange(tensor.numel(), dtype=torch.float32).remainder_(1000)
    tensor.copy_(pattern).add_(rank)
    all_reduce(tensor)
    expected = pattern.mul_(ranks).add_(ranks * (ranks - 1) / 2)
    wrong = (tensor != expected).nonzero()
    if len(wrong):
        at = int(wrong[0])
        raise CommhooksError(
            f"rank {rank}: {len(wrong)} of {tensor.numel()} elements are wrong; element {at} is {float(tensor[at])}, "
            f"expected {float(expected[at])}; nothing was timed"
        )


def _check_ours(tensor: Any, rank: int, ranks: int) -> None:
    """The exact sums, and fractions whose rounding shows the order of addition: bit-identical on all ranks."""
    import torch
    import torch.distributed as dist

    import commhooks

    _check(commhooks.all_reduce, tensor, rank, ranks)
    tensor.uniform_(generator=torch.Generator().manual_seed(rank))
    commhooks.all_reduce(tensor)
    bits = tensor.view(torch.int32).to(torch.int64).sum().reshape(1)
    seen = [torch.empty_like(bits) for _ in range(ranks)]
    dist.all_gather(seen, bits)
    if any(not torch.equal(bits, each) for each in seen):
        raise CommhooksError(
            f"results differ between ranks (sums of their bits: {[int(each) for each in seen]})"
        )
