"""Registering: bad input by name, twice, after copies and files, under a compiler; settings that must be equal on all ranks."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from ddp_oracle import Pair, compare, learn, mlp, warnings_seen
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.errors import CommError, ConfigError, TopologyError, UnsupportedModelError

CASES: dict[str, Callable[[], None]] = {}
TREES: dict[str, Any] = {"schedule": "trees", "links": "tcp"}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def refuses(kind: type[Exception], words: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=words):
        call()


# --- bad input ---------------------------------------------------------------------------------------------------------


def test_no_process_group() -> None:
    with pytest.raises(ConfigError, match="init_process_group"):
        commhooks.CommHookState()
    with pytest.raises(ConfigError, match="init_process_group"):
        commhooks.all_reduce(torch.ones(3))


@case
def not_wrapped() -> None:
    refuses(ConfigError, "DistributedDataParallel\\(model\\)", lambda: commhooks.register(mlp()))  # type: ignore[arg-type]


@case
def unknown_setting_or_value() -> None:
    ddp = DistributedDataParallel(mlp())
    refuses(ConfigError, "slice_numel", lambda: commhooks.register(ddp, slice_nummel=3))
    refuses(ConfigError, "whole number", lambda: commhooks.register(ddp, slice_numel=0))


@case
def unknown_topology() -> None:
    """The same error on every rank, though rank 0 alone plans."""
    ddp = DistributedDataParallel(mlp())
    refuses(TopologyError, "nick:", lambda: commhooks.register(ddp, topology="nick:200,800"))


@case
def topology_for_other_ranks() -> None:
    ddp = DistributedDataParallel(mlp())
    refuses(TopologyError, "5 ranks", lambda: commhooks.register(ddp, topology="nic:200,800*4"))


@case
def interface_that_one_rank_lacks() -> None:
    """Every rank hears of it at once, not only the one that lacks it."""
    ddp = DistributedDataParallel(mlp())
    name = "nosuch0" if dist.get_rank() == 1 else "lo"
    refuses(ConfigError, "nosuch0.*this host has", lambda: commhooks.register(ddp, interface=name))


@case
def congestion_control_that_one_rank_lacks() -> None:
    ddp = DistributedDataParallel(mlp())
    name = "nosuch" if dist.get_rank() == 1 else "auto"
    refuses(ConfigError, "nosuch", lambda: commhooks.register(ddp, tcp_congestion=name, links="tcp"))


@case
def memory_links_across_hosts() -> None:
    from commhooks import hosts

    there = hosts.host_identity
    hosts.host_identity = lambda: f"host {dist.get_rank()}"
    try:
        refuses(ConfigError, "other hosts", lambda: commhooks.all_reduce(torch.ones(2), links="shm"))
    finally:
        hosts.host_identity = there


@case
def foreign_hook() -> None:
    ddp = DistributedDataParallel(mlp())
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    refuses(ConfigError, "allreduce_hook.*compose", lambda: commhooks.register(ddp))
    learn(0)(ddp)


@case
def built_in_hook() -> None:
    ddp = DistributedDataParallel(mlp())
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    refuses(ConfigError, "already has.*FP16_COMPRESS", lambda: commhooks.register(ddp))
    learn(0)(ddp)


@case
def wrapped_then_registered() -> None:
    ddp = DistributedDataParallel(mlp())
    hook = commhooks.compose(default_hooks.fp16_compress_wrapper)
    ddp.register_comm_hook(commhooks.CommHookState(**TREES), hook)
    learn(0)(ddp)
    assert commhooks.register(ddp).stats()["steps"] == 1


@case
def registered_twice() -> None:
    pair = Pair(mlp(), TREES)
    assert commhooks.register(pair.ours) is pair.handle
    pair.steps(2)


@case
def raw_pair_then_registered() -> None:
    ddp = DistributedDataParallel(mlp())
    state = commhooks.CommHookState(**TREES)
    ddp.register_comm_hook(state, commhooks.allreduce_hook)
    learn(0)(ddp)
    assert commhooks.register(ddp).stats()["steps"] == 1


@case
def types_that_cannot_be_summed() -> None:
    model = nn.Linear(4, 4)
    ddp = DistributedDataParallel(model)
    model.odd = nn.Parameter(torch.zeros(4).to(torch.float8_e4m3fn))
    refuses(UnsupportedModelError, "odd.*float8", lambda: commhooks.register(ddp, **TREES))


@case
def half_precision_wrapper_of_torch_for_brain_floats() -> None:
    """torch itself refuses it without CUDA; ours doesn't stand in the way of the message."""
    ddp = DistributedDataParallel(mlp())
    hook = commhooks.compose(default_hooks.bf16_compress_wrapper)
    state = commhooks.CommHookState(**TREES)
    refuses(TypeError, "BF16", lambda: ddp.register_comm_hook(state, hook))


@case
def switched_off() -> None:
    ddp = DistributedDataParallel(mlp())
    handle = commhooks.register(ddp, enabled=False)
    learn(0)(ddp)
    handle.finish()
    assert handle.stats()["enabled"] is False and not ddp._comm_hooks


