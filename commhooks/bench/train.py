"""``commhooks bench train``: training steps of a replayed model, ours and the peers' in turn, in one run.

Where in the flow: a command -> launch (the ranks) -> trainers -> medians of interleaved rounds, beside the fluid limit.

A round of one contender is a few steps in a row, the first of them untimed: with overlap across steps a step's communication
ends in the next one, so only a step that follows one of its own kind shows what a step costs.

Invariants: parameters are compared before anything is timed; all ranks do the same rounds; a round took as long as on the
slowest rank.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

from commhooks.bench import launch
from commhooks.bench.harness import Ensemble, GlooEnsemble, Timing, null_note, ratio, render
from commhooks.bench.models import MODEL_NAMES, ModelSpec, model_spec, scaled
from commhooks.core.fluid import fluid_limits, ring_s
from commhooks.core.topology import Topology
from commhooks.errors import ConfigError, MissingDependency
from commhooks.lab import read_topology

_BYTES_PER_ELEMENT = 4
# One step of each contender takes about this long together, unless --scale says otherwise: long against what a step costs
# at any size (autograd, hooks, latency), short enough for several rounds.
_TOGETHER_S = 5.0
# Autograd, hooks and latency cost some hundred milliseconds a step where ranks share cores, whatever its size.
_LEAST_COMPUTE_S = 0.75
_SMALLEST_SCALE = 1e-3
_FEWEST_ROUNDS = 3
_MOST_TRIAL_STEPS = 500


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--model", default="resnet50", help=f"one of {', '.join(MODEL_NAMES)} (resnet50)")
    parser.add_argument(
        "--balance",
        type=float,
        default=1.0,
        help="seconds of communication, for plain DDP's ring on this network, per second of computing (1)",
    )
    parser.add_argument(
        "--scale", type=float, help="shrink parameters and computing alike (default: steps of a few seconds)"
    )
    parser.add_argument(
        "--peers", default="ddp", help="comma-separated: ddp, horovod, p3-baseline, p3-slicing, p3 (ddp)"
    )
    parser.add_argument("--ranks", type=int, default=4, help="local ranks to start when no launcher did (4)")
    parser.add_argument("--steps", type=int, default=3, help="timed steps in a row (3)")
    parser.add_argument(
        "--rounds", type=int, help="rounds (default: as many as fit into --seconds, at least 3)"
    )
    parser.add_argument("--seconds", type=float, default=45.0, help="time for the rounds (45)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KNOB=VALUE", help="a setting for commhooks"
    )


def main(namespace: argparse.Namespace) -> int:
    """Time, and print on rank 0."""
    if namespace.balance <= 0 or namespace.steps < 1:
        raise ConfigError(
            f"--balance {namespace.balance:g}, --steps {namespace.steps}: expected a balance above 0 and at least 1 step"
        )
    model_spec(namespace.model)
    if not launch.launched():
        return launch.start_local(namespace.ranks, _arguments(namespace))
    with launch.process_group():
        row, notes = _measure(namespace)
    if launch.rank() == 0:
        print(render([row], namespace.json, notes))
    return 0


def _arguments(namespace: argparse.Namespace) -> list[str]:
    words = ["bench", "train"]
    for name in ("model", "balance", "scale", "peers", "steps", "rounds", "seconds"):
        value = getattr(namespace, name)
        words += [f"--{name}", str(value)] if value is not None else []
    words += [word for setting in namespace.set for word in ("--set", setting)]
    return words + (["--json"] if namespace.json else [])


def _measure(namespace: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    import torch.distributed as dist

    from commhooks.bench.trainers import Job, check_alike

    ensemble = GlooEnsemble()
    peers = _peers(namespace.peers)
    network = _network(dist.get_world_size())
    whole = model_spec(namespace.model)
    per_byte_s = _ring_s_per_byte(network, ensemble)
    scale = namespace.scale or _scale(whole, network, per_byte_s, namespace.balance, len(peers))
    model = scaled(whole, scale)
    compute_s = model.numel * _BYTES_PER_ELEMENT * per_byte_s / namespace.balance
    job = Job(model, compute_s, scale, dict(setting.split("=", 1) for setting in namespace.set))
    notes: list[str] = []
    trainers = _trainers([*peers, "commhooks"], job, notes)
    for trainer in trainers:
        trainer.replay.set_compute(0.0)
    check_alike(trainers)
    for trainer in trainers:
        trainer.replay.set_compute(compute_s)
        _end_trials(trainer)
    timings = _rounds(trainers, ensemble, namespace.steps, namespace.rounds, namespace.seconds)
    row = _row(
        namespace, network, model, scale, compute_s, timings, str(trainers[-1].stats().get("overlap", ""))
    )
    notes.append(null_note(trainers[0].name, timings[trainers[0].name]))
    return row, notes


def _trainers(names: Sequence[str], job: Any, notes: list[str]) -> list[Any]:
    from commhooks.bench.trainers import TRAINERS

    trainers = []
    for name in names:
        try:
            trainers.append(TRAINERS[name](job))
        except MissingDependency as error:
            notes.append(f"without {name}: {error}")
    return trainers


def _peers(text: str) -> list[str]:
    from commhooks.bench.trainers import TRAINERS

    names = [name.strip() for name in text.split(",") if name.strip()]
    known = [name for name in TRAINERS if name != "commhooks"]
    unknown = [name for name in names if name not in known]
    if unknown or len(set(names)) != len(names) or not names:
        raise ConfigError(f"--peers {text!r}: expected different ones of {', '.join(known)}")
    return names


# --- the network ---------------------------------------------------------------------------------------------------------


def _network(ranks: int) -> Topology | None:
    """The network this run is on, where its rates are known."""
    text = launch.settings().topology
    if text in ("uniform", "probe"):
        return None
    network = read_topology(text)[1]
    if network.world_size != ranks:
        raise ConfigError(f"topology {text!r} has {network.world_size} ranks, this run has {ranks}")
    return network


def _ring_s_per_byte(network: Topology | None, ensemble: Ensemble) -> float:
    """Seconds that plain DDP's ring takes per byte of gradients: computed where rates are known, else measured."""
    if network is not None:
        return ring_s(network, 1.0)
    import torch
    import torch.distributed as dist

    tensor = torch.zeros(4_000_000)
    taken = []
    for _ in range(4):
        ensemble.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        taken.append(ensemble.slowest(time.perf_counter() - start))
    return statistics.median(taken[1:]) / (tensor.numel() * _BYTES_PER_ELEMENT)


