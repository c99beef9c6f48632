"""Cut a flat gradient buffer into slices, the one unit of priority, routing and pipelining.

Where in the flow: DDP bucket / Horovod gradient -> **slicing** -> exchange.

Invariants: slices tile the buffer in order, without gap or overlap; no slice is larger than ``slice_numel``; no slice
crosses a layer; a slice inherits its layer's priority (smaller goes sooner).  The same input gives the same slices on
every rank: nothing here depends on arrival order.  Which tree carries a slice is the plan's decision (`Plan.assign`).

Source: P3 (Jayarajan et al., MLSys 2019), section 4: slices of at most 50,000 parameters.  We cut a layer into *equal*
slices below that limit, since a short remainder costs a frame and a wake-up for little data.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

P3_SLICE_NUMEL = 50_000


@dataclass(frozen=True)
class Segment:
    """A run of elements of one parameter, in buffer order.

    Attributes
    ----------
    numel : number of elements (0 allowed)
    priority : forward order of its layer; smaller is needed sooner
    layer : id of its layer; adjacent segments of one layer may share a slice
    """

    numel: int
    priority: int
    layer: int


@dataclass(frozen=True)
class Slice:
    """Elements ``start:stop`` of the buffer, sent over tree ``tree`` with ``priority``."""

    index: int
    start: int
    stop: int
    priority: int
    tree: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """The slices of one buffer; equal on all ranks, which ``digest`` lets them compare."""

    numel: int
    slices: tuple[Slice, ...]
    digest: int


def equal_cuts(numel: int, limit: int) -> list[int]:
    """Sizes of the fewest pieces of at most `limit` that add up to `numel`, differing by at most one."""
    if limit < 1:
        raise ValueError(f"slice limit is {limit} elements; it must be at least 1")
    if numel == 0:
        return []
    pieces = -(-numel // limit)
    size, longer = divmod(numel, pieces)
    return [size + 1] * longer + [size] * (pieces - longer)


def merge_layers(segments: Sequence[Segment]) -> list[Segment]:
    """Join adjacent segments of one layer; the most urgent priority of the run counts."""
    merged: list[Segment] = []
    for segment in segments:
        if segment.numel == 0:
            continue
        if merged and merged[-1].layer == segment.layer:
            last = merged[-1]
            merged[-1] = Segment(
                last.numel + segment.numel, min(last.priority, segment.priority), segment.layer
            )
        else:
            merged.append(segment)
    return merged


Assign = Callable[[Sequence[int]], Sequence[int]]

# Trees are dealt to blocks, and blocks are cut into slices, so that which tree adds up an element doesn't depend on the
# slice size: tuning that size never changes a bit of the result.
_LARGEST_BLOCK_NUMEL = 1 << 18
_LEAST_BLOCK_NUMEL = 4096
_BLOCKS_PER_TREE = 8
_MOST_PARTS = 64  # a tree with less than this share can't be served exactly; its blocks would be crumbs


def parts_of(shares: Sequence[float]) -> int:
    """How many equal parts it takes to give the smallest share its due: the ``trees`` of `block_numel`.

    Counting trees instead leaves a tree with a tenth of the bytes half a block too many or too few.
    """
    return max(len(shares), min(_MOST_PARTS, math.ceil(1 / min(shares) - 1e-9)))


def block_numel(numel: int, trees: int) -> int:
    """How many elements stay on one tree: a few blocks per tree, within bounds; with one tree, all of them."""
    if trees == 1:
        return max(1, numel)
    return max(_LEAST_BLOCK_NUMEL, min(_LARGEST_BLOCK_NUMEL, numel // (_BLOCKS_PER_TREE * trees)))


def slice_layout(segments: Sequence[Segment], slice_numel: int, assign: Assign, trees: int = 1) -> Layout:
    """Cut a buffer into slices.

    Parameters
    ----------
    segments : the buffer's parameters in buffer order
    slice_numel : the largest slice, in elements
    assign : gives each block its tree from the list of sizes, e.g. ``plan.assign``
    trees : how many trees there are to choose from, or how many equal parts their shares take (`parts_of`)
    """
    limit = block_numel(sum(segment.numel for segment in segments), trees)
    blocks = [
        (numel, segment.priority)
        for segment in merge_layers(segments)
        for numel in equal_cuts(segment.numel, limit)
    ]
    slices: list[Slice] = []
    start = 0
    for (size, priority), tree in zip(blocks, assign([size for size, _ in blocks]), strict=True):
        for numel in equal_cuts(size, slice_numel):
            slices.append(Slice(len(slices), start, start + numel, priority, tree))
            start += numel
    return Layout(start, tuple(slices), layout_digest(slices))


def layout_digest(slices: Sequence[Slice]) -> int:
    """A 32-bit digest of the cuts and the trees.

    Priorities are left out: ranks may learn them at different moments, and a differing priority changes when a slice
    travels, never what it holds.
    """
    words = ",".join(f"{s.start}:{s.stop}:{s.tree}" for s in slices)
    return zlib.crc32(words.encode())