@case
def static_graph_first_without_sync() -> None:
    ddp = DistributedDataParallel(mlp(), static_graph=True)
    commhooks.register(ddp, **TREES)
    with ddp.no_sync(), pytest.raises(UnsupportedModelError, match="static_graph"):
        learn(0)(ddp)
    learn(1)(ddp)
    learn(2)(ddp)


@case
def parameters_that_ddp_reduces_itself() -> None:
    model = mlp()
    ddp = DistributedDataParallel(
        model,
        delay_all_reduce_named_params=[("0.weight", model[0].weight)],
        param_to_hook_all_reduce=model[0].bias,
    )
    with warnings_seen() as seen:
        commhooks.register(ddp, **TREES)
        learn(0)(ddp)
        learn(1)(ddp)
    assert len(seen) == 1 and "delay_all_reduce_named_params" in seen[0], seen


# --- copies and files --------------------------------------------------------------------------------------------------


def _both_ways(ours: DistributedDataParallel, plain: DistributedDataParallel, steps: range) -> None:
    for step in steps:
        for ddp in (ours, plain):
            ddp.zero_grad()
            learn(step)(ddp)
        compare(ours, plain)


@case
def deep_copy() -> None:
    """A copy takes its place on its own, at its first forward or when it is registered."""
    pair = Pair(mlp(), TREES)
    pair.steps(2)
    for registers in (False, True):
        ours, plain = copy.deepcopy(pair.ours), copy.deepcopy(pair.plain)
        handle = commhooks.register(ours) if registers else None
        _both_ways(ours, plain, range(2, 5))
        assert sum(hook is commhooks.allreduce_hook for hook, _ in ours._comm_hooks) == 1
        state = ours._comm_hooks[0][1]
        assert state.stats()["steps"] == 3 and (handle is None or handle.stats()["steps"] == 3)
    pair.steps(2)


@case
def saved_and_loaded() -> None:
    pair = Pair(mlp(), TREES)
    pair.steps(2)
    loaded = []
    for ddp in (pair.ours, pair.plain):
        file = io.BytesIO()
        torch.save(ddp, file)
        file.seek(0)
        loaded.append(torch.load(file, weights_only=False))
    _both_ways(loaded[0], loaded[1], range(3))
    assert loaded[0]._comm_hooks[0][1].stats()["steps"] == 3


@case
def state_in_a_checkpoint() -> None:
    state = commhooks.CommHookState(**TREES)
    ddp = DistributedDataParallel(mlp())
    ddp.register_comm_hook(state, commhooks.allreduce_hook)
    learn(0)(ddp)
    copied = copy.deepcopy(state)
    other = DistributedDataParallel(mlp())
    other.register_comm_hook(copied, commhooks.allreduce_hook)
    with pytest.raises((ConfigError, RuntimeError), match="bind"):
        learn(0)(other)
    fresh = commhooks.CommHookState(**TREES)
    fresh.load_state_dict(state.state_dict(), process_group=dist.group.WORLD)
    assert fresh.buckets_seen == state.buckets_seen


# --- under a compiler --------------------------------------------------------------------------------------------------


@case
def compiled() -> None:
    pair = Pair(mlp(), TREES, bucket_cap_mb=2)
    ours, plain = (torch.compile(ddp, backend="aot_eager") for ddp in (pair.ours, pair.plain))
    for step in range(3):
        for compiled_ddp, ddp in ((ours, pair.ours), (plain, pair.plain)):
            ddp.zero_grad()
            learn(step)(compiled_ddp)
        pair.compare()
    assert pair.handle.stats()["steps"] == 3


# --- many engines, one process -----------------------------------------------------------------------------------------


@case
def settings_differ() -> None:
    refuses(
        CommError,
        "heartbeat_s.*rank 0 has 30.0, rank 1 has 31.0",
        lambda: commhooks.all_reduce(torch.ones(2), heartbeat_s=30 + dist.get_rank()),
    )


@case
def one_engine_per_group_and_settings() -> None:
    first = commhooks.CommHookState(timeout_s=77)
    second = commhooks.CommHookState(timeout_s=77)
    third = commhooks.CommHookState(timeout_s=78)
    assert first.engine is second.engine is not third.engine


def run_case(name: str) -> None:
    """In a rank."""
    torch.manual_seed(7)
    CASES[name]()


@functools.cache
def _failures() -> dict[str, str]:
    return harness.run_cases(2, run_case, list(CASES))


@pytest.mark.parametrize("name", CASES)
def test_registering(name: str) -> None:
    if failure := _failures()[name]:
        pytest.fail(failure, pytrace=False)


def alone() -> float:
    """In a rank: a group of one."""
    pair = Pair(mlp(), TREES)
    pair.steps(2)
    return float(commhooks.all_reduce(torch.ones(2), average=True)[0])


def test_world_of_one() -> None:
    assert harness.run(1, alone) == [1.0]
