"""The engine of one process group: started once, fed with jobs by any thread, one thread of its own.

Where in the flow: ddp / collectives / deferred / parameter server -> **engine** -> loop -> links.

Invariants: starting is collective (every rank of the group calls it in the same order); after the first error every call raises
that error again; `close` never hangs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import torch

from commhooks.bootstrap import Rendezvous
from commhooks.buffers import FlatBuffer, prescales
from commhooks.config import Config
from commhooks.core.choice import Choice, Way, needs_trial
from commhooks.core.miad import Miad
from commhooks.core.plan import Hop, Plan, TreeRoute
from commhooks.core.slicing import P3_SLICE_NUMEL, Layout, Segment, parts_of, slice_layout
from commhooks.core.topology import Topology
from commhooks.errors import CommError, CommTimeout, InternalError, PeerLost, UnsupportedModelError
from commhooks.exits import closed, opened
from commhooks.hosts import Home, LinkMaker, Placement, largest_slice_bytes
from commhooks.jobs import Job, JobKey
from commhooks.links.base import Key, Link
from commhooks.links.pages import HugePages
from commhooks.links.tcp import backlog_bytes
from commhooks.loop import Loop, MessageHandler
from commhooks.mesh import Mesh
from commhooks.startup import Planner, agree_on_plan, make_home, meet
from commhooks.timeline import Recorder
from commhooks.tuning import Tuner
from commhooks.watch import Limits

log = logging.getLogger(__name__)

# Read in place, a slice costs no staging, so the per-slice cost decides: a megabyte.
_REFERENCE_SLICE_BYTES = 1 << 20
# Over TCP: two milliseconds of the plan's rate, within what a frame and a staging buffer make sensible.
_SLICE_S = 2e-3
# A peer's death reaches the framework's connections and ours at about the same time.
_NAMING_S = 2.0
_FIRST_SLICE_BYTES = 100_000
_LEAST_SLICE_BYTES = 50_000
_LARGEST_SLICE_BYTES = 4 << 20


@dataclass(frozen=True)
class Surroundings:
    """What the entry point read from the environment."""

    interfaces: tuple[str, ...] = ()
    rendezvous_host: str | None = None
    pacing_bytes_per_s: Mapping[int, float] = field(
        default_factory=dict
    )  # per peer: see `lab_environment.pacing`


class Engine:
    """Use `Engine.start`."""

    def __init__(self, rank: int, world_size: int, config: Config, plan: Plan, loop: Loop) -> None:
        self.rank = rank
        self.world_size = world_size
        self.config = config
        self.plan = plan
        self.native_bytes_per_s = 0.0
        self._paced = False  # in a lab without emulation
        self.placements: list[Placement] = []
        self._loop = loop
        self._streams = 0
        self._lock = threading.Lock()
        self._links_up = threading.Condition()
        self._thread = threading.Thread(target=loop.run, name=f"commhooks-rank{rank}", daemon=True)
        self._routes = _by_tree(plan, rank)
        self._slice_bytes = 0
        self._largest_slice_bytes = 1 << 20
        self._tuner: Tuner | None = None
        #: counts changes of plan and slice size: layouts of an older epoch are out of date
        self.epoch = 0
        self._plans: dict[tuple[str, int | None], Plan] = {("all_reduce", None): plan}
        self._rendezvous: Rendezvous | None = None
        self._planner: Planner | None = None
        self._mesh: Mesh | None = None
        self._maker: LinkMaker | None = None
        self.timeline: Recorder | None = None
        self._closed = self._ended = False
        self._pages: HugePages | None = None  # where other ranks read this rank's memory
        self._home: Home | None = None  # keeps the memory that other ranks probe alive

    @classmethod
    def start(
        cls,
        rendezvous: Rendezvous,
        config: Config,
        planner: Planner,
        surroundings: Surroundings | None = None,
        timeline: Recorder | None = None,
        extra_peers: frozenset[int] = frozenset(),
    ) -> Engine:
        """Meet the other ranks, agree on settings and plan, and connect.  Collective; blocks the caller.

        Parameters
        ----------
        rendezvous : the launcher's store
        config : must agree on all ranks where the table says so
        planner : makes the plan, on rank 0
        timeline : where to record what happens
        extra_peers : ranks to connect to beyond the plan's edges (must be mutual)

        Raises
        ------
        Mismatch
            Settings differ between ranks.
        CommTimeout
            A rank didn't come, or a link didn't come up.
        """
        surroundings = surroundings or Surroundings()
        home = make_home(rendezvous, config, surroundings.interfaces, surroundings.rendezvous_host)
        try:
            return cls._start(rendezvous, config, planner, surroundings, timeline, extra_peers, home)
        except BaseException:
            home.close()
            raise

    @classmethod
    def _start(
        cls,
        rendezvous: Rendezvous,
        config: Config,
        planner: Planner,
        surroundings: Surroundings,
        timeline: Recorder | None,
        extra_peers: frozenset[int],
        home: Home,
    ) -> Engine:
        rank, world_size = rendezvous.rank, rendezvous.world_size
        secret, placements = meet(rendezvous, config, home)
        plan, native_bytes_per_s, topology = agree_on_plan(
            rendezvous, planner, placements, "all_reduce", None
        )
        limits = Limits(config.timeout_s, config.heartbeat_s)
        loop = Loop(rank, limits, config.checksum, timeline)
        engine = cls(rank, world_size, config, plan, loop)
        engine.placements, engine.timeline = placements, timeline
        engine.native_bytes_per_s = native_bytes_per_s
        engine._paced = bool(surroundings.pacing_bytes_per_s)
        maker = LinkMaker(rank, placements, config.send_window, surroundings.pacing_bytes_per_s)
        mesh = Mesh(
            rank,
            world_size,
            maker,
            home.listeners,
            secret,
            loop,
            loop.add_link,
            config.tcp_congestion,
            backlog_bytes(plan.bytes_per_s),
        )
        loop.use_mesh(mesh, engine._notify)
        engine._pages = HugePages() if "readv" in maker.kinds() else None
        engine._home, engine._rendezvous, engine._planner = home, rendezvous, planner
        engine._mesh, engine._maker = mesh, maker
        engine._largest_slice_bytes = largest_slice_bytes(placements)
        engine._thread.start()
        opened(engine)
        try:
            engine.connect(plan.peers(rank) | frozenset(Hop(peer, 0) for peer in extra_peers if peer != rank))
        except CommError:
            engine.close()
            raise
        engine._slice_bytes = auto_slice_bytes(plan.bytes_per_s, engine.one_host)
        engine._tuner = engine._make_tuner(topology)
        if rank == 0:
            log.info("commhooks is on: %d ranks, %s; links: %s", world_size, plan.reason, maker.kinds())
        return engine

    def _make_tuner(self, topology: Topology | None) -> Tuner:
        searches = self.config.slice_numel is None and not self.one_host and self.world_size > 1
        miad = Miad(self._slice_bytes, _LEAST_SLICE_BYTES, _LARGEST_SLICE_BYTES) if searches else None
        return Tuner(self, topology, self.config.replan and self.world_size > 1, miad)

    def _notify(self) -> None:
        with self._links_up:
            self._links_up.notify_all()

    def connect(self, hops: frozenset[Hop]) -> None:
        """Have links to `hops`; blocks until they are up.  Both ends must ask for a link.

        Raises
        ------
        CommTimeout
            A link didn't come up; the message shows the addresses.
        """
        mesh = self._mesh
        assert mesh is not None
        limit_s = self.config.timeout_s
        if hops <= self._loop.links.keys():
            return
        assert self._maker is not None
        for hop in hops:
            self._maker.way_to(hop.rank, hop.channel)  # a ConfigError is raised here, where the user waits
        self._loop.call(lambda: mesh.connect(hops - self._loop.links.keys(), time.monotonic()))
        with self._links_up:
            up = self._links_up.wait_for(
                lambda: self._loop.error or hops <= self._loop.links.keys(), timeout=limit_s
            )
        self.raise_if_failed()
        if not up:
            raise CommTimeout(f"{mesh.explain_missing()} (waited {limit_s:g} s, COMMHOOKS_TIMEOUT_S)")

    def plan_for(self, collective: str, root: int | None = None) -> Plan:
        """The plan of another collective over the same network; agreed on and connected at first use (collective)."""
        plan = self._plans.get((collective, root))
        if plan is None:
            assert self._rendezvous is not None and self._planner is not None
            plan, _, _ = agree_on_plan(self._rendezvous, self._planner, self.placements, collective, root)
            self.connect(plan.peers(self.rank))
            self._plans[collective, root] = plan
        return plan

    def routes_of(self, plan: Plan) -> tuple[TreeRoute | None, ...]:
        """This rank's part of each tree of a plan, by tree number; None where it has none."""
        return self._routes if plan is self.plan else _by_tree(plan, self.rank)

    # -- jobs --------------------------------------------------------------------------------------------------------------

    def new_stream(self) -> int:
        """A number for a sequence of jobs; every rank asks in the same order."""
        with self._lock:
            self._streams += 1
            return self._streams

    def layout(self, segments: Sequence[Segment], itemsize: int) -> Layout:
        """Cut a buffer according to the configuration and the plan."""
        return slice_layout(
            segments, self.slice_numel(itemsize), self.plan.assign, parts_of(self.plan.shares)
        )

    def slice_numel(self, itemsize: int) -> int:
        """The largest slice, in elements: as configured, or by what moves it."""
        if self.config.slice_numel is not None:
            return min(self.config.slice_numel, max(1, self._largest_slice_bytes // itemsize))
        return max(1, self._slice_bytes // itemsize)

    def set_slice_bytes(self, slice_bytes: int) -> None:
        """Cut differently from the next layout on; all ranks at the same point of their programs."""
        if slice_bytes != self._slice_bytes:
            self._slice_bytes = slice_bytes
            self.epoch += 1

    def switch_plan(self, plan: Plan | None) -> None:
        """Use rank 0's `plan` for all later jobs; jobs under way end on their own routes.  Collective."""
        assert self._rendezvous is not None
        offer = plan.to_json() if self.rank == 0 and plan is not None else None
        agreed = Plan.from_json(self._rendezvous.exchange("switch", offer)[0])
        agreed.prove()
        self.connect(agreed.peers(self.rank))
        self.plan = self._plans["all_reduce", None] = agreed
        self._routes = _by_tree(agreed, self.rank)
        self.epoch += 1

    def model_registers(self) -> int:
        """A stream for a model, whose steps are the ones that tuning goes by."""
        stream = self.new_stream()
        if self._tuner is not None:
            self._tuner.adopt_model(stream)
        return stream

    def step_begins(self, stream: int) -> None:
        """A registered model begins a step: the moment at which plan and slice size may change (then `epoch` does)."""
        if self._tuner is not None:
            self._tuner.step_begins(stream)

    def busy(self) -> tuple[float, int]:
        """Seconds with jobs under way and bytes of finished jobs, since the start."""
        return self._loop.traffic.busy()

    @property
    def one_host(self) -> bool:
        """Whether all ranks read each other's memory; equal on all ranks."""
        first = self.placements[0]
        return all(first.local_kind(other) is not None for other in self.placements[1:])

    def predicted_choice(self) -> Choice | None:
        """Trees or native where the prediction is clear; None: a trial decides."""
        if self._paced:
            return Choice(
                Way.TREES, "the lab paces these links alone: the native collective would know no limit"
            )
        return needs_trial(self.plan, self.native_bytes_per_s, self.one_host)

    def start_job(
        self,
        key: JobKey,
        tensor: torch.Tensor,
        layout: Layout,
        average: bool = False,
        on_slice: Callable[[int], None] | None = None,
        on_done: Callable[[Job], None] | None = None,
        routes: tuple[TreeRoute | None, ...] | None = None,
        label: str = "",
    ) -> Job:
        """Reduce `tensor` (flat, contiguous, on the CPU) in place over all ranks.  Returns at once.

        `tensor` must not be touched before the job has ended.  `on_slice` and `on_done` run in the engine's thread.
        """
        self.raise_if_failed()
        if layout.numel != tensor.numel():
            raise InternalError(f"{key}: layout of {layout.numel} elements for a tensor of {tensor.numel()}")
        if average and not (tensor.is_floating_point() or tensor.is_complex()):
            raise UnsupportedModelError(
                f"an average of {tensor.dtype} can't be exact; sum it and divide, or pass a floating-point tensor"
            )
        divisor = self.world_size if average else 1
        if average and prescales(tensor.dtype):
            tensor.div_(self.world_size)
            divisor = 1
        buffer = FlatBuffer(tensor)
        if self._pages is not None:
            self._pages.used(buffer.address, buffer.nbytes)
        job = Job(
            key,
            buffer,
            layout,
            self._routes if routes is None else routes,
            divisor,
            on_slice,
            on_done,
            average,
            label,
        )
        self._loop.call(lambda: self._loop.submit(job))
        return job

    def wait(self, job: Job) -> None:
        """Block until the job has ended; raises its error.

        The loop ends every job (its own limits apply); should the engine's thread itself be gone, this raises too.
        """
        while not job.wait(1.0):
            if not self._thread.is_alive():
                self.raise_if_failed()
                raise InternalError(f"{job.key}: the engine's thread has ended")
        if job.error is not None:
            raise fresh(job.error)

    # -- messages ------------------------------------------------------------------------------------------------------------

    def on_message(self, tag: int, handler: MessageHandler) -> None:
        """Handle point-to-point messages with `tag`: ``handler(peer, text, body)`` in the engine's thread.

        `body` is only valid during the call.
        """
        self._loop.call(lambda: self._loop.handle_messages(tag, handler))

    def send(
        self,
        peer: int,
        tag: int,
        text: bytes,
        body: memoryview | None = None,
        key: Key = (0, 0, 0),
        done: Callable[[], None] | None = None,
    ) -> None:
        """Send a message to a connected rank; `done` runs in the engine's thread when `body` may be reused."""
        self.raise_if_failed()
        self._loop.call(lambda: self._loop.send_message(Hop(peer, 0), tag, text, body, key, done))

    def run_soon(self, function: Callable[[], None]) -> None:
        """Run `function` in the engine's thread."""
        self._loop.call(function)

    def tolerate_losses(self, handler: Callable[[int, str], None]) -> None:
        """From now on a lost peer is no error: ``handler(rank, words)`` runs in the engine's thread instead.

        For users of messages only (the parameter server); a slice that needs the peer still fails.
        """
        self._loop.call(lambda: self._loop.tolerate_losses(handler))

    # -- state ---------------------------------------------------------------------------------------------------------------

    @property
    def error(self) -> CommError | None:
        return self._loop.error

    @property
    def closed(self) -> bool:
        return self._closed

    def raise_if_failed(self) -> None:
        """Raise the engine's error, if it has one."""
        if self._loop.error is not None:
            raise fresh(self._loop.error)
        if self._closed:
            raise CommError("the engine is closed; register again to start a new one")

    def raise_named(self, error: RuntimeError) -> NoReturn:
        """The framework's own collective failed: raise what the links know of it, else `error` itself."""
        with self._links_up:
            self._links_up.wait_for(lambda: self._loop.error is not None, timeout=_NAMING_S)
        self.raise_if_failed()
        if gone := "; ".join(self._loop.gone):
            lost = PeerLost(f"{gone}, and the group's own collective failed: {error}")
            self.fail(lost)  # those who don't share a connection with it would wait on
            with self._links_up:
                self._links_up.wait_for(lambda: self._loop.error is not None, timeout=_NAMING_S)
            self.raise_if_failed()
        raise error

    def fail(self, error: CommError) -> None:
        """Latch from outside: the caller has found a reason why no rank may go on."""
        self._loop.call(lambda: self._loop.latch(error))

    @property
    def links(self) -> list[Link]:
        return list(self._loop.links.values())

    def stats(self) -> dict[str, object]:
        """Counters since the start."""
        loop = self._loop
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "plan": self.plan.reason,
            "trees": len(self.plan.pairs),
            "depth": self.plan.depth,
            "predicted_bytes_per_s": self.plan.bytes_per_s,
            "bound_bytes_per_s": self.plan.bound_bytes_per_s,
            "jobs": loop.traffic.jobs_done,
            "slices": loop.traffic.slices_done,
            "tuning": self._tuner.stats() if self._tuner is not None else {},
            "strangers_dropped": loop.mesh.strangers if loop.mesh is not None else 0,
            "links": [
                {
                    "peer": link.peer,
                    "channel": link.channel,
                    "kind": link.kind,
                    "bytes_sent": link.bytes_sent,
                    "bytes_received": link.bytes_received,
                }
                for link in self.links
            ],
        }

    def abandon(self) -> None:
        """In a forked child: the engine belongs to the parent, whose death must be seen by its peers."""
        self._closed = True
        self._loop.abandon()

    def close(self, wait: bool = True) -> None:
        """Say goodbye and end the thread.  Never hangs: bounded by a few seconds; ``wait=False``: returns at once."""
        if not self._closed:
            self._closed = True
            self._loop.call(self._loop.begin_close)
        if not wait or self._ended:
            return
        self._ended = True
        closed(self)
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
        if self.timeline is not None:
            self.timeline.write()


def auto_slice_bytes(bytes_per_s: float, in_place: bool) -> int:
    """The slice size to start with, in bytes.

    A slice costs one slice time per hop at the start and the end of a step, so it should be short; and it costs some
    hundred microseconds of interpreter on its way, so a fast network needs it larger.

    Parameters
    ----------
    bytes_per_s : the plan's rate; 0: unknown
    in_place : all peers read from memory
    """
    if in_place:
        return _REFERENCE_SLICE_BYTES
    if bytes_per_s == 0.0:
        return P3_SLICE_NUMEL * 4
    return int(min(max(bytes_per_s * _SLICE_S, _FIRST_SLICE_BYTES), _LARGEST_SLICE_BYTES))


def fresh(error: CommError) -> CommError:
    """A new exception of the same kind, so that tracebacks of several raises don't pile up on one object."""
    return type(error)(*error.args)


def _by_tree(plan: Plan, rank: int) -> tuple[TreeRoute | None, ...]:
    table: list[TreeRoute | None] = [None] * len(plan.pairs)
    for route in plan.routes(rank):
        table[route.tree] = route
    return tuple(table)
