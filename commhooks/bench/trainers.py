"""The contenders of ``bench train``: the same replayed model, trained in different ways.

Where in the flow: bench.train -> **trainers** -> DDP, Horovod, the paper's baseline, commhooks.

Invariants: all start from the same parameters and see the same inputs; each has a model, an optimizer and buckets of
its own.  Buckets shrink with the model (`scale`), or a scaled model would fit into one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commhooks.bench import launch
from commhooks.bench.models import ModelSpec
from commhooks.bench.replay import ReplayModel
from commhooks.errors import ConfigError

DDP_BUCKET_MB = 25.0
HOROVOD_FUSION_BYTES = 64 << 20


@dataclass(frozen=True)
class Job:
    """What is trained: a model, the seconds of computing in a step, and how far the model was scaled."""

    model: ModelSpec
    compute_s: float
    scale: float
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def bucket_mb(self) -> float:
        """DDP's default bucket, scaled."""
        return DDP_BUCKET_MB * self.scale


class Trainer:
    """One contender: steps with `step`, has everything applied after `settle`.

    Parameters
    ----------
    name : the stem of its fields
    replay : its own model
    call : runs the forward pass
    optimizer : has ``zero_grad`` and ``step``
    settle : finishes what is under way
    stats : what to tell about it
    """

    def __init__(
        self,
        name: str,
        replay: ReplayModel,
        call: Callable[[torch.Tensor], torch.Tensor],
        optimizer: Any,
        settle: Callable[[], None] = lambda: None,
        stats: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self.name = name
        self.replay = replay
        self._call = call
        self._optimizer = optimizer
        self.settle = settle
        self.stats = stats

    def step(self, x: torch.Tensor) -> None:
        """One training step."""
        self._optimizer.zero_grad()
        self._call(x).sum().backward()
        self._optimizer.step()

    def parameters(self) -> torch.Tensor:
        """All parameters, finished, in one vector."""
        self.settle()
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.replay.parameters()])


def _replay(job: Job) -> tuple[ReplayModel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    replay = ReplayModel(job.model, job.compute_s)
    return replay, torch.optim.SGD(replay.parameters(), lr=1e-3, momentum=0.9)


def ddp(job: Job) -> Trainer:
    """Plain DistributedDataParallel."""
    replay, optimizer = _replay(job)
    return Trainer("ddp", replay, DistributedDataParallel(replay, bucket_cap_mb=job.bucket_mb), optimizer)


def commhooks(job: Job) -> Trainer:
    """The same, and one line."""
    import commhooks as package

    replay, optimizer = _replay(job)
    wrapped = DistributedDataParallel(replay, bucket_cap_mb=job.bucket_mb)
    handle = package.register(wrapped, optimizer, **job.settings)
    return Trainer("commhooks", replay, wrapped, optimizer, handle.flush, handle.stats)


def horovod(job: Job) -> Trainer:
    """Plain Horovod, in the place that this process's launcher gave it."""
    launch.default_variable("HOROVOD_FUSION_THRESHOLD", str(int(HOROVOD_FUSION_BYTES * job.scale)))
    import commhooks.horovod as hvd

    hvd.init()
    replay, optimizer = _replay(job)
    plain = hvd._plain_optimizer(optimizer, named_parameters=replay.named_parameters())
    return Trainer("horovod", replay, replay, plain)


def commhooks_horovod(job: Job) -> Trainer:
    """Horovod's optimizer, ours: the change of one import, and ``model=``."""
    import commhooks.horovod as hvd

    if not hvd.is_initialized():
        hvd.init()
    replay, optimizer = _replay(job)
    ours = hvd.DistributedOptimizer(
        optimizer, named_parameters=replay.named_parameters(), model=replay, config=job.settings
    )
    return Trainer("commhooks-horovod", replay, replay, ours, ours.handle.flush, ours.handle.stats)


def baseline(job: Job) -> Trainer:
    """The kind of system that P3's paper compares with; see `bench.paper_servers`."""
    from commhooks.bench.paper_servers import paper_trainer

    return paper_trainer("baseline", job, _replay)


def slicing(job: Job) -> Trainer:
    """P3's slices without its priorities."""
    from commhooks.bench.paper_servers import paper_trainer

    return paper_trainer("slicing", job, _replay)


def p3(job: Job) -> Trainer:
    """P3 as published: slices, layer priority, one slice in flight per link, immediate broadcast."""
    from commhooks.bench.paper_servers import paper_trainer

    return paper_trainer("p3", job, _replay)


TRAINERS: dict[str, Callable[[Job], Trainer]] = {
    "ddp": ddp,
    "horovod": horovod,
    "commhooks-horovod": commhooks_horovod,
    "p3-baseline": baseline,
    "p3-slicing": slicing,
    "p3": p3,
    "commhooks": commhooks,
}


def check_alike(trainers: list[Trainer], steps: int = 4) -> None:
    """Train all a few steps and compare: with each other up to rounding, and ours between ranks bit for bit.

    Raises
    ------
    ConfigError
        A contender's parameters differ; nothing is timed then.
    """
    rank = dist.get_rank()
    for trainer in trainers:
        for number in range(steps):
            trainer.step(torch.tensor([1.0 + 0.1 * rank + 0.01 * number]))
    reference = trainers[0].parameters()
    for trainer in trainers:
        values = trainer.parameters()
        if not torch.allclose(values, reference, rtol=1e-4, atol=1e-6):
            worst = float((values - reference).abs().max())
            raise ConfigError(
                f"rank {rank}: after {steps} steps {trainer.name}'s parameters differ from {trainers[0].name}'s by up to "
                f"{worst:.3g}; nothing was timed"
            )
        bits = values.view(torch.int32).to(torch.int64).sum().reshape(1)
        seen = [torch.empty_like(bits) for _ in range(dist.get_world_size())]
        dist.all_gather(seen, bits)
        if any(not torch.equal(bits, other) for other in seen):
            raise ConfigError(
                f"{trainer.name}: after {steps} steps ranks hold different parameters; nothing was timed"
            )
