"""Which gradients of an optimizer travel together: parcels.

Where in the flow: Horovod gradient -> **parcels** -> the sender (our engine, which slices them, or Horovod's own all-reduce).
DDP has its buckets; an optimizer wrapper sees one gradient at a time, and a frame per bias would cost more than its bytes.

Invariants: every trainable parameter is in exactly one parcel; a parcel holds one dtype; what is in it depends on the agreed
order and sizes only, never on when gradients arrive, so every rank has the same parcels and every run adds in the same order;
a parcel is as urgent as its most urgent member.  No torch here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from commhooks.errors import Mismatch

SMALL_NUMEL = 16_384  # 64 KB: below it, gathering costs less than a slice of its own


@dataclass(frozen=True)
class Entry:
    """A parameter as the ranks compare it: its name, its shape and its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        numel = 1
        for size in self.shape:
            numel *= size
        return numel

    def to_json(self) -> list[object]:
        """As the exchange at start carries it."""
        return [self.name, list(self.shape), self.dtype]

    @classmethod
    def from_json(cls, value: Sequence[object]) -> Entry:
        """Back from `to_json`."""
        name, shape, dtype = value
        return cls(str(name), tuple(int(size) for size in shape), str(dtype))  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Parcel:
    """Gradients that travel as one flat buffer.

    Attributes
    ----------
    index : its number, equal on all ranks
    members : positions in the agreed order of entries
    numel : elements of all members
    priority : forward position of its first member; smaller is more urgent
    """

    index: int
    members: tuple[int, ...]
    numel: int
    priority: int


def make_parcels(
    entries: Sequence[Entry], groups: Sequence[Sequence[int]] = (), small_numel: int = SMALL_NUMEL
) -> tuple[Parcel, ...]:
    """Divide the entries (in forward order) into parcels.

    Parameters
    ----------
    entries : in the agreed order, the first forward layer first
    groups : positions that the user wants together; the rest is divided as usual
    small_numel : entries of less are gathered, with others of their dtype, up to this many elements; 0 gathers nothing
    """
    members: list[tuple[int, ...]] = []
    grouped: set[int] = set()
    for group in groups:
        grouped.update(group)
        by_dtype: dict[str, list[int]] = {}
        for position in sorted(group):
            by_dtype.setdefault(entries[position].dtype, []).append(position)
        members.extend(tuple(positions) for positions in by_dtype.values())
    open_by_dtype: dict[str, list[int]] = {}
    for position, entry in enumerate(entries):
        if position in grouped:
            continue
        if entry.numel >= small_numel:
            members.append((position,))
            continue
        gathered = open_by_dtype.setdefault(entry.dtype, [])
        if gathered and sum(entries[i].numel for i in gathered) + entry.numel > small_numel:
            members.append(tuple(gathered))
            gathered.clear()
        gathered.append(position)
    members.extend(tuple(gathered) for gathered in open_by_dtype.values() if gathered)
    members.sort()
    return tuple(
        Parcel(index, positions, sum(entries[i].numel for i in positions), positions[0])
        for index, positions in enumerate(members)
    )


def digest(entries: Sequence[Entry]) -> str:
    """What ranks compare first; equal digests mean equal entries in equal order."""
    words = json.dumps([entry.to_json() for entry in entries])
    return hashlib.sha256(words.encode()).hexdigest()[:16]


def agree(by_rank: Sequence[Sequence[Entry]], optimizer: str) -> tuple[Entry, ...]:
    """Rank 0's order, if all ranks have the same entries.

    Raises
    ------
    Mismatch
        A parameter is missing on a rank, or has another shape or dtype there; the message names it and both ranks.
    """
    ours = {entry.name: entry for entry in by_rank[0]}
    for rank, entries in enumerate(by_rank):
        theirs = {entry.name: entry for entry in entries}
        for name in sorted(ours.keys() ^ theirs.keys()):
            has, lacks = (0, rank) if name in ours else (rank, 0)
            raise Mismatch(
                f"optimizer {optimizer}: parameter {name} is trainable on rank {has} and isn't there (or is frozen) on rank "
                f"{lacks}; build the same model on every rank, and freeze and unfreeze on all of them in the same step"
            )
        for name, entry in ours.items():
            if theirs[name] != entry:
                raise Mismatch(
                    f"optimizer {optimizer}: parameter {name} is {entry.dtype} {list(entry.shape)} on rank 0 and "
                    f"{theirs[name].dtype} {list(theirs[name].shape)} on rank {rank}; build the same model on every rank"
                )
    return tuple(by_rank[0])
