"""The buckets of DDP, copied into memory that outlives ``backward()``, and where each parameter's average lies in them.

Where in the flow: DDP bucket -> **deferred_buckets** -> exchange; gates -> deferred reads the averages here.

DDP's own bucket can't be used: DDP copies it back into ``.grad`` when the hook's Future completes, and overwrites it in the
next backward.

Invariants: a bucket's memory is reused only after all of its slices are back; averages have their parameter's strides
(DDP lays gradients out that way), so the optimizer sees the same memory order as without us.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commhooks.core.gates import SliceKey
from commhooks.core.slicing import Layout
from commhooks.exchanges import SliceExchange
from commhooks.layers import LayerOrder


class BucketHome:
    """One bucket's lasting memory.

    Parameters
    ----------
    index : DDP's number of the bucket
    buffer : DDP's flat gradient
    parameters : in buffer order
    numbers : the parameters' places in forward order
    order : gives layers and priorities
    by_layer : False for one priority (first come, first served)
    exchange : cuts the bucket into slices
    """

    def __init__(
        self,
        index: int,
        buffer: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        numbers: Sequence[int],
        order: LayerOrder,
        by_layer: bool,
        exchange: SliceExchange,
    ) -> None:
        self.index = index
        self.parameters = tuple(parameters)
        self.numbers = tuple(numbers)
        self.flat = torch.empty_like(buffer)
        self.layout = exchange.layout(order.segments(parameters, by_layer), buffer.element_size())
        self.averages = _views(self.flat, parameters)
        self.slices = _holders(index, self.layout, parameters, numbers)

    def fits(self, buffer: torch.Tensor, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether DDP's bucket still holds the same parameters (it rebuilds its buckets after the first step)."""
        return (
            len(parameters) == len(self.parameters)
            and all(one is other for one, other in zip(parameters, self.parameters, strict=True))
            and buffer.numel() == self.flat.numel()
            and buffer.dtype == self.flat.dtype
        )


def _views(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    views = []
    offset = 0
    for parameter in parameters:
        width = _width(parameter)
        run = flat[offset : offset + width]
        if parameter.is_complex():
            run = torch.view_as_complex(run.view(-1, 2))
        # Dense parameters keep their own strides (channels_last), as in DDP's buckets; others are laid out in order.
        dense = torch.empty_like(parameter).stride() == parameter.stride()
        views.append(
            run.as_strided(parameter.size(), parameter.stride()) if dense else run.view(parameter.size())
        )
        offset += width
    return views


def _width(parameter: torch.Tensor) -> int:
    """Elements in DDP's bucket, which holds complex gradients as pairs of real numbers."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def _holders(
    bucket: int, layout: Layout, parameters: Sequence[torch.Tensor], numbers: Sequence[int]
) -> list[tuple[SliceKey, list[int]]]:
    """Each slice, and the numbers of the parameters it carries elements of."""
    bounds: list[tuple[int, int, int]] = []
    offset = 0
    for parameter, number in zip(parameters, numbers, strict=True):
        bounds.append((offset, offset + _width(parameter), number))
        offset += _width(parameter)
    slices = []
    first = 0
    for piece in layout.slices:
        while first < len(bounds) and bounds[first][1] <= piece.start:
            first += 1
        holders = []
        for start, stop, number in bounds[first:]:
            if start >= piece.stop:
                break
            if stop > start:
                holders.append(number)
        slices.append((SliceKey(bucket, piece.index), holders))
    return slices
