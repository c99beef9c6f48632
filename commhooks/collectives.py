"""Plain collectives over the same trees: `commhooks.all_reduce(tensor)` and its kin.

Where in the flow: user -> **collectives** -> engine.

Invariants: collective calls, made in the same order by every rank of the group, from one thread at a time; equal shape and
type on all ranks (checked before a byte is added); the call returns when this rank's result is there.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from commhooks.buffers import check_tensor
from commhooks.core.plan import Plan
from commhooks.core.slicing import Layout, Segment, block_numel, equal_cuts, parts_of, slice_layout
from commhooks.engine import Engine
from commhooks.errors import ConfigError
from commhooks.groups import engine_for, load_config
from commhooks.jobs import JobKey

_STREAM = 0  # registered models count from 1
_LAYOUTS_KEPT = 256  # for callers whose sizes never repeat

Group = dist.ProcessGroup | None


class _Caller:
    """One engine's turn counter and layouts."""

    def __init__(self, engine: Engine) -> None:
        self._turns = itertools.count()
        self._lock = threading.Lock()
        self._layouts: dict[tuple[int, str, int | None, int, int, int], Layout] = {}
        # Held weakly: the caller lives as long as its engine, and must not keep it alive.
        self._engine = weakref.ref(engine)

    def run(
        self, flat: torch.Tensor, collective: str, root: int | None, rows: int, average: bool = False
    ) -> None:
        """Exchange a flat tensor of `rows` equal rows (1, or one per rank) and wait."""
        engine = self._engine()
        assert engine is not None
        plan = engine.plan_for(collective, root)
        layout = self._layout(engine, plan, flat, collective, root, rows)
        routes, label = engine.routes_of(plan), f"{collective} {root}"
        with self._lock:  # turns reach the engine in their order, whichever threads they come from
            key = JobKey(_STREAM, next(self._turns), 0)
            job = engine.start_job(key, flat, layout, average, routes=routes, label=label)
        engine.wait(job)

    def _layout(
        self, engine: Engine, plan: Plan, flat: torch.Tensor, collective: str, root: int | None, rows: int
    ) -> Layout:
        key = (engine.epoch, collective, root, flat.numel(), flat.element_size(), rows)
        if key not in self._layouts:
            if len(self._layouts) >= _LAYOUTS_KEPT:
                self._layouts.clear()
            limit = engine.slice_numel(flat.element_size())
            row = flat.numel() // rows
            trees = parts_of(plan.shares)
            block = block_numel(flat.numel(), trees)
            owners = [rank for rank in range(rows) for _ in equal_cuts(row, block)] if rows > 1 else None

            def assign(sizes: Sequence[int]) -> Sequence[int]:
                return plan.assign(sizes, owners)

            segments = [Segment(row, 0, number) for number in range(rows)]
            self._layouts[key] = slice_layout(segments, limit, assign, trees)
        return self._layouts[key]


_callers: weakref.WeakKeyDictionary[Engine, _Caller] = weakref.WeakKeyDictionary()


def _caller(group: Group, settings: dict[str, object]) -> tuple[Engine, _Caller] | None:
    """None: the group's own collectives are to be used."""
    config = load_config(settings)
    if not config.enabled or config.schedule == "native":
        return None
    engine = engine_for(group, config)
    return engine, _callers.setdefault(engine, _Caller(engine))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    check_tensor(tensor)
    return tensor.detach().view(-1)


def _check_root(root: int, world_size: int) -> None:
    if not 0 <= root < world_size:
        raise ConfigError(f"root is rank {root}; the group has ranks 0 to {world_size - 1}")


def _global(group: Group, rank: int) -> int:
    """torch names roots by global rank; we and our callers by rank in the group."""
    return dist.get_global_rank(group, rank) if group is not None else rank


