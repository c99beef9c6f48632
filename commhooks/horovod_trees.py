"""Sends parcels through our own engine: ``schedule=trees`` (or ``ring``) under Horovod.

Where in the flow: reducer -> **trees sender** -> engine.  Horovod is launcher and control plane only.

Invariants: one stream of the engine per plan of an optimizer; a parcel's buffer belongs to the engine until its job has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from commhooks.core.slicing import Layout, Segment
from commhooks.engine import Engine
from commhooks.errors import CommError
from commhooks.jobs import Job, JobKey
from commhooks.parcels import SMALL_NUMEL, Parcel
from commhooks.reduction import few


class TreesSender:
    """The engine for one optimizer.

    Parameters
    ----------
    engine : of the process set
    average : divide the sum by the number of ranks
    before, after : factors on the gradients before the sum and on the result
    translate : what to raise for an error of the engine
    optimizer, names : for messages: the optimizer, and its parameters in the agreed order
    """

    small_numel = SMALL_NUMEL
    needs_zeros = True

    def __init__(
        self,
        engine: Engine,
        average: bool,
        before: float,
        after: float,
        translate: Callable[[CommError, str], Exception],
        optimizer: str,
        names: Sequence[str],
    ) -> None:
        self._optimizer = optimizer
        self._names = names
        self._engine = engine
        self._average = average
        self._before = before
        self._after = after
        self._translate = translate
        self._stream = engine.new_stream()
        self._layouts: dict[tuple[int, int, int], Layout] = {}
        if engine.timeline is not None:
            engine.timeline.name_layers(self._stream, dict(enumerate(names)))

    def send(self, parcel: Parcel, flat: torch.Tensor, step: int) -> TreesPending:
        """Hand the buffer to the engine."""
        if self._before != 1.0:
            flat.mul_(self._before)
        key = JobKey(self._stream, step, parcel.index)
        try:
            job = self._engine.start_job(key, flat, self._layout(parcel, flat), self._average)
        except CommError as error:
            raise self._named(error, parcel) from error
        return TreesPending(self, job, flat, parcel)

    def _layout(self, parcel: Parcel, flat: torch.Tensor) -> Layout:
        # A parcel holds one layer, or small gradients that aren't worth a slice each.
        key = (flat.numel(), flat.element_size(), parcel.priority)
        if key not in self._layouts:
            segment = Segment(flat.numel(), parcel.priority, parcel.index)
            self._layouts[key] = self._engine.layout([segment], flat.element_size())
        return self._layouts[key]

    def _named(self, error: CommError, parcel: Parcel) -> Exception:
        waiting = few([self._names[i] for i in parcel.members if i < len(self._names)])
        return self._translate(error, f"{error} (optimizer {self._optimizer}, waiting for {waiting})")

    def finish(self, job: Job, flat: torch.Tensor, parcel: Parcel) -> None:
        """Block until a job has ended."""
        try:
            self._engine.wait(job)
        except CommError as error:
            raise self._named(error, parcel) from error
        if self._after != 1.0:
            flat.mul_(self._after)

    def stats(self) -> dict[str, object]:
        """See ``Sender``."""
        return {"schedule": "trees", **self._engine.stats()}

    def close(self) -> None:
        """Nothing to give up: the engine is the process set's, and other optimizers may use it."""


class TreesPending:
    """One job on its way."""

    def __init__(self, sender: TreesSender, job: Job, flat: torch.Tensor, parcel: Parcel) -> None:
        self._parcel = parcel
        self._sender = sender
        self._job = job
        self._flat = flat

    def wait(self) -> None:
        """Block until the result is in the buffer."""
        self._sender.finish(self._job, self._flat, self._parcel)
