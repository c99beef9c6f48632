"""Which rank holds which slice of the parameters.

Where in the flow: before training: parameters -> ``cut`` -> ``place`` -> each rank's ``ShardCore`` and every worker's send
list.

Invariants: slices tile the parameters in forward order, never cross one, and are numbered in that order, so a slice's
number is its priority; all ranks compute the same placement from the same arguments.

Source: ADSP (AAAI 2020), sharded parameter server; here in proportion to measured bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commhooks.errors import ConfigError


@dataclass(frozen=True)
class CommitSlice:
    """Elements ``[start, end)`` of parameter ``parameter``; ``slice_id`` counts in forward order."""

    slice_id: int
    parameter: int
    start: int
    end: int

    @property
    def numel(self) -> int:
        """Elements in the slice."""
        return self.end - self.start


def cut(numels: Sequence[int], slice_numel: int) -> tuple[CommitSlice, ...]:
    """Cut parameters (elements each, in forward order) into near-equal slices of at most ``slice_numel``."""
    if slice_numel < 1:
        raise ConfigError(f"slice_numel must be >= 1 element, got {slice_numel}")
    slices: list[CommitSlice] = []
    for parameter, numel in enumerate(numels):
        parts = -(-numel // slice_numel)
        ends = [numel * (i + 1) // parts for i in range(parts)]
        for start, end in zip([0, *ends[:-1]], ends):
            slices.append(CommitSlice(len(slices), parameter, start, end))
    return tuple(slices)


def place(slices: Sequence[CommitSlice], bytes_per_s: Sequence[float]) -> tuple[int, ...]:
    """Holder (rank) of each slice, so that every rank's elements are in proportion to its bandwidth.

    Each slice, in order, goes to the rank that is emptiest in relation to its bandwidth (ties: lowest rank). A rank
    with bandwidth 0 holds nothing; ``(1, 0, 0)`` puts everything on rank 0.

    Raises
    ------
    ConfigError
        No rank has a positive bandwidth, or one is negative.
    """
    if not bytes_per_s or min(bytes_per_s) < 0 or max(bytes_per_s) <= 0:
        raise ConfigError(f"need bandwidths >= 0 with at least one above 0, got {list(bytes_per_s)}")
    held = [0] * len(bytes_per_s)
    able = [r for r, b in enumerate(bytes_per_s) if b > 0]
    holders = []
    for piece in slices:
        rank = min(able, key=lambda r: ((held[r] + piece.numel) / bytes_per_s[r], r))
        held[rank] += piece.numel
        holders.append(rank)
    return tuple(holders)
