"""A model's parameters as one flat float32 vector, readable and writable in pieces.

Where in the flow: commit_worker <-> **flat_parameters** <-> the user's model.

Invariants: parameters are in forward order as far as it is known (declaration order); memory order is kept (channels_last), so
all ranks must lay a parameter out alike, as DDP demands anyway; only trainable floating-point parameters take part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from commhooks.core.commit.placement import CommitSlice
from commhooks.core.commit.update import Array
from commhooks.errors import UnsupportedModelError


class FlatParameters:
    """Reads and writes tensors as parts of one vector.

    Parameters
    ----------
    named : (name, tensor) pairs; the vector holds them in this order
    """

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._tensors: list[torch.Tensor] = []
        for name, tensor in named:
            self._tensors.append(_checked(name, tensor))
        ends = np.cumsum([t.numel() for t in self._tensors], dtype=int)
        self._starts = [0, *map(int, ends[:-1])] if self._tensors else []
        self.size = int(ends[-1]) if self._tensors else 0

    @property
    def numels(self) -> tuple[int, ...]:
        """Elements of each tensor."""
        return tuple(t.numel() for t in self._tensors)

    def span(self, piece: CommitSlice) -> tuple[int, int]:
        """Where a slice lies in the vector."""
        start = self._starts[piece.parameter]
        return start + piece.start, start + piece.end

    def read(self) -> Array:
        """A copy of everything."""
        out = np.empty(self.size, np.float32)
        target = torch.from_numpy(out)
        with torch.no_grad():
            for tensor, start in zip(self._tensors, self._starts):
                target[start : start + tensor.numel()].copy_(_in_memory_order(tensor))
        return out

    def write(self, piece: CommitSlice, values: Array) -> None:
        """Overwrite one slice."""
        with torch.no_grad():
            flat = _in_memory_order(self._tensors[piece.parameter])
            flat[piece.start : piece.end].copy_(torch.from_numpy(np.require(values, requirements="W")))


def trainable(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters that are trained, by name, each once."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad and p.numel()]


def float_buffers(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Floating-point buffers (BatchNorm's running statistics), by name, each once."""
    return [(name, b) for name, b in model.named_buffers() if b.is_floating_point() and b.numel()]


def _checked(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point() or tensor.layout is not torch.strided:
        raise UnsupportedModelError(
            f"{name} is {tensor.dtype} ({tensor.layout}); commits carry dense real floating-point parameters. Freeze it "
            "(requires_grad=False), or train without a commit policy"
        )
    if not _is_dense(tensor):
        raise UnsupportedModelError(
            f"{name} has gaps or overlaps in memory (strides {tensor.stride()}); clone it first"
        )
    return tensor


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a stretch of memory, in whatever order."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return reach == tensor.numel()


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """All elements as a flat view."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def cut_numels(slices: Sequence[CommitSlice]) -> tuple[int, ...]:
    """Elements of each slice."""
    return tuple(piece.numel for piece in slices)
