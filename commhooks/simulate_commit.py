"""Trains for real in virtual time: commit policies on workers of any speed, exactly repeatable.

Where in the flow: the same ``core.commit`` machines as in a real job; the network is a delay, a step a known number of
seconds, the model a numpy problem (``bench.digits``).

Invariants: no clock and no thread; every number follows from the arguments. Events at one time are taken in the order in
which they were caused.

Model of the network: an exchange of the whole model costs ``exchange_s`` for a worker, half of it up, half down (shards over
all ranks: no worker's exchange slows another's), plus ``delay_s`` per direction.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from commhooks.core.commit.catalog import CommitOptions, CommitPolicy, make_policy
from commhooks.core.commit.policy import check_positive
from commhooks.core.commit.scheduler import (
    Direct,
    LossReport,
    PeriodRecord,
    RestoreModel,
    SaveModel,
    SchedulerEvent,
    Tick,
    WorkerJoined,
    WorkerLeft,
    WorkerReport,
)
from commhooks.core.commit.server import Answer, Join, Leave, Push, Restore, Save, ServerCommand, ShardCore
from commhooks.core.commit.worker import Answered, Commit, Directed, StepDone, WorkerCore
from commhooks.errors import ConfigError

Array = NDArray[np.float32]

REPORTS_PER_PERIOD = 24
"""A worker reports its losses at least this often per check period."""


class Problem(Protocol):
    """What is trained: a flat float32 vector, stochastic gradients, and a held-out evaluation."""

    def initial(self, seed: int) -> Array: ...

    def gradient(self, w: Array, rng: np.random.Generator) -> tuple[float, Array]: ...

    def evaluate(self, w: Array) -> tuple[float, float]: ...


@dataclass(frozen=True)
class Cluster:
    """Workers and their network. ``step_s``: seconds per step of each worker; ``leave_s``: when a worker dies."""

    step_s: tuple[float, ...]
    exchange_s: float
    delay_s: float = 0.0
    leave_s: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if not self.step_s:
            raise ConfigError("a cluster needs at least one worker")
        check_positive("seconds per step", min(self.step_s))
        if self.exchange_s < 0 or self.delay_s < 0:
            raise ConfigError(f"exchange and delay must be >= 0 s, got {self.exchange_s} and {self.delay_s}")


@dataclass(frozen=True)
class Training:
    """How it is trained and until when.

    The held-out loss is looked at after every ``evaluate_every_steps`` steps of all workers together, not by time: a
    loss is noisy, and whoever looks more often per progress meets the target sooner.
    """

    learning_rate: float = 0.2
    target_loss: float = 0.15
    seed: int = 0
    evaluate_every_steps: int = 21
    longest_s: float = 20_000.0


@dataclass(frozen=True)
class Outcome:
    """One run. ``time_s`` is None where the target was not reached; ``waiting_share`` is all time not computing."""

    policy: str
    time_s: float | None
    end_s: float
    steps: int
    commits: tuple[int, ...]
    waiting_share: float
    exchanges: int
    loss: float
    accuracy: float
    losses: tuple[tuple[float, float], ...]
    history: tuple[PeriodRecord, ...]


@dataclass
class _Worker:
    core: WorkerCore
    w: Array
    base: Array
    at_commit: Array
    rng: np.random.Generator
    alive: bool = True
    loss_sum: float = 0.0
    loss_count: int = 0
    reported_s: float = 0.0


def simulate(
    policy: str, cluster: Cluster, problem: Problem, training: Training, options: CommitOptions | None = None
) -> Outcome:
    """Train under ``policy`` until the held-out loss is at the target, or time is up.

    Complexity: one gradient per simulated step; one vector copy per commit.
    """
    run = _Run(make_policy(policy, options), cluster, problem, training, options or CommitOptions())
    return run.until_target()


@dataclass(order=True)
class _Due:
    time_s: float
    order: int
    action: Callable[[float], None] = field(compare=False)


class _Run:
    def __init__(
        self,
        policy: CommitPolicy,
        cluster: Cluster,
        problem: Problem,
        training: Training,
        options: CommitOptions,
    ) -> None:
        self._policy, self._cluster, self._problem, self._training = policy, cluster, problem, training
        self._report_every_s = options.check_period_s / REPORTS_PER_PERIOD
        self._due: list[_Due] = []
        self._order = 0
        self._exchanges = 0
        self._steps = 0
        self._reached_s: float | None = None
        self._losses: list[tuple[float, float]] = []
        self._seen = (float("inf"), 0.0)
        start = problem.initial(training.seed)
        self._server = ShardCore({0: start}, policy.update, policy.gate)
        self._workers = [self._worker(i, start) for i in range(len(cluster.step_s))]

    def until_target(self) -> Outcome:
        """Run the events in order of time."""
        for rank in range(len(self._workers)):
            self._server.handle(Join(rank))
            self._to_scheduler(WorkerJoined(rank), 0.0)
            self._start_step(rank, 0.0)
        for rank, when_s in self._cluster.leave_s:
            self._at(when_s, lambda now, r=rank: self._leave(r, now))  # type: ignore[misc]
        now = 0.0
        while self._due and self._reached_s is None and now <= self._training.longest_s:
            due = heapq.heappop(self._due)
            now = due.time_s
            while self._policy.scheduler.wake_s <= now:
                self._to_scheduler(Tick(), self._policy.scheduler.wake_s)
            due.action(now)
        return self._outcome(now)

    def _worker(self, rank: int, start: Array) -> _Worker:
        return _Worker(
            core=WorkerCore(self._policy.worker, 0.0),
            w=start.copy(),
            base=start.copy(),
            at_commit=start.copy(),
            rng=np.random.default_rng((self._training.seed, rank)),
        )

    def _at(self, time_s: float, action: Callable[[float], None]) -> None:
        self._order += 1
        heapq.heappush(self._due, _Due(time_s, self._order, action))

    def _start_step(self, rank: int, now_s: float) -> None:
        self._at(now_s + self._cluster.step_s[rank], lambda now: self._step(rank, now))

    def _step(self, rank: int, now_s: float) -> None:
        worker = self._workers[rank]
        if not worker.alive:
            return
        loss, gradient = self._problem.gradient(worker.w, worker.rng)
        worker.w -= np.float32(self._training.learning_rate) * gradient
        self._report(rank, loss, now_s)
        self._steps += 1
        if self._steps % self._training.evaluate_every_steps == 0:
            self._evaluate(now_s)
        command = worker.core.handle(StepDone(self._cluster.step_s[rank]), now_s)
        if isinstance(command, Commit):
            self._send(rank, command, now_s)
        if not worker.core.blocked:
            self._start_step(rank, now_s)

    def _report(self, rank: int, loss: float, now_s: float) -> None:
        worker = self._workers[rank]
        worker.loss_sum += loss
        worker.loss_count += 1
        if now_s - worker.reported_s >= self._report_every_s:
            report = LossReport(rank, worker.loss_sum / worker.loss_count, worker.loss_count)
            worker.loss_sum, worker.loss_count, worker.reported_s = 0.0, 0, now_s
            self._to_scheduler(report, now_s)

    def _send(self, rank: int, commit: Commit, now_s: float) -> None:
        worker = self._workers[rank]
        worker.at_commit = worker.w.copy()
        push = Push(
            worker=rank,
            incarnation=0,
            sequence=commit.sequence,
            slice_id=0,
            step=commit.step,
            delta=worker.w - worker.base,
            pull=commit.pull,
            generation=commit.generation,
        )
        self._exchanges += 1 + commit.pull
        self._at(now_s + self._one_way_s(), lambda now: self._arrive(push, now))

    def _one_way_s(self) -> float:
        return self._cluster.exchange_s / 2.0 + self._cluster.delay_s

    def _arrive(self, push: Push, now_s: float) -> None:
        self._answer(self._server.handle(push), now_s)

    def _answer(self, commands: Sequence[ServerCommand], now_s: float) -> None:
        for command in commands:
            if isinstance(command, Answer) and command.sequence > 0:
                values = self._server.value(0).copy() if command.pull else None
                back_s = self._one_way_s() if command.pull else self._cluster.delay_s
                self._at(now_s + back_s, lambda now, c=command, v=values: self._take(c, v, now))  # type: ignore[misc]

    def _take(self, answer: Answer, values: Array | None, now_s: float) -> None:
        worker = self._workers[answer.worker]
        if not worker.alive:
            return
        if values is None:
            worker.base = worker.at_commit
        else:
            worker.w = values + (worker.w - worker.at_commit)
            worker.base = values
        waited = worker.core.blocked
        slowest = answer.slowest_step if answer.pull else None
        worker.core.handle(Answered(answer.sequence, slowest, answer.generation), now_s)
        numbers = worker.core.numbers
        report = WorkerReport(
            answer.worker, numbers.commits, numbers.step, numbers.step_s, numbers.overhead_s
        )
        self._to_scheduler(report, now_s)
        if waited:
            self._start_step(answer.worker, now_s)

    def _to_scheduler(self, event: SchedulerEvent, now_s: float) -> None:
        for command in self._policy.scheduler.handle(event, now_s):
            match command:
                case Direct(worker, directive, _):
                    self._workers[worker].core.handle(Directed(directive), now_s)
                case SaveModel():
                    self._server.handle(Save())
                case RestoreModel(generation):
                    self._server.handle(Restore(generation))

    def _leave(self, rank: int, now_s: float) -> None:
        self._workers[rank].alive = False
        self._to_scheduler(WorkerLeft(rank), now_s)
        self._answer(self._server.handle(Leave(rank, "died")), now_s)

    def _evaluate(self, now_s: float) -> None:
        self._seen = self._problem.evaluate(self._server.value(0))
        self._losses.append((now_s, self._seen[0]))
        if self._seen[0] <= self._training.target_loss:
            self._reached_s = now_s

    def _outcome(self, now_s: float) -> Outcome:
        numbers = [w.core.numbers for w in self._workers]
        total_s = max(now_s, 1e-9) * len(self._workers)
        return Outcome(
            policy=self._policy.name,
            time_s=self._reached_s,
            end_s=now_s,
            steps=sum(n.step for n in numbers),
            commits=tuple(n.commits for n in numbers),
            waiting_share=1.0 - sum(n.compute_s for n in numbers) / total_s,
            exchanges=self._exchanges,
            loss=self._seen[0],
            accuracy=self._seen[1],
            losses=tuple(self._losses),
            history=self._policy.scheduler.history,
        )
