"""Slices through the framework's own collective: ``schedule="native"`` for deferred steps.

Where in the flow: deferred -> **native** -> gates, in place of the engine's trees, where the backend's own all-reduce is the
fastest path.

Ranks that issue collectives in different orders get wrong sums without any error, so every rank issues in one agreed order: the
order in which a single sender that always takes the most urgent slice would send them, worked out from rank 0's measured
times.  One thread per registered model issues, on a process group of its own (two threads on one Gloo group mix
their data).

Invariants: at most `WINDOW` collectives in flight; the average is finished before its slice is reported; which slice is issued
next depends only on what is equal on all ranks (agreed order, layouts), never on what happens to be ready.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from commhooks.bootstrap import Rendezvous
from commhooks.buffers import check_tensor, prescales
from commhooks.core.gates import SliceCost, SliceKey, agreed_order
from commhooks.core.slicing import Layout, Segment, slice_layout
from commhooks.errors import CommError, PeerLost
from commhooks.exchanges import Completions

log = logging.getLogger(__name__)

# Two keep the next collective's first message behind the current one's last; more would only delay urgent slices.
WINDOW = 2
# A backend's collective costs 2 (n - 1) messages in a row, so its slices are larger than the trees' own.
DEFAULT_SLICE_NUMEL = 250_000
# Layers below this size share a slice with their neighbour: the messages of a collective cost more than their bytes.
_COARSE_NUMEL = 32_000


class _Turn:
    """What this rank knows of one step: its layouts, and for the next agreement when buckets came and slices took."""

    def __init__(self) -> None:
        self.layouts: dict[int, Layout] = {}
        self.sealed = False
        self.came_s: dict[int, float] = {}
        self.took_s: dict[SliceKey, float] = {}

    def signature(self) -> tuple[tuple[int, Layout], ...]:
        """Equal on all ranks; the agreed order is good as long as it stays the same."""
        return tuple(sorted(self.layouts.items(), key=lambda item: item[0]))

    def costs(self) -> list[SliceCost]:
        """This step's slices as they would be put in order."""
        first_s = min(self.came_s.values(), default=0.0)
        return [
            SliceCost(key, self.came_s[bucket] - first_s, piece.priority, self.took_s.get(key, 0.0))
            for bucket, layout in self.layouts.items()
            for piece in layout.slices
            for key in [SliceKey(bucket, piece.index)]
        ]


class Waitable(Protocol):
    """A collective under way."""

    def wait(self) -> Any:
        """Block until it is done; RuntimeError when it failed."""


#: Starts an in-place sum of a slice over all ranks; called in the same order on every rank, by one thread.
Collective = Callable[[SliceKey, torch.Tensor], Waitable]


