"""One worker's side of ADSP: counts steps and commits, asks its policy, numbers its commits.

Where in the flow: the shell's step hook -> ``WorkerCore.handle`` -> ``Commit`` command -> the shell sends the slices of
``W_now - W_base`` to the shards and hands the answer back as ``Answered``.

Invariants: at most one commit is under way; commit numbers rise by one; a worker that waits is told to train again by
exactly one event (``Answered``).  An event that can't be is an error and changes nothing.

Source: ADSP (AAAI 2020), the worker's loop.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from commhooks.core.commit.policy import Action, Directive, Verdict, WorkerPolicy, WorkerView
from commhooks.errors import InternalError

OVERHEAD_SAMPLES = 10
"""Commits whose mean duration is the overhead O; the published re-implementation averages ten."""


@dataclass(frozen=True)
class StepDone:
    """The optimizer has stepped; ``compute_s`` is what the step itself took."""

    compute_s: float


@dataclass(frozen=True)
class Answered:
    """Every shard has answered commit ``sequence``.

    ``slowest_step``: the slowest live worker's step if the answer carried parameters, else None (SSP's worker learns
    it only when it pulls). ``generation``: the server's, of the parameters that came back.
    """

    sequence: int
    slowest_step: int | None = None
    generation: int = 0


@dataclass(frozen=True)
class Directed:
    """The scheduler's directive arrived."""

    directive: Directive


WorkerEvent = StepDone | Answered | Directed


@dataclass(frozen=True)
class Train:
    """Take the next step."""

    reason: str


@dataclass(frozen=True)
class Commit:
    """Send ``W_now - W_base`` as commit ``sequence``; ``block``: take the next step only after ``Answered``."""

    sequence: int
    step: int
    steps: int
    generation: int
    pull: bool
    block: bool
    reason: str


@dataclass(frozen=True)
class KeepWaiting:
    """Nothing changes: the worker still waits for its commit's answer."""

    reason: str


WorkerCommand = Train | Commit | KeepWaiting


@dataclass(frozen=True)
class WorkerNumbers:
    """What the statistics and the scheduler read. ``waited_s`` is the time not computing because of own commits."""

    step: int
    commits: int
    overhead_s: float
    compute_s: float
    waited_s: float
    step_s: float


class WorkerCore:
    """Commit decisions of one worker.

    Parameters
    ----------
    policy : WorkerPolicy
        When to commit.
    now_s : float
        Start of training on any clock that never goes back.
    """

    def __init__(self, policy: WorkerPolicy, now_s: float) -> None:
        self._policy = policy
        self._step = 0
        self._committed_step = 0
        self._answered = 0
        self._sequence = 0
        self._sent_s = now_s
        self._last_commit_s = now_s
        self._blocked = False
        self._overheads: deque[float] = deque(maxlen=OVERHEAD_SAMPLES)
        self._directive = Directive()
        self._slowest = 0
        self._generation = 0
        self._compute_s = 0.0
        self._waited_s = 0.0
        self._recent_steps: deque[float] = deque(maxlen=20)

    @property
    def blocked(self) -> bool:
        """True between a blocking commit and its answer."""
        return self._blocked

    @property
    def in_flight(self) -> bool:
        """True while a commit has not been answered."""
        return self._answered < self._sequence

    @property
    def directive(self) -> Directive:
        """The newest directive seen."""
        return self._directive

    @property
    def numbers(self) -> WorkerNumbers:
        """Counters so far."""
        recent = self._recent_steps
        return WorkerNumbers(
            step=self._step,
            commits=self._answered,
            overhead_s=self._overhead_s(),
            compute_s=self._compute_s,
            waited_s=self._waited_s,
            step_s=sum(recent) / len(recent) if recent else 0.0,
        )

    def handle(self, event: WorkerEvent, now_s: float) -> WorkerCommand:
        """Take one event, return what to do now.

        Raises
        ------
        InternalError
            A step while a blocking commit is unanswered, or an answer that nobody waits for.
        """
        match event:
            case StepDone(compute_s):
                return self._step_done(compute_s, now_s)
            case Answered():
                return self._take_answer(event, now_s)
            case Directed(directive):
                if directive.number >= self._directive.number:
                    self._directive = directive
                return self._unchanged("directive noted")

    def commit_now(self, now_s: float, reason: str) -> Commit:
        """A blocking commit that no policy asked for: the last one of a run, or a checkpoint's.

        Raises
        ------
        InternalError
            A commit is still under way: wait for its answer first.
        """
        if self.in_flight:
            raise InternalError(
                f"commit {self._sequence} is still unanswered; a new one ({reason}) must wait for it"
            )
        return self._start(Verdict(Action.COMMIT, reason), now_s)

    def validate(self) -> None:
        """Raise InternalError if an invariant is broken."""
        if not self._sequence - 1 <= self._answered <= self._sequence:
            raise InternalError(
                f"{self._sequence} commits sent but {self._answered} answered: more than one under way"
            )
        if self._blocked and not self.in_flight:
            raise InternalError("worker waits although no commit is under way")
        if not 0 <= self._committed_step <= self._step:
            raise InternalError(f"committed up to step {self._committed_step} of {self._step}")

    def _step_done(self, compute_s: float, now_s: float) -> WorkerCommand:
        if self._blocked:
            raise InternalError(
                f"step {self._step + 1} was taken while commit {self._sequence} is unanswered"
            )
        self._step += 1
        self._compute_s += compute_s
        self._recent_steps.append(compute_s)
        verdict = self._policy(now_s, self._view())
        if verdict.action is Action.TRAIN:
            return Train(verdict.reason)
        return self._start(verdict, now_s)

    def _start(self, verdict: Verdict, now_s: float) -> Commit:
        self._sequence += 1
        steps = self._step - self._committed_step
        self._committed_step = self._step
        self._sent_s = now_s
        self._blocked = verdict.block
        if not verdict.block:
            self._last_commit_s = now_s
        return Commit(
            sequence=self._sequence,
            step=self._step,
            steps=steps,
            generation=self._generation,
            pull=verdict.pull,
            block=verdict.block,
            reason=verdict.reason,
        )

    def _take_answer(self, answer: Answered, now_s: float) -> WorkerCommand:
        sequence = answer.sequence
        if not self.in_flight or sequence != self._sequence:
            raise InternalError(
                f"answer to commit {sequence}, but {self._sequence} sent and {self._answered} answered"
            )
        self._answered = sequence
        if answer.slowest_step is not None:
            self._slowest, self._generation = answer.slowest_step, answer.generation
        took_s = now_s - self._sent_s
        self._overheads.append(took_s)
        if not self._blocked:
            return Train("answer of an overlapped commit taken in")
        self._blocked = False
        self._waited_s += took_s
        self._last_commit_s = now_s
        return Train(f"commit {sequence} answered after {took_s:.4g} s")

    def _unchanged(self, reason: str) -> WorkerCommand:
        return KeepWaiting(reason) if self._blocked else Train(reason)

    def _overhead_s(self) -> float:
        return sum(self._overheads) / len(self._overheads) if self._overheads else 0.0

    def _view(self) -> WorkerView:
        return WorkerView(
            step=self._step,
            steps_since_commit=self._step - self._committed_step,
            last_commit_s=self._last_commit_s,
            overhead_s=self._overhead_s(),
            in_flight=self.in_flight,
            slowest_step=self._slowest,
            directive=self._directive,
        )
