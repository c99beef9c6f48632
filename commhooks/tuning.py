"""While training: measures what links carry, finds the slice size, and switches plans when the network has changed.

Where in the flow: beside the engine; a registered model calls `step_begins` once per step, in its own thread.

Algorithm, every `WINDOW_STEPS` steps:
(1) each rank adds its figures to one small vector, all-reduced over the engine without waiting;
(2) one step later every rank reads the same sums, so every rank decides the same: the next slice size (`core.miad`),
    and whether the links contradict the topology (`core.replan`);
(3) if they do, rank 0 plans for the measured network in a thread of its own while training goes on;
(4) when its plan is ready, a flag in the next vector says so, and all ranks take the plan over at that same step: jobs
    under way end on the old trees, later ones use the new.

Invariants: no step is lost and no result changes but by the order of summation that comes with other trees; all decisions and
reasons are in `stats`.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from commhooks.core.miad import Miad
from commhooks.core.plan import Plan, make_plan
from commhooks.core.replan import Estimate, Flow, Monitor, worth_it
from commhooks.core.slicing import Segment
from commhooks.core.topology import Topology
from commhooks.errors import CommhooksError
from commhooks.jobs import Job, JobKey

if TYPE_CHECKING:
    from commhooks.engine import Engine

log = logging.getLogger(__name__)

WINDOW_STEPS = 5
_HEAD = 3  # busy seconds, bytes, rank 0's planning state
_LEAST_BUSY_S = 0.01  # per rank and window; below, nothing can be said


class Planning(enum.IntEnum):
    """Where rank 0 is with a new plan; travels in the vector."""

    IDLE = 0
    READY = 1
    NOT_WORTH = 2
    FAILED = 3


class Tuner:
    """Of one engine.

    Parameters
    ----------
    topology : what the plan was made for; None: unknown, so that nothing can contradict it
    replan : whether plans may be switched
    miad : the slice size's search, or None when it is fixed
    """

    def __init__(self, engine: Engine, topology: Topology | None, replan: bool, miad: Miad | None) -> None:
        self._engine = engine
        self._stream = engine.new_stream()
        self._monitor = Monitor(topology) if topology is not None and replan else None
        self._miad = miad
        self._calls = 0
        self._window = 0
        self._pending: tuple[Job, torch.Tensor] | None = None
        self._edges = directed_edges(engine.plan)
        self._seen = self._counters()
        self._estimate: Estimate | None = None
        self._state = Planning.IDLE
        self._new_plan: Plan | None = None
        self._model: int | None = None
        self.switches: list[str] = []
        self.reason = "watching the links" if self._monitor is not None else _why_not(topology, replan)

    @property
    def active(self) -> bool:
        """Whether there is anything to tune."""
        return self._monitor is not None or self._miad is not None

    def adopt_model(self, stream: int) -> None:
        """A model registers: with several on one engine there is no step that all of them could switch at."""
        if self._model is not None and self.active:
            self._monitor = self._miad = None
            self.reason = "several models share this engine: its plan and slice size stay as they are"
        self._model = stream

    def step_begins(self, stream: int) -> None:
        """The model's next step begins on this rank; may block for a moment when a plan is switched."""
        if not self.active or stream != self._model:
            return
        self._calls += 1
        if self._calls % WINDOW_STEPS == 0:
            self._submit()
        elif self._pending is not None:
            self._conclude()

    # -- (1) measuring ---------------------------------------------------------------------------------------------------

    def _counters(self) -> dict[Any, tuple[float, float]]:
        """Running (seconds, bytes) of this rank: of its jobs, and of each link's backlog."""
        counters: dict[Any, tuple[float, float]] = {"busy": self._engine.busy()}
        for link in self._engine.links:
            counters[link.peer, link.channel] = link.backlog()
        return counters

    def _submit(self) -> None:
        before, now = self._seen, self._counters()
        self._seen = now
        busy_s, busy_bytes = (new - old for new, old in zip(now["busy"], before["busy"], strict=True))
        vector = torch.zeros(_HEAD + 2 * len(self._edges), dtype=torch.float64)
        vector[0], vector[1] = busy_s, busy_bytes
        vector[2] = float(self._state) if self._engine.rank == 0 else 0.0
        for at, (src, dst, channel) in enumerate(self._edges):
            if src == self._engine.rank and busy_s >= _LEAST_BUSY_S:
                old = before.get((dst, channel), (0.0, 0.0))
                seconds, count = (a - b for a, b in zip(now.get((dst, channel), old), old, strict=True))
                vector[_HEAD + 2 * at] = count / seconds if seconds > 0 else 0.0
                vector[_HEAD + 2 * at + 1] = seconds / busy_s
        self._window += 1
        layout = self._engine.layout([Segment(vector.numel(), 0, 0)], vector.element_size())
        job = self._engine.start_job(JobKey(self._stream, self._window, 0), vector, layout)
        self._pending = (job, vector)

    # -- (2) deciding, alike on all ranks --------------------------------------------------------------------------------

    def _conclude(self) -> None:
        assert self._pending is not None
        job, vector = self._pending
        self._pending = None
        self._engine.wait(job)
        figures = vector.tolist()
        busy_s = figures[0] / self._engine.world_size
        state = Planning(int(figures[2]))
        if state is not Planning.IDLE:
            self._take_over(state)
            return
        if busy_s < _LEAST_BUSY_S:
            return
        if self._miad is not None and not self._miad.steady:
            decision = self._miad.window(figures[1] / figures[0])
            self._engine.set_slice_bytes(decision.slice_bytes)
        if self._monitor is not None and self._estimate is None:
            self._judge(figures)

    def _judge(self, figures: list[float]) -> None:
        flows = [
            Flow(src, dst, channel, figures[_HEAD + 2 * at], figures[_HEAD + 2 * at + 1])
            for at, (src, dst, channel) in enumerate(self._edges)
        ]
        assert self._monitor is not None
        verdict = self._monitor.window(flows)
        self.reason = verdict.reason
        if verdict.estimate is not None:
            self._estimate = verdict.estimate
            if self._engine.rank == 0:
                log.info("commhooks: the network has changed (%s); planning again", verdict.reason)
                threading.Thread(
                    target=self._plan, args=(verdict.estimate,), name="commhooks-plan", daemon=True
                ).start()

    # -- (3) planning, on rank 0, beside training ------------------------------------------------------------------------

    def _plan(self, measured: Estimate) -> None:
        try:
            plan = make_plan(measured.topology)
        except CommhooksError as error:
            log.warning("commhooks: planning again failed: %s", error)
            self._state = Planning.FAILED
            return
        worth, words = worth_it(self._engine.plan, plan, measured.topology)
        log.info("commhooks: %s", words)
        self._new_plan = plan
        self._state = Planning.READY if worth else Planning.NOT_WORTH

    # -- (4) switching, on all ranks at this step ------------------------------------------------------------------------

    def _take_over(self, state: Planning) -> None:
        measured, self._estimate = self._estimate, None
        self._state = Planning.IDLE
        assert measured is not None and self._monitor is not None
        self._monitor.accept(measured.topology)
        if state is not Planning.READY:
            self.reason = f"{measured.words}: the plan stays, {state.name.lower().replace('_', ' ')}"
            return
        began_s = time.monotonic()
        self._engine.switch_plan(self._new_plan)
        self._edges = directed_edges(self._engine.plan)
        self._seen = self._counters()
        if self._miad is not None:
            self._miad.restart()
        self.reason = f"switched: {measured.words}; now {self._engine.plan.reason}"
        self.switches.append(self.reason)
        if self._engine.rank == 0:
            log.info("commhooks: %s (took %.0f ms)", self.reason, (time.monotonic() - began_s) * 1e3)

    def stats(self) -> dict[str, object]:
        """Decisions and their reasons."""
        return {
            "replan": self.reason,
            "plan_switches": list(self.switches),
            "slice_bytes": self._miad.slice_bytes if self._miad is not None else None,
            "slice_decisions": [
                f"{decision.move.value}: {decision.reason}"
                for decision in (self._miad.history if self._miad else [])
            ],
        }


def _why_not(topology: Topology | None, replan: bool) -> str:
    if not replan:
        return "off (COMMHOOKS_REPLAN)"
    return "off: the network's capacities are not known (topology=uniform)" if topology is None else "off"


def directed_edges(plan: Plan) -> list[tuple[int, int, int]]:
    """Every (sender, receiver, channel) of a plan, in an order that is equal on all ranks."""
    edges: set[tuple[int, int, int]] = set()
    for rank in range(plan.world_size):
        for route in plan.routes(rank):
            for hop in route.broadcast_children:
                edges.add((rank, hop.rank, hop.channel))
            if route.reduce_parent is not None:
                edges.add((rank, route.reduce_parent.rank, route.reduce_parent.channel))
    return sorted(edges)
