"""Sends parcels through Horovod's own all-reduce: ``schedule=native``.

Where in the flow: reducer -> **native sender** -> Horovod's background thread.

Invariants: what is summed together is decided by the parcels and ``slice_numel``, not by timing (Horovod's fusion is
off, or its sums would differ from run to run); waiting polls and sleeps, because a spinning rank starves the background
threads of its neighbours; a wait has a limit and says what it waited for.

There is no order to keep between ranks here: nothing is held back by a window, Horovod's coordinator runs whatever every
rank has submitted, and a rank submits all of a step before it waits for any of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from commhooks.core.slicing import equal_cuts
from commhooks.errors import CommTimeout, UnsupportedModelError
from commhooks.parcels import Parcel

POLL_S = 100e-6  # a tenth of Horovod's cycle
# Each submission costs a negotiation in Horovod's cycle, so without preemption large pieces win: 4 MB, and small
# gradients gathered to 1 MB.
SLICE_NUMEL = 1 << 20
GATHER_NUMEL = 1 << 18

# What Horovod's torch binding can't send, and how it travels instead.
_WIDENED = {torch.bfloat16: torch.float32}
_KNOWN = frozenset((torch.float16, torch.float32, torch.float64, torch.int32, torch.int64))


class NativeSender:
    """Horovod's all-reduce for one optimizer.

    Parameters
    ----------
    hvd : the module ``horovod.torch``
    prefix : in front of every tensor's name; no other optimizer's, equal on all ranks
    reduction : keyword arguments of ``allreduce_async_``: op, prescale_factor, postscale_factor, process_set
    slice_numel : largest piece; None for this module's own choice
    timeout_s : limit of one wait
    explain : says which ranks and parameters are missing, for the error
    """

    small_numel = GATHER_NUMEL
    needs_zeros = False

    def __init__(
        self,
        hvd: Any,
        prefix: str,
        reduction: dict[str, Any],
        slice_numel: int | None,
        timeout_s: float,
        explain: Callable[[], str],
    ) -> None:
        self._hvd = hvd
        self._prefix = prefix
        self._reduction = reduction
        self._slice_numel = slice_numel or SLICE_NUMEL
        self._timeout_s = timeout_s
        self._explain = explain

    def send(self, parcel: Parcel, flat: torch.Tensor, step: int) -> NativePending:
        """Submit a parcel's slices."""
        carried = self._carried(flat)
        handles = []
        start = 0
        for index, numel in enumerate(equal_cuts(carried.numel(), self._slice_numel)):
            name = f"{self._prefix}.{parcel.index}.{index}"
            piece = carried[start : start + numel]
            handles.append(self._hvd.allreduce_async_(piece, name=name, **self._reduction))
            start += numel
        return NativePending(self, handles, flat, carried)

    def _carried(self, flat: torch.Tensor) -> torch.Tensor:
        """The buffer in a type that Horovod sends; the buffer itself where it can."""
        if flat.dtype in _KNOWN:
            return flat
        if flat.dtype in _WIDENED:
            return flat.to(_WIDENED[flat.dtype])
        if flat.is_complex():
            return torch.view_as_real(flat).view(-1)
        raise UnsupportedModelError(
            f"Horovod can't all-reduce {flat.dtype}; use float32, float64, float16, bfloat16 or a complex type"
        )

    def wait(self, handles: Sequence[int]) -> None:
        """Block until all are done; Horovod's own errors pass through."""
        limit_s = time.monotonic() + self._timeout_s
        for handle in handles:
            while not self._hvd.poll(handle):
                if time.monotonic() > limit_s:
                    raise CommTimeout(
                        f"{self._explain()} (waited {self._timeout_s:g} s, COMMHOOKS_TIMEOUT_S)"
                    )
                time.sleep(POLL_S)
            self._hvd.synchronize(handle)

    def stats(self) -> dict[str, Any]:
        """See ``Sender``."""
        return {"schedule": "native"}

    def close(self) -> None:
        """Nothing to give up: the connections are Horovod's."""


class NativePending:
    """The slices of one parcel on their way."""

    def __init__(
        self, sender: NativeSender, handles: Sequence[int], flat: torch.Tensor, carried: torch.Tensor
    ) -> None:
        self._sender = sender
        self._handles = handles
        self._flat = flat
        self._carried = carried

    def wait(self) -> None:
        """Block until the sums are in the buffer."""
        self._sender.wait(self._handles)
        if self._carried.dtype in _WIDENED.values() and self._flat.dtype in _WIDENED:
            self._flat.copy_(self._carried)


class HorovodSum:
    """One slice's sum through Horovod, as deferred steps' ordered exchange waits for it."""

    def __init__(self, hvd: Any, name: str, tensor: torch.Tensor, process_set: Any) -> None:
        self._hvd = hvd
        self._tensor = tensor
        self._carried = tensor.to(_WIDENED[tensor.dtype]) if tensor.dtype in _WIDENED else tensor
        self._handle = hvd.allreduce_async_(self._carried, name=name, op=hvd.Sum, process_set=process_set)

    def wait(self) -> None:
        """Block until the sum is in the tensor; the exchange's owner has the limit."""
        while not self._hvd.poll(self._handle):
            time.sleep(POLL_S)
        self._hvd.synchronize(self._handle)
        if self._carried is not self._tensor:
            self._tensor.copy_(self._carried)
