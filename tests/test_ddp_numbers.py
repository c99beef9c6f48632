"""Gradients against plain DDP: every way of training that DDP knows, on real ranks, over every kind of link.

Each case runs in every set-up; a set-up is a number of ranks, a kind of link and a size of slices.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ddp_oracle import SMALL, Pair, batch, compare, learn, mlp, warnings_seen
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import commhooks

Settings = dict[str, Any]
CASES: dict[str, Callable[[Settings], None]] = {}


def case(function: Callable[[Settings], None]) -> Callable[[Settings], None]:
    CASES[function.__name__] = function
    return function


# --- ways of stepping ---------------------------------------------------------------------------------------


@case
def plain(settings: Settings) -> None:
    """Buckets are rebuilt after the first step; the parameters move in between."""
    pair = Pair(mlp(), settings)
    optimizers = [torch.optim.SGD(ddp.parameters(), lr=0.01) for ddp in (pair.plain, pair.ours)]
    for step in range(4):
        pair.both(learn(step))
        for optimizer in optimizers:
            optimizer.step()
    assert pair.handle.stats()["native_buckets"] == 0
    assert pair.handle.stats()["steps"] == 4


@case
def accumulation(settings: Settings) -> None:
    def twice(ddp: DistributedDataParallel) -> None:
        with ddp.no_sync():
            learn(0)(ddp)
            learn(1)(ddp)
        learn(2)(ddp)

    pair = Pair(mlp(), settings)
    for _ in range(3):
        pair.both(twice)


class Branches(nn.Module):
    """Ranks may take different branches; `idle` is used by none."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(13, 8)
        self.left, self.right, self.idle = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return (self.left, self.right)[branch % 2](torch.tanh(self.trunk(x)))


def _branch(step: int, branch: int) -> Callable[[DistributedDataParallel], None]:
    return lambda ddp: ddp(batch(step, 5, 13), branch).square().sum().backward()


@case
def unused_parameters(settings: Settings) -> None:
    pair = Pair(Branches(), settings, find_unused_parameters=True)
    for step in range(4):
        pair.both(_branch(step, dist.get_rank() + step))
        assert pair.ours.module.idle.weight.grad is None


@case
def branch_used_only_without_sync(settings: Settings) -> None:
    def uneven(ddp: DistributedDataParallel) -> None:
        with ddp.no_sync():
            _branch(0, 1)(ddp)
        _branch(1, 0)(ddp)

    pair = Pair(Branches(), settings, find_unused_parameters=True)
    for _ in range(3):
        pair.both(uneven)


@case
def static_graph(settings: Settings) -> None:
    Pair(mlp(), settings, static_graph=True).steps(4)


@case
def static_graph_with_accumulation(settings: Settings) -> None:
    pair = Pair(mlp(), settings, static_graph=True)
    pair.steps(2)
    with pair.plain.no_sync(), pair.ours.no_sync():
        learn(5)(pair.plain)
        learn(5)(pair.ours)
    for ddp in (pair.plain, pair.ours):
        learn(6)(ddp)
    pair.compare()


@case
def bucket_views(settings: Settings) -> None:
    """Gradients that are views of the buckets, kept in place (zeroed) and dropped, over steps."""
    for unused in (False, True):
        pair = Pair(mlp(), settings, gradient_as_bucket_view=True, find_unused_parameters=unused)
        for step in range(4):
            for ddp in (pair.plain, pair.ours):
                ddp.zero_grad(set_to_none=step % 2 == 0)
                learn(step)(ddp)
            pair.compare()


@case
def uneven_inputs(settings: Settings) -> None:
    """`Join`: ranks that ran out feed zeros."""
    pair = Pair(mlp(), settings)
    steps = 2 + 2 * dist.get_rank()
    for ddp in (pair.plain, pair.ours):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        with ddp.join():
            for step in range(steps):
                optimizer.zero_grad()
                learn(step)(ddp)
                optimizer.step()
    for ours, plain in zip(pair.ours.parameters(), pair.plain.parameters()):
        torch.testing.assert_close(ours, plain)
    pair.handle.flush()


@case
def two_models_interleaved(settings: Settings) -> None:
    first, second = Pair(mlp(), settings), Pair(mlp((13, 9, 9)), settings)
    for step in range(3):
        for pair in (first, second):
            for ddp in (pair.plain, pair.ours):
                ddp.zero_grad()
        for one, other in ((first.plain, second.plain), (first.ours, second.ours)):
            x = batch(step, 5, 13)
            (one(x).square().sum() + other(x).square().sum()).backward()
        first.compare()
        second.compare()


@case
def registered_after_steps(settings: Settings) -> None:
    model = mlp()
    plain = DistributedDataParallel(copy.deepcopy(model), **SMALL)
    ours = DistributedDataParallel(model, **SMALL)
    for step in range(4):
        if step == 2:
            commhooks.register(ours, **settings)
        for ddp in (plain, ours):
            ddp.zero_grad()
            learn(step)(ddp)
        compare(ours, plain)


