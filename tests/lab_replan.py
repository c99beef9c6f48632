"""Run by `test_replan_lab`, once per rank of a lab: trains until the plan has changed with the network, beside plain DDP.

Arguments: the step at which rank 0 asks the lab for other rates, ``RESOURCE=MBIT``, and the most steps to wait after it.
Each rank prints one line of JSON to standard error: the steps done and counted, each switch with the step that it came with.
"""

import json
import sys

import torch
import torch.distributed as dist
from ddp_oracle import Pair, batch
from torch import nn

from commhooks.lab import set_rate

WIDTH = 512
LAYERS = 3  # of 512 x 512: most of a million parameters
AFTER = 4  # steps by the new plan


def model() -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    return nn.Sequential(*[part for layer in layers for part in (layer, nn.Tanh())])


class Training:
    """Our model steps; plain DDP's copy takes its parameters over, so that each step's gradients can be compared."""

    def __init__(self) -> None:
        # Two buckets, so that a plan changes between jobs and not between programs.
        self.pair = Pair(model(), {"schedule": "trees", "replan": True}, bucket_cap_mb=2)
        self.optimizer = torch.optim.SGD(self.pair.ours.parameters(), lr=0.01, momentum=0.9)
        self.switches: list[tuple[int, str]] = []
        self.step = 0

    def one(self) -> None:
        inputs = batch(self.step, 8, WIDTH)
        self.pair.both(lambda ddp: ddp(inputs).square().sum().backward())
        self.optimizer.step()
        with torch.no_grad():
            for theirs, ours in zip(self.pair.plain.parameters(), self.pair.ours.parameters(), strict=True):
                theirs.copy_(ours)
        seen = self.pair.handle.stats()["tuning"]["plan_switches"]
        self.switches += [(self.step, words) for words in seen[len(self.switches) :]]
        self.step += 1


def main(change_at: int, resource: str, mbit_per_s: float, most: int) -> None:
    dist.init_process_group("gloo")
    training = Training()
    before = training.pair.handle.stats()["plan"]
    for _ in range(change_at):
        training.one()
    if dist.get_rank() == 0:
        set_rate(resource, mbit_per_s)
    for _ in range(most):
        training.one()
        if any(step >= change_at for step, _ in training.switches):
            break
    for _ in range(AFTER):
        training.one()
    stats = training.pair.handle.stats()
    report = {
        "rank": dist.get_rank(),
        "steps": training.step,
        "counted_steps": stats["steps"],
        "switches": training.switches,
        "plan_before": before,
        "plan_after": stats["plan"],
        "reason": stats["tuning"]["replan"],
    }
    print(json.dumps(report), file=sys.stderr, flush=True)
    training.pair.handle.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    where, rate = sys.argv[2].split("=")
    main(int(sys.argv[1]), where, float(rate), int(sys.argv[3]))
