"""P3's paper, for comparison: a parameter server on every rank, its baseline's way, with slices only, and P3's.

Where in the flow: bench.trainers -> **paper_servers** (a `SliceExchange` for deferred steps) -> the engine's messages.

=========== ============================ ======== ===================== ==========================
mode        what travels                 order    the new value comes   in flight per link
=========== ============================ ======== ===================== ==========================
baseline    whole layers; large ones     FIFO     after notify and pull as much as the socket takes
            split equally over servers
slicing     slices, round robin          FIFO     at once               as much as the socket takes
p3          slices, round robin          by layer at once               one slice
=========== ============================ ======== ===================== ==========================

In all of them a layer's next forward waits for that layer only, as MXNet's dependency engine lets it.  The server sums and
the worker steps, as in P3's own port to upstream MXNet.

Invariants: a server broadcasts one value for a part, so ranks stay equal; sizes that the paper gives in parameters are scaled
with the model.

Source: Jayarajan et al., MLSys 2019, sections 2 and 4; MXNet's KVStore.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commhooks.bootstrap import Rendezvous, group_rendezvous
from commhooks.core.gates import SliceKey
from commhooks.core.plan import Hop
from commhooks.core.slicing import Layout, Segment, Slice, equal_cuts, layout_digest, merge_layers
from commhooks.engine import Engine
from commhooks.exchanges import Completions

MODES = ("baseline", "slicing", "p3")
WHOLE_LAYER_NUMEL = 1_000_000  # KVStore splits larger layers over all servers
P3_SLICE_NUMEL = 50_000
_HEAD = struct.Struct("<qii")  # step, bucket, slice
_PUSH, _NOTIFY, _PULL, _VALUE = 1, 2, 3, 4
# Spreads layers over servers as well as a hash does, and the same everywhere.
_SPREAD = 9973


class PaperServers:
    """A `SliceExchange` over parameter servers, one per rank.

    Parameters
    ----------
    engine : its own; only its messages are used
    rendezvous : to agree on the forward order
    mode : one of `MODES`
    scale : of the model
    """

    any_order = True
    epoch = 0

    def __init__(self, engine: Engine, rendezvous: Rendezvous, mode: str, scale: float) -> None:
        self.world_size = engine.world_size
        self._engine = engine
        self._rendezvous = rendezvous
        self._mode = mode
        self._whole_numel = max(1, round(WHOLE_LAYER_NUMEL * scale))
        self._slice_numel = max(1, round(P3_SLICE_NUMEL * scale))
        self._completions = Completions(engine.config.timeout_s)
        self._turn = 0
        self._sequence = 0
        # Engine's thread only:
        self._flats: dict[tuple[int, int], tuple[np.ndarray, Layout]] = {}
        self._sums: dict[tuple[int, int, int], tuple[np.ndarray, int]] = {}
        self._values: dict[tuple[int, int, int], np.ndarray] = {}
        self._notified: dict[tuple[int, int, int], int] = {}
        self._early: list[Callable[[], None]] = []
        everyone = frozenset(Hop(rank, 0) for rank in range(engine.world_size) if rank != engine.rank)
        engine.connect(everyone)
        for tag, handler in ((_PUSH, self._on_push), (_NOTIFY, self._on_notify), (_PULL, self._on_pull)):
            engine.on_message(tag, self._heard(handler))
        engine.on_message(_VALUE, self._heard(self._on_value))

    # -- SliceExchange ----------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """See `SliceExchange.begin`."""

    def layout(self, segments: Sequence[Segment], itemsize: int) -> Layout:
        """Parts of a bucket; a part's ``tree`` is its server."""
        slices: list[Slice] = []
        start = 0
        for segment in merge_layers(segments):
            for numel, server in self._parts(segment):
                slices.append(Slice(len(slices), start, start + numel, segment.priority, server))
                start += numel
        return Layout(start, tuple(slices), layout_digest(slices))

    def _parts(self, segment: Segment) -> list[tuple[int, int]]:
        if self._mode != "baseline":
            sizes = equal_cuts(segment.numel, self._slice_numel)
            first, self._turn = self._turn, self._turn + len(sizes)
            return [(numel, (first + at) % self.world_size) for at, numel in enumerate(sizes)]
        if segment.numel < self._whole_numel:
            return [(segment.numel, segment.layer * _SPREAD % self.world_size)]
        sizes = equal_cuts(segment.numel, -(-segment.numel // self.world_size))
        return [(numel, server) for server, numel in enumerate(sizes)]

    def start(self, step: int, bucket: int, flat: torch.Tensor, layout: Layout) -> None:
        """See `SliceExchange.start`."""
        self._completions.expect([SliceKey(bucket, piece.index) for piece in layout.slices])
        self._engine.run_soon(lambda: self._leave(step, bucket, flat.numpy(), layout))

    def seal(self) -> None:
        """Servers need no common order."""

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
        self._completions.settle(timeout_s)

    # -- the engine's thread: messages ------------------------------------------------------------------------------

    def _send(self, peer: int, tag: int, part: tuple[int, int, int], priority: int, body: Any = None) -> None:
        """Send to a rank, or hand over to this rank's own server or worker."""
        head = _HEAD.pack(*part)
        if peer == self._engine.rank:
            handlers = {
                _PUSH: self._on_push,
                _NOTIFY: self._on_notify,
                _PULL: self._on_pull,
                _VALUE: self._on_value,
            }
            values = None if body is None else np.array(body)
            self._engine.run_soon(lambda: handlers[tag](self._engine.rank, part, values))
            return
        self._sequence += 1
        by_layer = self._mode == "p3"
        key = (part[0], priority, self._sequence) if by_layer else (0, 0, self._sequence)
        view = None if body is None else memoryview(body).cast("B")
        self._engine.send(peer, tag, head, view, key)

    def _heard(self, handler: Callable[..., None]) -> Callable[[int, bytes, memoryview], None]:
        def on_message(peer: int, text: bytes, body: memoryview) -> None:
            part = _HEAD.unpack(text)
            values = np.frombuffer(body, dtype=np.float32) if len(body) else None
            handler(peer, part, values)

        return on_message

    # -- the engine's thread: worker --------------------------------------------------------------------------------

    def _leave(self, step: int, bucket: int, flat: np.ndarray, layout: Layout) -> None:
        self._flats[step, bucket] = (flat, layout)
        for piece in layout.slices:
            self._send(
                piece.tree, _PUSH, (step, bucket, piece.index), piece.priority, flat[piece.start : piece.stop]
            )
        early, self._early = self._early, []
        for call in early:
            call()

    def _on_notify(self, peer: int, part: tuple[int, int, int], values: np.ndarray | None) -> None:
        """A part of a layer is updated; the layer is pulled when all of its parts are."""
        step, bucket, index = part
        if (step, bucket) not in self._flats:
            self._early.append(lambda: self._on_notify(peer, part, None))
            return
        _, layout = self._flats[step, bucket]
        priority = layout.slices[index].priority
        layer = [piece for piece in layout.slices if piece.priority == priority]
        seen = self._notified[step, bucket, priority] = self._notified.get((step, bucket, priority), 0) + 1
        if seen == len(layer):
            del self._notified[step, bucket, priority]
            for piece in layer:
                self._send(piece.tree, _PULL, (step, bucket, piece.index), priority)

    def _on_value(self, peer: int, part: tuple[int, int, int], values: np.ndarray | None) -> None:
        step, bucket, index = part
        if (step, bucket) not in self._flats:
            kept = np.array(values)
            self._early.append(lambda: self._on_value(peer, part, kept))
            return
        flat, layout = self._flats[step, bucket]
        piece = layout.slices[index]
        flat[piece.start : piece.stop] = values
        self._flats.pop((step - 2, bucket), None)
        self._completions.done(SliceKey(bucket, index))

    # -- the engine's thread: server --------------------------------------------------------------------------------

    def _on_push(self, peer: int, part: tuple[int, int, int], values: np.ndarray | None) -> None:
        assert values is not None  # a push carries a gradient
        if part in self._sums:
            total, count = self._sums[part]
            np.add(total, values, out=total)
        else:
            total, count = np.array(values), 0
        self._sums[part] = (total, count + 1)
        if count + 1 < self.world_size:
            return
        del self._sums[part]
        np.divide(total, np.float32(self.world_size), out=total)
        step, bucket, index = part
        # The last push may be another rank's, before this rank's own worker has said how urgent the part is.
        known = self._flats.get((step, bucket))
        priority = known[1].slices[index].priority if known else 0
        if self._mode == "baseline":
            self._values[part] = total
            for rank in range(self.world_size):
                self._send(rank, _NOTIFY, part, priority)
        else:
            for rank in range(self.world_size):
                self._send(rank, _VALUE, part, priority, total)

    def _on_pull(self, peer: int, part: tuple[int, int, int], values: np.ndarray | None) -> None:
        self._send(peer, _VALUE, part, 0, self._values[part])
        for old in [key for key in self._values if key[0] < part[0] - 1]:
            del self._values[old]


def paper_trainer(mode: str, job: Any, replay_of: Callable[[Any], Any]) -> Any:
    """A contender for ``bench train``: deferred steps over parameter servers."""
    from commhooks.bench.trainers import Trainer
    from commhooks.deferred import attach
    from commhooks.groups import load_config, surroundings
    from commhooks.planning import planner_for

    config = load_config(
        {
            **job.settings,
            "priority": "layer" if mode == "p3" else "fifo",
            "send_window": 1 if mode == "p3" else 0,
            "links": "tcp",
            "schedule": "trees",
            "topology": "uniform",
        }
    )
    group = dist.distributed_c10d._get_default_group()
    rendezvous = group_rendezvous(group, config.timeout_s)
    engine = Engine.start(
        rendezvous, config, planner_for(config, rendezvous.world_size), surroundings(config)
    )
    replay, optimizer = replay_of(job)
    wrapped = DistributedDataParallel(replay, bucket_cap_mb=job.bucket_mb)
    servers = PaperServers(engine, rendezvous, mode, job.scale)
    steps = attach(wrapped, optimizer, servers, config)
    name = "p3" if mode == "p3" else f"p3-{mode}"
    return Trainer(name, replay, wrapped, optimizer, steps.flush, steps.stats)