@case
def subgroup(settings: Settings) -> None:
    """Only some ranks form a group; the others go on without it."""
    members = list(range(dist.get_world_size() - 1, 0, -1)) if dist.get_world_size() > 2 else [1, 0]
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return
    model = mlp()
    plain = DistributedDataParallel(copy.deepcopy(model), process_group=group, **SMALL)
    ours = DistributedDataParallel(model, process_group=group, **SMALL)
    commhooks.register(ours, **settings)
    for step in range(3):
        for ddp in (plain, ours):
            ddp.zero_grad()
            learn(step)(ddp)
        compare(ours, plain, group)


# --- kinds of parameters ------------------------------------------------------------------------------------


def _of_type(dtype: torch.dtype, settings: Settings) -> None:
    Pair(mlp(dtype=dtype), settings).steps(3, functools.partial(learn, dtype=dtype))


@case
def half(settings: Settings) -> None:
    _of_type(torch.float16, settings)


@case
def bfloat16(settings: Settings) -> None:
    _of_type(torch.bfloat16, settings)


@case
def double(settings: Settings) -> None:
    _of_type(torch.float64, settings)


@case
def complex_numbers(settings: Settings) -> None:
    _of_type(torch.complex64, settings)
    _of_type(torch.complex128, settings)


class Mixed(nn.Module):
    """Parameters of four types; the order of buckets is then not the order of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(13, 9, dtype=torch.float64)
        self.two = nn.Linear(9, 11)
        self.three = nn.Linear(11, 5, dtype=torch.bfloat16)
        self.four = nn.Linear(5, 3, dtype=torch.float16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.two(self.one(x.double()).float()))
        return self.four(torch.tanh(self.three(x.bfloat16())).half()).float()


@case
def mixed_types(settings: Settings) -> None:
    Pair(Mixed(), settings).steps(3)


@case
def large_half_gradients(settings: Settings) -> None:
    """Gradients of 40,000 on every rank: their sum overflows, their average doesn't."""
    model = nn.Linear(4, 1, bias=False, dtype=torch.float16)
    ddp = DistributedDataParallel(model)
    commhooks.register(ddp, **settings)
    ddp(torch.full((1, 4), 40_000.0, dtype=torch.float16)).sum().backward()
    assert model.weight.grad is not None and model.weight.grad.tolist() == [[40_000.0] * 4]


@case
def sparse_gradients(settings: Settings) -> None:
    """Sparse buckets take the group's own all-reduce; one rank looks up a single row only."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(11, 5, sparse=True)
            self.head = nn.Linear(5, 3)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.head(self.table(words))

    def step(ddp: DistributedDataParallel) -> None:
        words = torch.tensor([1, 1] if dist.get_rank() == 0 else [2, 3])
        ddp(words).square().sum().backward()

    pair = Pair(Words(), settings)
    for _ in range(3):
        pair.both(step)
    stats = pair.handle.stats()
    assert (stats["native_buckets"], stats["steps"]) == (3, 3)


@case
def channels_last(settings: Settings) -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Tanh(), nn.Conv2d(6, 4, 3)).to(
        memory_format=torch.channels_last
    )  # type: ignore[call-overload]

    def step(ddp: DistributedDataParallel) -> None:
        x = batch(0, 2, 3, 9, 9).to(memory_format=torch.channels_last)
        ddp(x).square().sum().backward()

    pair = Pair(model, settings)
    for _ in range(3):
        pair.both(step)


@case
def tied(settings: Settings) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into = nn.Linear(13, 13)
            self.out = nn.Linear(13, 13)
            self.out.weight = self.into.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(torch.tanh(self.into(x)))

    Pair(Tied(), settings).steps(3)


@case
def frozen_then_unfrozen(settings: Settings) -> None:
    """A frozen layer has no gradient; unfreezing it is not silent, even when another is frozen instead."""
    model = mlp()
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    layers[0].requires_grad_(False)
    pair = Pair(model, settings, find_unused_parameters=True)
    with warnings_seen() as seen:
        pair.steps(3)
        assert not seen
        for ddp in (pair.plain, pair.ours):
            trainable = [layer for layer in ddp.module if isinstance(layer, nn.Linear)]
            trainable[0].requires_grad_(True)
            trainable[1].requires_grad_(False)
        learn(3)(pair.ours)
        learn(4)(pair.ours)
    assert len(seen) == 1 and "became trainable" in seen[0], seen


@case
def unfrozen_before_registering(settings: Settings) -> None:
    model = mlp()
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    layers[0].requires_grad_(False)
    ddp = DistributedDataParallel(model, **SMALL)
    layers[0].requires_grad_(True)
    with warnings_seen() as seen:
        commhooks.register(ddp, **settings)
        for step in range(3):
            learn(step)(ddp)
    assert len(seen) == 1 and "became trainable" in seen[0], seen


@case
def zero_size(settings: Settings) -> None:
    """Parameters without elements, alone in their bucket (their own type) and among others."""

    class Hollow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()
            self.none = nn.Parameter(torch.zeros(0))
            self.other = nn.Parameter(torch.zeros(0, 4, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x) + self.none.sum() + self.other.sum().float()

    Pair(Hollow(), settings).steps(3)


@case
def scalars(settings: Settings) -> None:
    """Parameters of one element: less data than ranks."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    Pair(Scale(), settings).steps(3)