def all_reduce(
    tensor: torch.Tensor, group: Group = None, average: bool = False, **settings: object
) -> torch.Tensor:
    """Sum a tensor over all ranks, in place.

    Parameters
    ----------
    tensor : any shape, contiguous, on the CPU; equal shape and type on all ranks
    group : default: the world
    average : divide by the number of ranks
    settings : knobs by field name, over the environment's

    Returns
    -------
    torch.Tensor
        `tensor`.

    Raises
    ------
    PeerLost, CommTimeout, Mismatch
        A rank died, didn't come, or called with another shape or type.
    UnsupportedModelError
        The tensor is sparse, not contiguous, not on the CPU, or of a type that can't be summed.
    """
    found = _caller(group, settings)
    if found is None:
        return _native(tensor, group, average)
    engine, caller = found
    if engine.config.schedule == "auto" and engine.predicted_choice() is None:
        # A ring in rank order is as good here as any tree, and the group has one in C++.
        try:
            engine.raise_if_failed()
            return _native(tensor, group, average)
        except RuntimeError as error:
            engine.raise_named(error)
    caller.run(_flat(tensor), "all_reduce", None, 1, average)
    return tensor


def _native(tensor: torch.Tensor, group: Group, average: bool) -> torch.Tensor:
    dist.all_reduce(tensor, group=group)
    return tensor.div_(dist.get_world_size(group)) if average else tensor


def broadcast(tensor: torch.Tensor, src: int = 0, group: Group = None, **settings: object) -> torch.Tensor:
    """Give every rank the tensor of rank `src` of the group, in place; otherwise as `all_reduce`."""
    found = _caller(group, settings)
    if found is None:
        dist.broadcast(tensor, _global(group, src), group=group)
        return tensor
    engine, caller = found
    _check_root(src, engine.world_size)
    caller.run(_flat(tensor), "broadcast", src, 1)
    return tensor


def reduce(tensor: torch.Tensor, dst: int = 0, group: Group = None, **settings: object) -> torch.Tensor:
    """Sum the tensors of all ranks into that of rank `dst` of the group; other ranks' tensors stay as they are."""
    found = _caller(group, settings)
    if found is None:
        result = tensor if dist.get_rank(group) == dst else tensor.clone()
        dist.reduce(result, _global(group, dst), group=group)
        return tensor
    engine, caller = found
    _check_root(dst, engine.world_size)
    # Partial sums pass through the other ranks' memory.
    flat = _flat(tensor)
    caller.run(flat if engine.rank == dst else flat.clone(), "reduce", dst, 1)
    return tensor


def all_gather(tensor: torch.Tensor, group: Group = None, **settings: object) -> torch.Tensor:
    """Give every rank every rank's tensor.

    Returns
    -------
    torch.Tensor
        Shape ``(world size, *tensor.shape)``, in rank order.
    """
    found = _caller(group, settings)
    if found is None:
        rows = torch.empty((dist.get_world_size(group), *tensor.shape), dtype=tensor.dtype)
        dist.all_gather(list(rows.unbind()), tensor, group=group)
        return rows
    engine, caller = found
    rows = _own_row(engine, tensor)
    caller.run(rows.view(-1), "all_gather", None, engine.world_size)
    return rows


def gather(
    tensor: torch.Tensor, dst: int = 0, group: Group = None, **settings: object
) -> torch.Tensor | None:
    """Give rank `dst` of the group every rank's tensor, as `all_gather` shapes it; None on the others."""
    found = _caller(group, settings)
    if found is None:
        rows = all_gather(tensor, group, **settings)
        return rows if dist.get_rank(group) == dst else None
    engine, caller = found
    _check_root(dst, engine.world_size)
    rows = _own_row(engine, tensor)
    caller.run(rows.view(-1), "gather", dst, engine.world_size)
    return rows if engine.rank == dst else None


def reduce_scatter(tensor: torch.Tensor, group: Group = None, **settings: object) -> torch.Tensor:
    """Sum tensors of shape ``(world size, …)`` over the ranks; rank r gets row r of the sum.  `tensor` stays as it is."""
    world_size = dist.get_world_size(group)
    if tensor.dim() == 0 or tensor.shape[0] != world_size:
        raise ConfigError(
            f"reduce_scatter got shape {tuple(tensor.shape)}; its first size must be {world_size} (ranks)"
        )
    found = _caller(group, settings)
    rows = tensor.detach().clone(memory_format=torch.contiguous_format)
    if found is None:
        dist.all_reduce(rows, group=group)
        return rows[dist.get_rank(group)].clone()
    engine, caller = found
    caller.run(rows.view(-1), "reduce_scatter", None, world_size)
    return rows[engine.rank].clone()


def _own_row(engine: Engine, tensor: torch.Tensor) -> torch.Tensor:
    rows = torch.empty((engine.world_size, *tensor.shape), dtype=tensor.dtype)
    rows[engine.rank].copy_(tensor)
    return rows
