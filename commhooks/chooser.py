"""`schedule=auto`: times both ways over real steps and switches to the faster, on all ranks at the same step.

Where in the flow: ddp asks it before every bucket; `core.choice` decides.

Invariants: every rank asks for every step; the verdict is one tiny all-reduce over the engine, at one agreed step.
"""

from __future__ import annotations

import logging
import time

import torch

from commhooks.core.choice import Choice, Trial, Way, verdict
from commhooks.core.slicing import Segment
from commhooks.engine import Engine
from commhooks.jobs import JobKey

log = logging.getLogger(__name__)


class Chooser:
    """The way of each step of one model.

    Parameters
    ----------
    choice : decided already; None: a trial decides
    """

    def __init__(self, engine: Engine, choice: Choice | None) -> None:
        self._engine = engine
        self._trial = Trial() if choice is None else None
        self._stream = engine.new_stream() if choice is None else -1
        self._began_s = 0.0
        self._step = -1
        self.choice = (
            choice if choice is not None else Choice(Way.TREES, "on trial against the native collective")
        )

    @property
    def chose_trees(self) -> bool:
        """Whether the choice stands and is for trees; becomes true on all ranks at the same step."""
        return self._trial is None and self.choice.way is Way.TREES

    def way(self, step: int) -> Way:
        """Of the bucket that is to be reduced now; called for every bucket, in order of steps."""
        trial = self._trial
        if trial is None:
            return self.choice.way
        if step != self._step:
            self._step = step
            self._began_s = time.monotonic()
            if step >= trial.length:
                self._decide(trial)
                return self.choice.way
        return trial.way(step)

    def ended(self) -> None:
        """Every bucket of the step is reduced."""
        if self._trial is not None and self._step >= 0:
            self._trial.record(self._step, time.monotonic() - self._began_s)

    def _decide(self, trial: Trial) -> None:
        sums = torch.tensor(trial.figures(), dtype=torch.float64)
        layout = self._engine.layout([Segment(sums.numel(), 0, 0)], sums.element_size())
        self._engine.wait(self._engine.start_job(JobKey(self._stream, 0, 0), sums, layout))
        self._trial = None
        self.choice = verdict(sums.tolist())
        if self._engine.rank == 0:
            log.info("commhooks: schedule=auto chose %s: %s", self.choice.way.value, self.choice.reason)