# --- ways of computing --------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.layers = nn.ModuleList(nn.Linear(13, 13) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.layers[0](x))
        for layer in list(self.layers)[1:]:
            x = checkpoint(lambda y, layer=layer: torch.tanh(layer(y)), x, use_reentrant=self.reentrant)
        return x


@case
def checkpointing(settings: Settings) -> None:
    Pair(Checkpointed(False), settings).steps(3)


@case
def checkpointing_reentrant(settings: Settings) -> None:
    Pair(Checkpointed(True), settings).steps(3)


@case
def checkpointing_reentrant_first_layer(settings: Settings) -> None:
    """The last bucket gets ready inside a nested backward."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()
            self.head = nn.Linear(7, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(checkpoint(self.body, x.requires_grad_(), use_reentrant=True))

    Pair(First(), settings).steps(3)


@case
def autocast(settings: Settings) -> None:
    def mixed(step: int) -> Callable[[DistributedDataParallel], None]:
        def forward_backward(ddp: DistributedDataParallel) -> None:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = ddp(batch(step, 5, 13)).square().sum()
            loss.backward()

        return forward_backward

    Pair(mlp(), settings).steps(3, mixed)


@case
def buffers_are_broadcast(settings: Settings) -> None:
    """DDP's own broadcast of buffers runs beside our links."""
    model = nn.Sequential(nn.Linear(13, 8), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 3))
    pair = Pair(model, settings)

    def step(ddp: DistributedDataParallel) -> None:
        F.mse_loss(ddp(batch(0, 5, 13)), batch(1, 5, 3)).backward()

    for _ in range(3):
        for ddp in (pair.plain, pair.ours):
            ddp.zero_grad()
            step(ddp)
        for name in ("0.weight", "2.weight", "2.bias"):
            ours, plain = pair.ours.module.get_parameter(name), pair.plain.module.get_parameter(name)
            torch.testing.assert_close(ours.grad, plain.grad)
    assert torch.equal(pair.ours.module[1].running_mean, pair.plain.module[1].running_mean)


# --- hooks around hooks -------------------------------------------------------------------------------------


def _wrapped(wrapper: Any, torch_hook: Any, settings: Settings) -> None:
    model = mlp()
    plain = DistributedDataParallel(copy.deepcopy(model), **SMALL)
    plain.register_comm_hook(None, torch_hook)
    ours = DistributedDataParallel(model, **SMALL)
    ours.register_comm_hook(commhooks.CommHookState(None, **settings), commhooks.compose(wrapper))
    for step in range(3):
        for ddp in (plain, ours):
            ddp.zero_grad()
            learn(step)(ddp)
        for one, other in zip(ours.parameters(), plain.parameters()):
            torch.testing.assert_close(one.grad, other.grad, rtol=0.02, atol=0.02)


@case
def compressed_to_half(settings: Settings) -> None:
    _wrapped(fp16_compress_wrapper, fp16_compress_hook, settings)


@case
def raw_pair(settings: Settings) -> None:
    """PyTorch's own convention, without the model's layers."""
    model = mlp()
    plain = DistributedDataParallel(copy.deepcopy(model), **SMALL)
    ours = DistributedDataParallel(model, **SMALL)
    ours.register_comm_hook(commhooks.CommHookState(**settings), commhooks.allreduce_hook)
    for step in range(3):
        for ddp in (plain, ours):
            ddp.zero_grad()
            learn(step)(ddp)
        compare(ours, plain)


# --- launching ----------------------------------------------------------------------------------------------

SETUPS: dict[str, tuple[int, Settings]] = {
    "2 ranks, memory, slices of 7": (2, {"links": "shm", "schedule": "trees", "slice_numel": 7}),
    "3 ranks, checked ring, slices of one": (
        3,
        {"links": "tcp", "schedule": "ring", "checksum": True, "slice_numel": 1},
    ),
    "3 ranks, memory file, slices larger than buckets": (
        3,
        {"links": "shm", "schedule": "trees", "slice_numel": 1_000_000},
    ),
    "4 ranks, uneven cards": (4, {"links": "tcp", "topology": "nic:200,800,800,800", "priority": "fifo"}),
}


def run_case(name: str, settings: Settings, memory_file: bool) -> None:
    """In a rank: one case."""
    if memory_file:
        from commhooks import hosts

        hosts._can_read = lambda other: False  # as where the kernel forbids it
    torch.manual_seed(7)
    CASES[name](settings)


@functools.cache
def _failures(setup: str) -> dict[str, str]:
    world_size, settings = SETUPS[setup]
    return harness.run_cases(world_size, run_case, list(CASES), settings, "memory file" in setup)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("setup", SETUPS)
def test_as_plain_ddp(setup: str, name: str) -> None:
    failure = _failures(setup)[name]
    if failure:
        pytest.fail(failure, pytrace=False)
