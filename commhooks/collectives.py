"""Plain collectives over the same trees: `commhooks.all_reduce(tensor)` and its kin.

Where in the flow: user -> **collectives** -> engine.

Invariants: collective calls, made in the same order by every rank of the group; the tensor is changed in place; the call
returns when the result is there.
"""

from __future__ import annotations

import itertools
import weakref

import torch
import torch.distributed as dist

from commhooks.core.slicing import Layout, Segment
from commhooks.engine import Engine
from commhooks.errors import UnsupportedModelError
from commhooks.groups import engine_for, load_config
from commhooks.jobs import JobKey

_COLLECTIVES_STREAM = 0
_turns: weakref.WeakKeyDictionary[Engine, itertools.count[int]] = weakref.WeakKeyDictionary()
_layouts: weakref.WeakKeyDictionary[Engine, dict[tuple[int, int], Layout]] = weakref.WeakKeyDictionary()


def all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, average: bool = False, **settings: object
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
    """
    config = load_config(settings)
    if not config.enabled or config.schedule == "native":
        dist.all_reduce(tensor, group=group)
        return tensor.div_(dist.get_world_size(group)) if average else tensor
    if not tensor.is_contiguous():
        raise UnsupportedModelError(
            "all_reduce works in place on contiguous memory; pass tensor.contiguous()"
        )
    engine = engine_for(group, config)
    turn = next(_turns.setdefault(engine, itertools.count()))
    flat = tensor.detach().view(-1)
    layout = _layout(engine, flat)
    job = engine.start_job(JobKey(_COLLECTIVES_STREAM, turn, 0), flat, layout, average)
    engine.wait(job)
    return tensor


def _layout(engine: Engine, flat: torch.Tensor) -> Layout:
    cache = _layouts.setdefault(engine, {})
    key = (flat.numel(), flat.element_size())
    if key not in cache:
        cache[key] = engine.layout([Segment(flat.numel(), 0, 0)], flat.element_size())
    return cache[key]
