"""Keeps the workers' commit counts equal and tells each when to commit.

Where in the flow: workers' reports and losses -> ``handle`` -> ``Direct`` commands back to the workers; ``search`` picks the
rate at the end of each check period. ``adacomm`` is the other scheduler.

Invariants: at a checkpoint every live worker is aimed at the same cumulative count; a worker that left is neither
counted nor aimed at; one that joins late starts at the others' target.

Source: ADSP (AAAI 2020), the scheduler: interval = check period / (target - own commits).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from commhooks.core.commit.losses import LossLog, LossMean
from commhooks.core.commit.policy import Directive, check_positive
from commhooks.core.commit.search import RateSearch, Window
from commhooks.errors import InternalError


@dataclass(frozen=True)
class WorkerJoined:
    """A worker starts, for the first time or again; its commit count begins at zero."""

    worker: int


@dataclass(frozen=True)
class WorkerLeft:
    """A worker finished, died or was declared lost."""

    worker: int


@dataclass(frozen=True)
class WorkerReport:
    """A worker's counters: commits answered, steps taken, seconds per step, seconds per commit."""

    worker: int
    commits: int
    step: int
    step_s: float
    overhead_s: float


@dataclass(frozen=True)
class LossReport:
    """Mean of ``count`` losses of one worker around now."""

    worker: int
    loss: float
    count: int


@dataclass(frozen=True)
class Tick:
    """Time has passed; due at ``wake_s``."""


SchedulerEvent = WorkerJoined | WorkerLeft | WorkerReport | LossReport | Tick


@dataclass(frozen=True)
class Direct:
    """Send ``directive`` to ``worker``."""

    worker: int
    directive: Directive
    reason: str


@dataclass(frozen=True)
class SaveModel:
    """All shards keep a copy of their values."""


@dataclass(frozen=True)
class RestoreModel:
    """All shards go back to their copy."""

    generation: int


SchedulerCommand = Direct | SaveModel | RestoreModel


@dataclass(frozen=True)
class PeriodRecord:
    """One check period as the statistics show it. ``spread``: largest minus smallest commit count at its end."""

    start_s: float
    end_s: float
    rate: float
    reward: float | None
    next_rate: float
    reason: str
    spread: float


class Scheduler(Protocol):
    """Events in, commands out; ``wake_s`` says when the next ``Tick`` is due (infinite: never)."""

    @property
    def wake_s(self) -> float: ...

    @property
    def history(self) -> tuple[PeriodRecord, ...]: ...

    def handle(self, event: SchedulerEvent, now_s: float) -> tuple[SchedulerCommand, ...]: ...

    def validate(self) -> None: ...


class IdleScheduler:
    """For policies that need no directions (bsp, ssp, fixed)."""

    wake_s = float("inf")
    history: tuple[PeriodRecord, ...] = ()

    def handle(self, event: SchedulerEvent, now_s: float) -> tuple[SchedulerCommand, ...]:
        return ()

    def validate(self) -> None:
        return None


@dataclass
class _Worker:
    counted_from: float
    commits: int = 0
    overhead_s: float = 0.0
    step_s: float = 0.0
    interval_s: float = 0.0

    @property
    def count(self) -> float:
        return self.counted_from + self.commits