def _scale(
    model: ModelSpec, network: Topology | None, per_byte_s: float, balance: float, peers: int
) -> float:
    ring = model.numel * _BYTES_PER_ELEMENT * per_byte_s
    compute_s = ring / balance
    trees = ring if network is None else _trees_s(network, model.numel * _BYTES_PER_ELEMENT)
    plain = fluid_limits(model.shares(), balance).plain
    ours = fluid_limits(model.shares(), trees / compute_s).priority
    wanted = max(_TOGETHER_S / ((peers * plain + ours) * compute_s), _LEAST_COMPUTE_S / compute_s)
    return max(_SMALLEST_SCALE, min(1.0, wanted))


def _trees_s(network: Topology, n_bytes: int) -> float:
    from commhooks.core.treegen import allreduce_bound

    return allreduce_bound(network, n_bytes)


# --- timing --------------------------------------------------------------------------------------------------------------


def _rounds(
    trainers: Sequence[Any], ensemble: Ensemble, steps: int, rounds: int | None, budget_s: float
) -> dict[str, Timing]:
    for trainer in trainers:
        _steps(trainer, ensemble, 2)
    durations: dict[str, list[float]] = {trainer.name: [] for trainer in trainers}
    planned = rounds or _FEWEST_ROUNDS
    done = 0
    start = time.perf_counter()
    while done < planned:
        for trainer in trainers:
            durations[trainer.name].append(_steps(trainer, ensemble, steps))
        done += 1
        if done == 1 and rounds is None:
            taken_s = ensemble.slowest(time.perf_counter() - start)
            planned = max(_FEWEST_ROUNDS, int(budget_s / taken_s))
    return {name: Timing(tuple(values)) for name, values in durations.items()}


def _end_trials(trainer: Any) -> None:
    """Train until settings that are tried over real steps are settled; ranks settle them at the same step."""
    import torch

    left = _MOST_TRIAL_STEPS
    while left and "on trial" in str(trainer.stats().get("overlap_reason", "")):
        trainer.step(torch.ones(1))
        left -= 1
    trainer.settle()


def _steps(trainer: Any, ensemble: Ensemble, steps: int) -> float:
    """Seconds per step, of `steps` that follow an untimed one."""
    import torch

    x = torch.ones(1)
    ensemble.barrier()
    trainer.step(x)
    start = time.perf_counter()
    for _ in range(steps):
        trainer.step(x)
    taken_s = (time.perf_counter() - start) / steps
    trainer.settle()
    return ensemble.slowest(taken_s)


# --- the row ---------------------------------------------------------------------------------------------------------------


def _row(
    namespace: argparse.Namespace,
    network: Topology | None,
    model: ModelSpec,
    scale: float,
    compute_s: float,
    timings: dict[str, Timing],
    overlap: str,
) -> dict[str, Any]:
    import torch.distributed as dist

    bound_s = comm_bound_s = plain_bound_s = None
    if network is not None:
        n_bytes = model.numel * _BYTES_PER_ELEMENT
        comm_bound_s = _trees_s(network, n_bytes)
        bound_s = fluid_limits(model.shares(), comm_bound_s / compute_s).priority * compute_s
        plain_bound_s = fluid_limits(model.shares(), ring_s(network, n_bytes) / compute_s).plain * compute_s
    ours = timings["commhooks"]
    peers = {name: timing for name, timing in timings.items() if name != "commhooks"}
    first = peers.get("ddp") or next(iter(peers.values()), None)
    row: dict[str, Any] = {
        "case": f"{network.name if network else 'local'} balance {namespace.balance:g}",
        "model": model.name,
        "ranks": dist.get_world_size(),
        "scale": round(scale, 4),
        "compute_s": round(compute_s, 6),
        "comm_bound_s": _rounded(comm_bound_s),
        "ddp_s": None,
        "horovod_s": None,
        **{key: value for name, timing in peers.items() for key, value in timing.fields(_stem(name)).items()},
        **ours.fields("commhooks"),
        "plain_bound_s": _rounded(plain_bound_s),
        "bound_s": _rounded(bound_s),
        "speedup": ratio(first.median_s if first else None, ours.median_s),
        **{f"speedup_{_stem(name)}": ratio(timing.median_s, ours.median_s) for name, timing in peers.items()},
        "of_bound": ratio(bound_s, ours.median_s),
        "overlap": overlap,
        "rounds": len(ours.durations_s),
        "steps": namespace.steps,
        "null_speedup": round(first.null_ratio, 4) if first else None,
    }
    return row


def _stem(name: str) -> str:
    return name.replace("-", "_")


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
