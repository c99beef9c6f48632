"""ADACOMM: synchronous local SGD whose number of local steps shrinks as the loss falls.

Where in the flow: the other ``Scheduler``; its directives carry ``steps`` for ``CommitBySteps``.

First it tries each number of local steps for a while and goes back to the same parameters after each (rollback); the one
whose loss fell most becomes tau0. Then, every period: ``tau' = sqrt(l/l0) tau0``; ``ceil(tau')`` where that is
smaller, half of tau otherwise.

Source: Wang & Joshi, ADACOMM, in the form that ADSP (AAAI 2020) was compared with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from commhooks.core.commit.losses import LossLog, LossMean
from commhooks.core.commit.policy import Directive, check_positive
from commhooks.core.commit.scheduler import (
    Direct,
    LossReport,
    PeriodRecord,
    RestoreModel,
    SaveModel,
    SchedulerCommand,
    SchedulerEvent,
    Tick,
    WorkerJoined,
    WorkerLeft,
    WorkerReport,
)
from commhooks.errors import InternalError

TRIALS = (1, 5, 10, 20, 40, 60, 80, 100)


@dataclass(frozen=True)
class _Trial:
    steps: int
    drop: float


class AdacommScheduler:
    """Parameters: see the module.

    Parameters
    ----------
    check_period_s : float
        Seconds between two adaptations.
    first_steps : int or None
        tau0; None: tried out.
    trial_s : float or None
        Seconds per trial; None: one check period.
    """

    def __init__(
        self,
        check_period_s: float,
        first_steps: int | None = None,
        trial_s: float | None = None,
        trials: tuple[int, ...] = TRIALS,
    ) -> None:
        check_positive("check period", check_period_s, "seconds")
        self._period_s = check_period_s
        self._trial_s = check_period_s if trial_s is None else trial_s
        check_positive("trial length", self._trial_s, "seconds")
        self._untried = list(trials) if first_steps is None else []
        self._tried: list[_Trial] = []
        self._steps = self._untried[0] if first_steps is None else first_steps
        self._first_steps = self._steps
        self._first_loss: float | None = None
        self._losses = LossLog(keep_s=2.0 * max(check_period_s, self._trial_s))
        self._workers: set[int] = set()
        self._start_s: float | None = None
        self._generation = 0
        self._number = 0
        self._history: list[PeriodRecord] = []

    @property
    def wake_s(self) -> float:
        """End of the present trial or period."""
        if self._start_s is None:
            return math.inf
        return self._start_s + (self._trial_s if self._untried else self._period_s)

    @property
    def steps(self) -> int:
        """Local steps between two commits, at present."""
        return self._steps

    @property
    def history(self) -> tuple[PeriodRecord, ...]:
        """All trials and periods so far; ``rate`` is the number of local steps."""
        return tuple(self._history)

    def handle(self, event: SchedulerEvent, now_s: float) -> tuple[SchedulerCommand, ...]:
        """Take one event; return the directives (and saves or rollbacks) that are due now."""
        match event:
            case WorkerJoined(worker):
                return self._join(worker, now_s)
            case WorkerLeft(worker):
                self._workers.discard(worker)
            case LossReport(_, loss, count):
                if count > 0 and loss == loss:
                    self._losses.add(LossMean(now_s, loss, count))
            case WorkerReport() | Tick():
                pass
        return self._close(now_s) if now_s >= self.wake_s and self._workers else ()

    def validate(self) -> None:
        """Raise InternalError if an invariant is broken."""
        if self._steps < 1:
            raise InternalError(f"{self._steps} local steps between commits")

    def _join(self, worker: int, now_s: float) -> tuple[SchedulerCommand, ...]:
        first = self._start_s is None
        if first:
            self._start_s = now_s
        self._workers.add(worker)
        self._number += 1
        direct = Direct(worker, Directive(self._number, steps=self._steps), "joined")
        return (SaveModel(), direct) if first and self._untried else (direct,)

    def _close(self, now_s: float) -> tuple[SchedulerCommand, ...]:
        assert self._start_s is not None
        before, reason = self._steps, ""
        rollback: tuple[SchedulerCommand, ...] = ()
        if self._untried:
            rollback, reason = self._end_trial(now_s)
        else:
            reason = self._adapt(now_s)
        record = PeriodRecord(self._start_s, now_s, before, None, self._steps, reason, 0.0)
        self._history.append(record)
        self._start_s = now_s
        self._number += 1
        directive = Directive(self._number, steps=self._steps)
        return rollback + tuple(Direct(w, directive, reason) for w in sorted(self._workers))

    def _end_trial(self, now_s: float) -> tuple[tuple[SchedulerCommand, ...], str]:
        assert self._start_s is not None
        part = (now_s - self._start_s) / 4.0
        first = self._losses.between(self._start_s, self._start_s + part)
        last = self._losses.between(now_s - part, now_s + 1e-9)
        drop = first.loss - last.loss if first is not None and last is not None else -math.inf
        self._tried.append(_Trial(self._untried.pop(0), drop))
        self._generation += 1
        restore = (RestoreModel(self._generation),)
        if self._untried:
            self._steps = self._untried[0]
            return restore, f"{self._tried[-1].steps} steps: loss fell by {drop:.4g}; try {self._steps}"
        best = max(self._tried, key=lambda t: (t.drop, -t.steps))
        self._steps = self._first_steps = best.steps
        self._first_loss = first.loss if first is not None else None
        return restore, f"{best.steps} local steps lowered the loss most ({best.drop:.4g})"

    def _adapt(self, now_s: float) -> str:
        assert self._start_s is not None
        now = self._losses.between(now_s - self._period_s / 4.0, now_s + 1e-9)
        if now is None:
            return "no losses reported: steps stay"
        if self._first_loss is None:
            self._first_loss = now.loss
            return f"first loss {now.loss:.4g}"
        wanted = math.sqrt(max(now.loss, 0.0) / self._first_loss) * self._first_steps
        shrunk = math.ceil(wanted) if wanted < self._steps else math.ceil(self._steps / 2)
        self._steps = max(1, shrunk)
        return (
            f"loss {now.loss:.4g} of {self._first_loss:.4g}: {wanted:.3g} steps wanted, {self._steps} taken"
        )
