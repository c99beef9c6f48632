"""What a reducer stands between: the sender and the launcher's world on one side, the user's choices on the other.

Where in the flow: ``commhooks.horovod`` makes these -> **reduction** (the terms) -> reducer uses them.

Invariants: interfaces and plain values only; the one function compares parameters between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from commhooks.parcels import Entry, Parcel, agree, digest


class Pending(Protocol):
    """A parcel on its way."""

    def wait(self) -> None:
        """Block until the result is in the buffer; raises what went wrong."""


class Sender(Protocol):
    """Moves flat buffers; the combined result replaces their content."""

    small_numel: int
    needs_zeros: bool  # whether a joined rank must send zeros itself

    def send(self, parcel: Parcel, flat: torch.Tensor, step: int) -> Pending:
        """Start one parcel; must not block."""

    def stats(self) -> dict[str, Any]:
        """Which way gradients go, and counters."""

    def close(self) -> None:
        """Give up connections; harmless when called twice."""


class World(Protocol):
    """The launcher's side: who takes part, and how to reach them."""

    @property
    def everyone(self) -> bool:
        """Whether all ranks of the job take part."""

    def token(self) -> object:
        """Another object after the world was made anew (elastic)."""

    def exchange(self, name: str, value: Any) -> list[Any]:
        """All ranks' JSON values, in rank order; blocks."""

    def open_sender(self, entries: Sequence[Entry], optimizer: str) -> Sender:
        """A sender for these parameters; collective."""

    def watch(self, reporter: Any) -> None:
        """Report the stalls of one more reducer (its ``progress()``)."""

    def reduce_sparse(self, name: str, gradient: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start a sparse reduction; the callable waits for it."""


class Compression(Protocol):
    """Horovod's convention: a class with two static methods."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """What travels, and what `decompress` needs."""

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Back to the gradient's dtype."""


@dataclass(frozen=True)
class Options:
    """What the user chose for one optimizer.

    Attributes
    ----------
    compression : None for none
    elementwise : whether compressing gathered gradients together is the same as one by one
    sparse_as_dense : send sparse gradients as dense ones
    groups : parameters to keep together
    """

    compression: Compression | None = None
    elementwise: bool = True
    sparse_as_dense: bool = False
    groups: tuple[tuple[torch.Tensor, ...], ...] = ()


@dataclass(frozen=True)
class AgreedOrder:
    """The trainable parameters in the order that all ranks share."""

    entries: tuple[Entry, ...]
    parameters: tuple[torch.Tensor, ...]


def agree_on_order(world: World, named: Sequence[tuple[str, torch.Tensor]], label: str) -> AgreedOrder:
    """Compare the trainable parameters of all ranks; rank 0's order counts.  Collective.

    Raises
    ------
    Mismatch
        A parameter is missing or differs on a rank.
    """
    by_name = {name: parameter for name, parameter in named if parameter.requires_grad}
    entries = tuple(
        Entry(name, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in by_name.items()
    )
    if len(set(world.exchange("layout", digest(entries)))) > 1:
        by_rank = world.exchange("entries", [entry.to_json() for entry in entries])
        entries = agree([[Entry.from_json(value) for value in values] for values in by_rank], label)
    return AgreedOrder(entries, tuple(by_name[entry.name] for entry in entries))


def few(names: Sequence[str]) -> str:
    """The first names of a list, and how many more there are."""
    return (
        ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "none"
    )