class OrderedExchange:
    """A `SliceExchange` over a collective that every rank must issue in the same order.

    Parameters
    ----------
    issue : the collective
    rendezvous : to agree on the order
    slice_numel : largest slice in elements; None takes the default
    priority : "layer" sends by forward order, "fifo" as buckets appear
    timeout_s : how long a wait may last without progress
    """

    def __init__(
        self,
        issue: Collective,
        rendezvous: Rendezvous,
        slice_numel: int | None,
        priority: str,
        timeout_s: float,
    ) -> None:
        self.world_size = rendezvous.world_size
        self.epoch = 0  # cuts never change
        self._rendezvous = rendezvous
        self._collective = issue
        self._slice_numel = slice_numel or DEFAULT_SLICE_NUMEL
        self._by_layer = priority == "layer"
        self._completions = Completions(timeout_s)
        self._changed = threading.Condition()
        self._ready: dict[SliceKey, torch.Tensor] = {}
        self._order: deque[SliceKey] = deque()
        self._agreed: tuple[SliceKey, ...] = ()
        self._agreed_for: tuple[tuple[int, Layout], ...] = ()
        self._turn = _Turn()
        self._step = -1
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="commhooks-native", daemon=True)
        self._thread.start()

    # -- SliceExchange ----------------------------------------------------------------------------------------------

    @property
    def any_order(self) -> bool:
        """Once an order is agreed on, slices are issued in it, however they come."""
        return bool(self._agreed)

    def layout(self, segments: Sequence[Segment], itemsize: int) -> Layout:
        """Cut a bucket; its one tree is the backend's own."""
        return slice_layout(_coarse(segments), self._slice_numel, lambda sizes: [0] * len(sizes))

    def start(self, step: int, bucket: int, flat: torch.Tensor, layout: Layout) -> None:
        """See `SliceExchange.start`."""
        check_tensor(flat)
        keys = [SliceKey(bucket, piece.index) for piece in layout.slices]
        self._completions.expect(keys)
        with self._changed:
            self._turn.layouts[bucket] = layout
            self._turn.came_s[bucket] = time.monotonic()
            for key, piece in zip(keys, layout.slices, strict=True):
                self._ready[key] = flat[piece.start : piece.stop]
            if not self._agreed:
                self._order.extend(keys)
            self._changed.notify()

    def seal(self) -> None:
        """See `SliceExchange.seal`."""
        with self._changed:
            self._turn.sealed = True
            known = set(self._order)
            # Slices that the agreed order doesn't know (DDP changed its buckets) go last, in an order all ranks share.
            self._order.extend(key for key in sorted(self._ready) if key not in known)
            self._changed.notify()

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
        """See `SliceExchange.close`."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning(
                "native exchange: slices are still under way after %g s; left to the process's end", timeout_s
            )

    # -- the order --------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """See `SliceExchange.begin`; agrees on an order when the layouts have changed."""
        last, self._turn = self._turn, _Turn()
        self._step = step
        if self._by_layer and last.layouts and last.signature() != self._agreed_for:
            order = agreed_order(last.costs()) if self._rendezvous.rank == 0 else ()
            self._agreed = tuple(SliceKey(*key) for key in self.agree("slice order", order))
            self._agreed_for = last.signature()
        with self._changed:
            self._order = deque(self._agreed)

    # -- the issuing thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        in_flight: deque[tuple[SliceKey, torch.Tensor, Waitable]] = deque()
        last_s = 0.0
        try:
            while True:
                found = self._next(block=not in_flight)
                if found is not None:
                    key, tensor = found
                    in_flight.append((key, tensor, self._issue(key, tensor)))
                    if len(in_flight) < WINDOW:
                        continue
                if not in_flight:
                    return
                key, tensor, work = in_flight.popleft()
                work.wait()
                if not prescales(tensor.dtype):
                    tensor.div_(self.world_size)
                now_s = time.monotonic()
                self._turn.took_s[key] = now_s - max(last_s, self._turn.came_s.get(key.bucket, 0.0))
                last_s = now_s
                self._completions.done(key)
        except RuntimeError as error:
            self._completions.fail(self._named(error))

    def _issue(self, key: SliceKey, tensor: torch.Tensor) -> Waitable:
        if prescales(tensor.dtype):
            tensor.div_(self.world_size)
        return self._collective(key, tensor)

    def _next(self, block: bool) -> tuple[SliceKey, torch.Tensor] | None:
        """The next slice in order that is ready; without one None, or (`block`) a wait for it; None when closing."""
        with self._changed:
            while True:
                while self._order and self._turn.sealed and self._order[0] not in self._ready:
                    self._order.popleft()  # it belonged to a bucket that DDP no longer has
                if self._order and self._order[0] in self._ready:
                    key = self._order.popleft()
                    return key, self._ready.pop(key)
                if self._closing or not block:
                    return None
                self._changed.wait()

    def _named(self, error: RuntimeError) -> CommError:
        if isinstance(error, CommError):
            return error
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        named = PeerLost(
            f"step {self._step}: the backend's all-reduce failed ({first}); a rank ended, or stopped answering"
        )
        named.__cause__ = error
        return named


class NativeExchange(OrderedExchange):
    """Over ``torch.distributed.all_reduce``, on a process group of its own with the ranks of `group` (collective)."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        rendezvous: Rendezvous,
        slice_numel: int | None,
        priority: str,
        timeout_s: float,
    ) -> None:
        ranks = dist.get_process_group_ranks(group)
        own = dist.new_group(ranks, backend=dist.get_backend(group), use_local_synchronization=True)

        def issue(key: SliceKey, tensor: torch.Tensor) -> Waitable:
            return dist.all_reduce(tensor, group=own, async_op=True)

        super().__init__(issue, rendezvous, slice_numel, priority, timeout_s)


def _coarse(segments: Sequence[Segment]) -> list[Segment]:
    """The same segments with small neighbours made one layer, at the more urgent one's priority."""
    groups: list[list[Segment]] = []
    filled = _COARSE_NUMEL
    for segment in segments:
        if filled >= _COARSE_NUMEL:
            groups.append([])
            filled = 0
        groups[-1].append(segment)
        filled += segment.numel
    return [
        Segment(segment.numel, min(other.priority for other in group), number)
        for number, group in enumerate(groups)
        for segment in group
    ]
