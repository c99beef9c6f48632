"""When a worker commits and when the server answers: each policy a pure function that also says why.

Where in the flow: ``worker`` asks a ``WorkerPolicy`` after every step; ``server`` asks a ``ReplyGate`` for every commit
that waits for its answer; ``scheduler`` changes the ``Directive`` that the worker's policy reads.

Invariants: a policy reads nothing but its arguments; it never blocks a worker by itself (a worker only ever waits for
the answer to its own commit, which the gate may hold back).

Source: ADSP (AAAI 2020) and the baselines it was compared with (BSP, SSP, ADACOMM).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from commhooks.errors import ConfigError


class Action(Enum):
    """What a worker does after a step."""

    TRAIN = "train"
    COMMIT = "commit"


@dataclass(frozen=True)
class Directive:
    """The scheduler's current wish for one worker; the highest number counts.

    ``interval_s`` is the time between two commits (their own cost included), ``steps`` the local steps between two
    commits; a policy reads the one it is made for.
    """

    number: int = 0
    interval_s: float | None = None
    steps: int | None = None


@dataclass(frozen=True)
class WorkerView:
    """What a worker's policy may look at.

    ``last_commit_s`` is when the last commit ended (blocking) or began (overlapping); ``overhead_s`` how long
    the last commits took.
    """

    step: int
    steps_since_commit: int
    last_commit_s: float
    overhead_s: float
    in_flight: bool
    slowest_step: int
    directive: Directive


@dataclass(frozen=True)
class Verdict:
    """The decision after a step. ``pull``: the answer carries parameters; ``block``: train on only after it."""

    action: Action
    reason: str
    pull: bool = True
    block: bool = True


class WorkerPolicy(Protocol):
    """``(now, view) -> verdict``."""

    def __call__(self, now_s: float, view: WorkerView) -> Verdict: ...


@dataclass(frozen=True)
class CommitByTimer:
    """ADSP: commit when ``elapsed >= interval - overhead``.

    ``overlap`` false is the published form: the worker waits for its own commit. True: it trains on, and because
    the commit costs no training time, the overhead is not subtracted.
    """

    overlap: bool = False

    def __call__(self, now_s: float, view: WorkerView) -> Verdict:
        interval_s = view.directive.interval_s
        if interval_s is None:
            return Verdict(Action.TRAIN, "no commit interval yet")
        if view.in_flight:
            return Verdict(Action.TRAIN, "the last commit still travels")
        wanted_s = interval_s if self.overlap else max(interval_s - view.overhead_s, 0.0)
        elapsed_s = now_s - view.last_commit_s
        if elapsed_s < wanted_s:
            return Verdict(Action.TRAIN, f"{elapsed_s:.4g} s of {wanted_s:.4g} s")
        return Verdict(Action.COMMIT, f"{elapsed_s:.4g} s >= {wanted_s:.4g} s", block=not self.overlap)


@dataclass(frozen=True)
class CommitBySteps:
    """Local SGD: commit after ``steps`` local steps (the directive's number, if it has one) and wait for the answer."""

    steps: int

    def __call__(self, now_s: float, view: WorkerView) -> Verdict:
        steps = self.steps if view.directive.steps is None else view.directive.steps
        if view.steps_since_commit < steps:
            return Verdict(Action.TRAIN, f"{view.steps_since_commit} of {steps} local steps")
        return Verdict(Action.COMMIT, f"{steps} local steps done")


@dataclass(frozen=True)
class CommitEveryStep:
    """SSP: push every step; pull (and wait, if the gate says so) only when ``staleness`` steps ahead."""

    staleness: int

    def __call__(self, now_s: float, view: WorkerView) -> Verdict:
        ahead = view.step - view.slowest_step
        pull = ahead >= self.staleness
        return Verdict(Action.COMMIT, f"{ahead} steps ahead of the slowest seen", pull=pull)


@dataclass(frozen=True)
class CommitProgress:
    """What a gate may look at: rounds (commits, counted from the join) and steps of every live worker."""

    worker: int
    rounds: Mapping[int, int]
    steps: Mapping[int, int]


@dataclass(frozen=True)
class GateVerdict:
    """Whether a waiting commit may be answered now, and why."""

    open: bool
    reason: str


class ReplyGate(Protocol):
    """``progress -> verdict``, asked again whenever a commit arrives or a worker joins or leaves."""

    def __call__(self, progress: CommitProgress) -> GateVerdict: ...


@dataclass(frozen=True)
class AnswerAtOnce:
    """ADSP: no barrier of any kind."""

    def __call__(self, progress: CommitProgress) -> GateVerdict:
        return GateVerdict(True, "no barrier")


@dataclass(frozen=True)
class AnswerWhenRoundComplete:
    """BSP and local SGD: when every live worker has committed as often."""

    def __call__(self, progress: CommitProgress) -> GateVerdict:
        mine = progress.rounds[progress.worker]
        behind = sorted(w for w, r in progress.rounds.items() if r < mine)
        if behind:
            return GateVerdict(False, f"round {mine} waits for workers {behind}")
        return GateVerdict(True, f"round {mine} complete")


@dataclass(frozen=True)
class AnswerWithinStaleness:
    """SSP: while fewer than ``staleness`` steps ahead of the slowest live worker."""

    staleness: int

    def __call__(self, progress: CommitProgress) -> GateVerdict:
        ahead = progress.steps[progress.worker] - min(progress.steps.values())
        return GateVerdict(ahead < self.staleness, f"{ahead} steps ahead, allowed < {self.staleness}")


def check_positive(name: str, value: float, unit: str = "") -> None:
    """Raise ConfigError unless ``value`` is a finite number above zero."""
    if not 0 < value < float("inf"):
        raise ConfigError(f"{name} must be above 0{unit and ' ' + unit}, got {value!r}")
