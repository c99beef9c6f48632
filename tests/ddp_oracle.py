"""A model twice, plain DDP and DDP with our hook, and the comparison of their gradients (runs inside ranks)."""

from __future__ import annotations

import contextlib
import copy
import logging
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks

Step = Callable[[DistributedDataParallel], None]

#: Small buckets, so that a small model has several.
SMALL = {"bucket_cap_mb": 0.002}
LIMITS = {"timeout_s": 60, "heartbeat_s": 30}


def mlp(sizes: tuple[int, ...] = (13, 17, 31, 7), dtype: torch.dtype = torch.float32) -> nn.Module:
    layers: list[nn.Module] = []
    for into, out in zip(sizes, sizes[1:]):
        layers += [nn.Linear(into, out, dtype=dtype), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def batch(step: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Another batch on every rank and in every step."""
    seed = 1000 * step + dist.get_rank() + 1
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def learn(step: int, dtype: torch.dtype = torch.float32) -> Step:
    """One forward and backward over this rank's batch of `step`."""

    def forward_backward(ddp: DistributedDataParallel) -> None:
        output = ddp(batch(step, 5, 13, dtype=dtype))
        (output * output).sum().abs().backward()

    return forward_backward


class Pair:
    """The same model under plain DDP and under DDP with our hook.

    Parameters
    ----------
    model : equal on all ranks
    settings : for `register`
    ddp : options of both wrappers
    """

    def __init__(self, model: nn.Module, settings: dict[str, Any], **ddp: Any) -> None:
        options = {**SMALL, **ddp}
        self.plain = DistributedDataParallel(copy.deepcopy(model), **options)
        self.ours = DistributedDataParallel(model, **options)
        self.handle = commhooks.register(self.ours, **LIMITS, **settings)

    def both(self, step: Step) -> None:
        """Run `step` on both, the gradients set to nothing first, and compare."""
        for ddp in (self.plain, self.ours):
            ddp.zero_grad()
            step(ddp)
        self.compare()

    def steps(self, count: int, make: Callable[[int], Step] = learn) -> None:
        for step in range(count):
            self.both(make(step))

    def compare(self) -> None:
        compare(self.ours, self.plain)


def compare(ours: nn.Module, plain: nn.Module, group: Any = None) -> None:
    """Bit-identical over the ranks, and equal to the oracle but for the rounding of another order of addition."""
    oracle = dict(plain.named_parameters())
    digest = 0
    for name, parameter in ours.named_parameters():
        wanted, got = oracle[name].grad, parameter.grad
        assert (got is None) == (wanted is None), f"{name}: gradient {got}, plain DDP has {wanted}"
        if got is None or wanted is None or got.numel() == 0:
            continue
        if got.layout is not torch.strided:
            got, wanted = got.coalesce().to_dense(), wanted.coalesce().to_dense()
        _close(name, got, wanted)
        digest = zlib.crc32(got.detach().reshape(-1).view(torch.uint8).numpy().tobytes(), digest)
    identical(digest, group)


def _close(name: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.dtype == wanted.dtype and got.stride() == wanted.stride(), (
        f"{name}: {got.dtype} {got.stride()}"
    )
    wide = torch.complex128 if got.is_complex() else torch.float64
    away = (got.detach().to(wide) - wanted.detach().to(wide)).abs().max().item()
    size = wanted.detach().abs().max().item()
    limit = 16 * torch.finfo(got.dtype).eps * size
    assert size > 0, f"{name}: plain DDP's gradient is all zero: this case shows nothing"
    assert away <= limit, (
        f"{name}: off by {away:.3g} where plain DDP has at most {size:.3g} (limit {limit:.3g})"
    )


def identical(digest: int, group: Any = None) -> None:
    """Every rank of the group has the same `digest`."""
    digests = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(digests, torch.tensor([digest]), group=group)
    seen = [int(tensor) for tensor in digests]
    assert len(set(seen)) == 1, f"gradients differ in their bits between ranks: {seen}"


@contextlib.contextmanager
def warnings_seen() -> Iterator[list[str]]:
    """The commhooks logger's warnings in a block."""
    seen: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    handler = Collect(logging.WARNING)
    logger = logging.getLogger("commhooks")
    logger.addHandler(handler)
    try:
        yield seen
    finally:
        logger.removeHandler(handler)