class CommitScheduler:
    """ADSP's scheduler.

    Parameters
    ----------
    check_period_s : float
        Seconds between two checkpoints.
    search : RateSearch
        Chooses the rate.
    shortest : float
        No worker is told to commit more often than every ``shortest`` check periods, however far behind it is.
    """

    def __init__(self, check_period_s: float, search: RateSearch, shortest: float = 1 / 64) -> None:
        check_positive("check period", check_period_s, "seconds")
        self._period_s = check_period_s
        self._search = search
        self._shortest_s = shortest * check_period_s
        self._losses = LossLog(keep_s=3.0 * check_period_s)
        self._workers: dict[int, _Worker] = {}
        self._start_s: float | None = None
        self._rate = search.first_rate
        self._target = 0.0
        self._number = 0
        self._history: list[PeriodRecord] = []

    @property
    def wake_s(self) -> float:
        """End of the present check period."""
        return float("inf") if self._start_s is None else self._start_s + self._period_s

    @property
    def rate(self) -> float:
        """Commits per check period, at present."""
        return self._rate

    @property
    def history(self) -> tuple[PeriodRecord, ...]:
        """All closed check periods."""
        return tuple(self._history)

    @property
    def counts(self) -> dict[int, float]:
        """Commits of each live worker, a late joiner's counted from the target it joined at."""
        return {w: s.count for w, s in sorted(self._workers.items())}

    def handle(self, event: SchedulerEvent, now_s: float) -> tuple[SchedulerCommand, ...]:
        """Take one event; return directives that are due now, by worker."""
        match event:
            case WorkerJoined(worker):
                return self._join(worker, now_s)
            case WorkerLeft(worker):
                self._workers.pop(worker, None)
            case WorkerReport():
                self._note(event)
            case LossReport(_, loss, count):
                if count > 0 and loss == loss:
                    self._losses.add(LossMean(now_s, loss, count))
            case Tick():
                pass
        return self._close(now_s) if now_s >= self.wake_s else ()

    def validate(self) -> None:
        """Raise InternalError if an invariant is broken."""
        for worker, state in self._workers.items():
            if state.interval_s < self._shortest_s:
                raise InternalError(
                    f"worker {worker}: interval {state.interval_s} s below {self._shortest_s} s"
                )
            if state.counted_from > self._target:
                raise InternalError(
                    f"worker {worker} is counted from {state.counted_from}, target {self._target}"
                )

    def _join(self, worker: int, now_s: float) -> tuple[SchedulerCommand, ...]:
        if self._start_s is None:
            self._start_s, self._target = now_s, self._rate
        # Of this period only the rest is left: a late joiner owes that share of the period's commits.
        left = max(self._start_s + self._period_s - now_s, 0.0) / self._period_s
        self._workers[worker] = _Worker(counted_from=self._target - self._rate * left)
        self._number += 1
        return (self._aim(worker, self._period_s / self._rate, f"joined at {self._rate:.3g} per period"),)

    def _note(self, report: WorkerReport) -> None:
        state = self._workers.get(report.worker)
        if state is not None:
            state.commits, state.overhead_s, state.step_s = report.commits, report.overhead_s, report.step_s

    def _close(self, now_s: float) -> tuple[SchedulerCommand, ...]:
        if not self._workers or self._start_s is None:
            self._start_s = now_s
            return ()
        counts = [s.count for s in self._workers.values()]
        window = Window(self._start_s, now_s, self._rate, self._losses, self._commit_s(), self._slowest_s())
        choice = self._search.after(window)
        self._history.append(
            PeriodRecord(
                start_s=self._start_s,
                end_s=now_s,
                rate=self._rate,
                reward=choice.reward,
                next_rate=choice.rate,
                reason=choice.reason,
                spread=max(counts) - min(counts),
            )
        )
        self._rate = choice.rate
        self._target = max(self._target, max(counts)) + self._rate
        self._start_s = now_s
        self._number += 1
        return tuple(self._aim(w, self._period_s / self._owed(s), choice.reason) for w, s in self._sorted())

    def _owed(self, state: _Worker) -> float:
        """Commits from here to the target; one that is ahead still commits, at half the rate."""
        return max(self._target - state.count, self._rate / 2.0)

    def _sorted(self) -> list[tuple[int, _Worker]]:
        return sorted(self._workers.items())

    def _aim(self, worker: int, interval_s: float, reason: str) -> Direct:
        state = self._workers[worker]
        state.interval_s = max(interval_s, self._shortest_s)
        return Direct(worker, Directive(number=self._number, interval_s=state.interval_s), reason)

    def _commit_s(self) -> float:
        return max((s.overhead_s for s in self._workers.values()), default=0.0)

    def _slowest_s(self) -> float:
        return max((s.step_s for s in self._workers.values()), default=0.0)
