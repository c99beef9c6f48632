"""``commhooks bench replan``: the network changes while a model trains; how fast are steps before, then, and by the new plan.

Where in the flow: a command in a lab -> `lab.set_rate` in mid-training -> steps, timed on the slowest rank -> the bound of the
changed network.

Invariants: steps go on throughout; the first step after the switch is compared with the average over Gloo.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from commhooks.bench import launch
from commhooks.bench.harness import GlooEnsemble, Timing, ratio, render
from commhooks.core.topology import Resource, Topology, payload_bytes_per_s
from commhooks.errors import CommhooksError, ConfigError
from commhooks.lab import read_topology, set_rate
from commhooks.lab_control import resources_named
from commhooks.lab_network import network_of

_WIDTH = 1000
_SETTLE_STEPS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--to",
        action="append",
        default=[],
        metavar="RESOURCE=MBIT",
        help="a resource's new rate; wan=100 for all shared cuts",
    )
    parser.add_argument("--mb", type=float, default=16.0, help="size of the model in 1e6 bytes (16)")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each phase (8)")
    parser.add_argument("--most", type=int, default=60, help="steps to wait for the switch (60)")


def main(namespace: argparse.Namespace) -> int:
    """Train, change the network, go on training, and print on rank 0."""
    if not launch.launched():
        raise ConfigError(
            "there is no network to change; run it as: commhooks lab TOPOLOGY -- commhooks bench replan …"
        )
    changes = [_change(text) for text in namespace.to or ["wan=100"]]
    before = read_topology(launch.settings().topology)[1]
    with launch.process_group():
        row = _measure(namespace, before, changes)
    if launch.rank() == 0:
        print(render([row], namespace.json, []))
    return 0


def _change(text: str) -> tuple[str, float]:
    name, _, rate = text.rpartition("=")
    try:
        number = float(rate)
    except ValueError:
        number = 0.0
    if not name or not number > 0:
        raise ConfigError(f"--to {text!r}: expected RESOURCE=MBIT, such as wan=100")
    return name, number


class _Training:
    """A model of one large layer after another; a step's time is its communication."""

    def __init__(self, n_bytes: float) -> None:
        import torch
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        import commhooks

        torch.manual_seed(0)
        layers = max(1, round(n_bytes / 4 / _WIDTH / _WIDTH))
        model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(layers)))
        self.n_bytes = layers * _WIDTH * _WIDTH * 4
        self._ddp = DistributedDataParallel(model)
        self.handle = commhooks.register(self._ddp, schedule="trees", replan=True)
        self._ensemble = GlooEnsemble()
        self._torch = torch

    def step(self) -> float:
        """Seconds of one step, on the slowest rank."""
        self._ddp.zero_grad()
        self._ensemble.barrier()
        start = time.perf_counter()
        self._backward()
        return self._ensemble.slowest(time.perf_counter() - start)

    def _backward(self) -> None:
        rank = self._torch.distributed.get_rank()
        inputs = self._torch.full((2, _WIDTH), 1.0 + rank)
        self._ddp(inputs).square().mean().backward()

    def switches(self) -> list[str]:
        """The tuner's words about each change of plan."""
        tuning = self.handle.stats()["tuning"]
        assert isinstance(tuning, Mapping)
        return list(tuning["plan_switches"])

    def check(self) -> None:
        """One step's gradients against the average that Gloo makes of the ranks' own.

        Raises
        ------
        CommhooksError
            They differ by more than rounding.
        """
        self._ddp.zero_grad()
        with self._ddp.no_sync():
            self._backward()
        own = [p.grad.clone() for p in self._ddp.parameters() if p.grad is not None]
        self._ddp.zero_grad()
        self._backward()
        world_size = self._torch.distributed.get_world_size()
        for parameter, gradient in zip(self._ddp.parameters(), own, strict=True):
            self._torch.distributed.all_reduce(gradient)
            seen = parameter.grad
            if seen is None or not self._torch.allclose(seen, gradient / world_size, rtol=1e-5, atol=1e-8):
                raise CommhooksError("a gradient after the change differs from the average of all ranks'")


def _measure(
    namespace: argparse.Namespace, before: Topology, changes: list[tuple[str, float]]
) -> dict[str, Any]:
    from commhooks.core.treegen import allreduce_bound

    changed = _changed(before, changes)
    training = _Training(namespace.mb * 1e6)
    for _ in range(_SETTLE_STEPS):
        training.step()
    first = [training.step() for _ in range(namespace.steps)]
    known = len(training.switches())
    if launch.rank() == 0:
        for name, rate in changes:
            set_rate(name, rate)
    old: list[float] = []
    while len(old) < namespace.most and len(training.switches()) == known:
        old.append(training.step())
    words = training.switches()[known:]
    training.check()
    new = [training.step() for _ in range(_SETTLE_STEPS + namespace.steps)][_SETTLE_STEPS:]
    training.handle.finish()
    bound_s = allreduce_bound(changed, training.n_bytes)
    # The rates change in mid-step; the last one holds the switch.
    timings = {"before": first, "changed": old[1:-1] or old, "after": new}
    fields = {name: Timing(tuple(values)) for name, values in timings.items()}
    return {
        "case": f"{before.name} to {', '.join(f'{name}={rate:g}' for name, rate in changes)}",
        "ranks": before.world_size,
        "bytes": training.n_bytes,
        **{key: value for name, timing in fields.items() for key, value in timing.fields(name).items()},
        "bound_s": round(bound_s, 6),
        "speedup": ratio(fields["changed"].median_s, fields["after"].median_s),
        "of_bound": ratio(bound_s, fields["after"].median_s),
        "steps_until_switch": len(old),
        "switch": words[0] if words else "none",
    }


def _changed(topology: Topology, changes: list[tuple[str, float]]) -> Topology:
    """The topology with the rates that are asked for, by the names that the lab knows."""
    network = network_of(topology)
    rates = {
        resource.name: payload_bytes_per_s(mbit_per_s)
        for name, mbit_per_s in changes
        for resource in resources_named(network, name)
    }
    resources = tuple(Resource(r.name, rates.get(r.name, r.bytes_per_s)) for r in topology.resources)
    return replace(topology, resources=resources)
