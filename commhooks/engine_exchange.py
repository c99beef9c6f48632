"""Slices over the engine's trees, for deferred steps.

Where in the flow: deferred -> **engine_exchange** -> engine; finished slices come back through `Completions`.

Invariants: the buckets are cut and dealt to trees exactly as without overlap across steps, so the sums are the same, bit
for bit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from commhooks.bootstrap import Rendezvous
from commhooks.core.gates import SliceKey
from commhooks.core.slicing import Layout, Segment
from commhooks.engine import Engine
from commhooks.exchanges import Completions
from commhooks.jobs import Job, JobKey


class EngineExchange:
    """A `SliceExchange` over an engine; made on every rank in the same order.

    Parameters
    ----------
    engine : of the model's process group
    rendezvous : to agree on the forward order
    timeout_s : how long a wait may last without any slice coming back
    """

    def __init__(self, engine: Engine, rendezvous: Rendezvous, timeout_s: float) -> None:
        self.world_size = engine.world_size
        self.any_order = True  # trees wait for nobody's order
        self._engine = engine
        self._rendezvous = rendezvous
        self._stream = engine.model_registers()
        self._completions = Completions(timeout_s)
        self.timeline = engine.timeline

    def name_layers(self, names: Mapping[int, str]) -> None:
        """For the timeline: what has which priority."""
        if self.timeline is not None:
            self.timeline.name_layers(self._stream, names)

    @property
    def epoch(self) -> int:
        """The engine's: it tunes the slice size and changes its plan over real steps."""
        return self._engine.epoch

    def begin(self, step: int) -> None:
        """The moment at which the engine may change its plan or its slice size."""
        self._engine.step_begins(self._stream)

    def layout(self, segments: Sequence[Segment], itemsize: int) -> Layout:
        """See `SliceExchange.layout`."""
        return self._engine.layout(segments, itemsize)

    def start(self, step: int, bucket: int, flat: torch.Tensor, layout: Layout) -> None:
        """See `SliceExchange.start`."""
        self._completions.expect([SliceKey(bucket, piece.index) for piece in layout.slices])
        self._engine.start_job(
            JobKey(self._stream, step, bucket),
            flat,
            layout,
            average=True,
            on_slice=lambda index: self._completions.done(SliceKey(bucket, index)),
            on_done=self._ended,
        )

    def _ended(self, job: Job) -> None:
        if job.error is not None:
            self._completions.fail(job.error)

    def seal(self) -> None:
        """Trees need no common order."""

    def poll(self) -> Sequence[SliceKey]:
        """See `SliceExchange.poll`."""
        return self._completions.poll()

    def wait(self, slices: Collection[SliceKey]) -> None:
        """See `SliceExchange.wait`."""
        self._completions.wait(slices)

    def agree(self, name: str, value: Any) -> Any:
        """See `SliceExchange.agree`."""
        return self._rendezvous.exchange(name, value if self._rendezvous.rank == 0 else None)[0]

    def close(self, timeout_s: float) -> None:
        """Wait for slices under way; the engine itself is shared, and closed by whoever started it."""
        self._completions.settle(timeout_s)
