"""The buckets of DDP, copied into memory that outlives ``backward()``, in units that leave as soon as they are complete.

Where in the flow: gradients and DDP buckets -> **deferred_buckets** -> exchange; deferred reads the averages here.

DDP's own bucket can't be used: DDP copies it back into ``.grad`` when the hook's Future completes, and overwrites it in the
next backward.  Nor need we wait until it is full: a *unit* is a run of whole layers in it, and can leave when its own
gradients are there.  Its slices are those of the bucket, on the same trees, so its sums are the same, bit for bit.

Invariants: the memory is reused only after all of its slices are back; averages have their parameter's strides (DDP lays
gradients out that way), so the optimizer sees the same memory order as without us; units depend only on the layout, so
they are equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commhooks.core.gates import SliceKey
from commhooks.core.slicing import Layout, Slice, layout_digest
from commhooks.exchanges import SliceExchange
from commhooks.layers import LayerOrder

# Layers below this size leave with their neighbours: starting a unit costs about as much as sending this much.
_UNIT_NUMEL = 1 << 14
# Buckets are numbered apart by this, which leaves room for their units' numbers.
_UNITS_PER_BUCKET = 1 << 16


class Unit:
    """Whole layers that lie side by side in a bucket and leave together.

    Attributes
    ----------
    bucket : the number under which it travels, unique within a step
    start, stop : its place in the bucket's memory
    flat : that memory
    layout : its slices, counted from `start`
    members : its parameters' places in the bucket
    slices : each slice's key and the numbers of the parameters it carries elements of
    missing : the members whose gradients aren't in `flat` yet
    departed : whether it left in this step
    """

    def __init__(
        self, bucket: int, flat: torch.Tensor, start: int, pieces: Sequence[Slice], members: Sequence[int]
    ) -> None:
        slices = tuple(
            Slice(index, piece.start - start, piece.stop - start, piece.priority, piece.tree)
            for index, piece in enumerate(pieces)
        )
        numel = slices[-1].stop if slices else 0
        self.bucket = bucket
        self.start = start
        self.stop = start + numel
        self.flat = flat[start : self.stop]
        self.layout = Layout(numel, slices, layout_digest(slices))
        self.members = tuple(members)
        self.slices: list[tuple[SliceKey, list[int]]] = []
        self.missing: set[int] = set(members)
        self.departed = False

    def begin(self) -> None:
        """Another step: nothing is here."""
        self.missing.update(self.members)
        self.departed = False


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
        layout = exchange.layout(order.segments(parameters, by_layer), buffer.element_size())
        self.averages = _views(self.flat, parameters)
        self.units = _units(index, self.flat, layout, parameters)
        self.unit_of = {member: unit for unit in self.units for member in unit.members}
        for unit in self.units:
            unit.slices = _holders(unit, parameters, numbers)

    def fits(self, buffer: torch.Tensor, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether DDP's bucket still holds the same parameters (it rebuilds its buckets after the first step)."""
        return (
            len(parameters) == len(self.parameters)
            and all(one is other for one, other in zip(parameters, self.parameters, strict=True))
            and buffer.numel() == self.flat.numel()
            and buffer.dtype == self.flat.dtype
        )


def _units(index: int, flat: torch.Tensor, layout: Layout, parameters: Sequence[torch.Tensor]) -> list[Unit]:
    """Cut a bucket where a slice's end is a parameter's end, once enough has come together."""
    units: list[Unit] = []
    pieces: list[Slice] = []
    members: list[int] = []
    begin = start = offset = 0
    cuts = iter(layout.slices)
    for place, parameter in enumerate(parameters):
        members.append(place)
        offset += _width(parameter)
        while begin < offset:
            piece = next(cuts)
            pieces.append(piece)
            begin = piece.stop
        if begin == offset and offset - start >= _UNIT_NUMEL:
            units.append(Unit(index * _UNITS_PER_BUCKET + len(units), flat, start, pieces, members))
            start, pieces, members = offset, [], []
    if members:
        units.append(Unit(index * _UNITS_PER_BUCKET + len(units), flat, start, pieces, members))
    return units


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
    unit: Unit, parameters: Sequence[torch.Tensor], numbers: Sequence[int]
) -> list[tuple[SliceKey, list[int]]]:
    """Each slice of a unit, and the numbers of the parameters it carries elements of."""
    bounds: list[tuple[int, int, int]] = []
    offset = 0
    for member in unit.members:
        width = _width(parameters[member])
        bounds.append((offset, offset + width, numbers[member]))
        offset += width
    slices = []
    first = 0
    for piece in unit.layout.slices:
        while bounds[first][1] <= piece.start:
            first += 1
        holders = []
        for start, stop, number in bounds[first:]:
            if start >= piece.stop:
                break
            if stop > start:
                holders.append(number)
        slices.append((SliceKey(unit.bucket, piece.index), holders))
    return slices
