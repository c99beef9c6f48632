"""The server's side: the slices of parameters that one rank holds, and exactly-once addition of commits to them.

Where in the flow: a commit's slices arrive -> ``Push`` events -> ``ShardCore`` adds U/M and says which commits to answer;
the shell sends the answers with the slice's current values.

Invariants
    * a commit's slice is added exactly once: sequence numbers rise by one per worker and slice; a repeated push (after a
      reconnect) is answered again and not added again; a gap is an error and changes nothing.
    * slices are independent: each is added, gated and answered by itself, so the front layers can come back first.
    * only live workers are waited for; a worker that leaves takes back nothing it has committed.
    * pushes of an older life of a worker (incarnation) or from before a rollback (generation) are never added.

Source: ADSP (AAAI 2020), the parameter server; the barriers of its baselines are ``policy`` gates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from commhooks.core.commit.policy import CommitProgress, ReplyGate
from commhooks.core.commit.update import Accumulators, Array, UpdateRule
from commhooks.errors import InternalError, ProtocolError


@dataclass(frozen=True)
class Push:
    """One slice of commit ``sequence``; ``delta`` is U for that slice, ``step`` the worker's step count."""

    worker: int
    incarnation: int
    sequence: int
    slice_id: int
    step: int
    delta: Array
    pull: bool = True
    generation: int = 0


@dataclass(frozen=True)
class Join:
    """A worker starts (again): everything that an older incarnation still sends is dropped from now on."""

    worker: int
    incarnation: int = 0


@dataclass(frozen=True)
class Leave:
    """A worker finished, died or was declared lost."""

    worker: int
    reason: str = "left"


@dataclass(frozen=True)
class Finish:
    """A worker has made its last commit: nobody waits for it any more, it still counts in M.

    When every live worker has finished, all of them are sent the final values.
    """

    worker: int
    incarnation: int = 0


@dataclass(frozen=True)
class Save:
    """Keep a copy of all values, for ``Restore`` (ADACOMM's trials)."""


@dataclass(frozen=True)
class Restore:
    """Go back to the saved values; pushes of generations below ``generation`` are answered but not added."""

    generation: int


ServerEvent = Push | Join | Leave | Finish | Save | Restore

FINAL = (1 << 32) - 1
"""The ``sequence`` of the answer that ends a worker's run."""


@dataclass(frozen=True)
class Answer:
    """Send slice ``slice_id``'s current values (``pull``) or a bare acknowledgement to ``worker``.

    ``sequence`` 0 answers a join, ``FINAL`` a finish. ``slowest_step`` is what SSP's workers compare themselves with;
    ``generation`` goes back to the server with the commit that is built on these values.
    """

    worker: int
    incarnation: int
    sequence: int
    slice_id: int
    pull: bool
    slowest_step: int
    generation: int
    reason: str


@dataclass(frozen=True)
class Dropped:
    """A push was not added and needs no answer; counted in the statistics."""

    worker: int
    slice_id: int
    reason: str


ServerCommand = Answer | Dropped


@dataclass
class _Member:
    incarnation: int
    first_round: int
    first_step: int


@dataclass
class _Slice:
    value: Array
    kept: Accumulators = field(default_factory=Accumulators)
    applied: dict[int, int] = field(default_factory=dict)
    rounds: dict[int, int] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, Push] = field(default_factory=dict)
    saved: Array | None = None


class ShardCore:
    """Values and membership of one shard.

    Parameters
    ----------
    values : mapping of slice id to 1-D float32 array
        Initial parameters; copied.
    rule : UpdateRule
    gate : ReplyGate
        When a commit is answered.
    """

    def __init__(self, values: Mapping[int, Array], rule: UpdateRule, gate: ReplyGate) -> None:
        self._slices = {i: _Slice(np.array(v, dtype=np.float32)) for i, v in sorted(values.items())}
        self._rule = rule
        self._gate = gate
        self._members: dict[int, _Member] = {}
        self._finished: dict[int, int] = {}
        self._incarnations: dict[int, int] = {}
        self._generation = 0
        self._added = 0

    @property
    def slice_ids(self) -> tuple[int, ...]:
        """Slices held here, ascending."""
        return tuple(self._slices)

    @property
    def members(self) -> tuple[int, ...]:
        """Live workers that still train, ascending."""
        return tuple(sorted(self._members))

    @property
    def divisor(self) -> int:
        """M: live workers, finished ones included."""
        return len(self._members) + len(self._finished)

    @property
    def generation(self) -> int:
        """Number of rollbacks so far."""
        return self._generation

    @property
    def slices_added(self) -> int:
        """Slices of commits added so far, over all workers."""
        return self._added

    def value(self, slice_id: int) -> Array:
        """The slice's current values, not a copy: read it before the next event."""
        return self._slices[slice_id].value

    def commits(self, worker: int) -> int:
        """Commits of ``worker``'s present life that have been added in all slices held here."""
        return min((s.applied.get(worker, 0) for s in self._slices.values()), default=0)

    def handle(self, event: ServerEvent) -> tuple[ServerCommand, ...]:
        """Take one event; return the answers that are due now, in order.

        Raises
        ------
        ProtocolError
            A push from a worker that never joined, of an unknown slice, of a wrong size, or with a gap in its
            sequence; nothing is changed.
        """
        match event:
            case Push():
                return self._push(event)
            case Join(worker, incarnation):
                return self._join(worker, incarnation)
            case Leave(worker, _):
                return self._leave(worker)
            case Finish(worker, incarnation):
                return self._finish(worker, incarnation)
            case Save():
                for held in self._slices.values():
                    held.saved = held.value.copy()
                return ()
            case Restore(generation):
                return self._restore(generation)

    def validate(self) -> None:
        """Raise InternalError if an invariant is broken."""
        live = set(self._members)
        for slice_id, held in self._slices.items():
            if not set(held.rounds) == set(held.steps) == set(held.applied) == live:
                raise InternalError(
                    f"slice {slice_id}: bookkeeping of {sorted(held.rounds)}, live are {sorted(live)}"
                )
            if not set(held.waiting) <= live:
                raise InternalError(
                    f"slice {slice_id}: workers {sorted(held.waiting)} wait, live are {sorted(live)}"
                )
            for worker, push in held.waiting.items():
                if held.applied[worker] != push.sequence:
                    raise InternalError(
                        f"slice {slice_id}: worker {worker} waits for {push.sequence}, "
                        f"{held.applied[worker]} added"
                    )

    def _push(self, push: Push) -> tuple[ServerCommand, ...]:
        member = self._members.get(push.worker)
        if member is None or push.incarnation < member.incarnation:
            if push.worker not in self._incarnations:
                raise ProtocolError(f"commit {push.sequence} from worker {push.worker}, which never joined")
            return (Dropped(push.worker, push.slice_id, "the worker's earlier life"),)
        held = self._checked_slice(push)
        done = held.applied[push.worker]
        if push.sequence == done + 1:
            self._add(held, push, member)
        elif push.sequence < done or push.sequence <= 0:
            return (
                Dropped(push.worker, push.slice_id, f"commit {push.sequence} was answered, {done} is newer"),
            )
        elif push.sequence > done + 1:
            raise ProtocolError(
                f"worker {push.worker} slice {push.slice_id}: commit {push.sequence} after {done}, "
                f"expected {done + 1}"
            )
        held.waiting[push.worker] = push
        return self._due(push.slice_id, held)

    def _checked_slice(self, push: Push) -> _Slice:
        held = self._slices.get(push.slice_id)
        if held is None:
            raise ProtocolError(
                f"worker {push.worker}: slice {push.slice_id} isn't held here, {len(self._slices)} are"
            )
        if push.delta.shape != held.value.shape:
            raise ProtocolError(
                f"worker {push.worker} slice {push.slice_id}: {push.delta.size} elements, "
                f"expected {held.value.size}"
            )
        return held

    def _add(self, held: _Slice, push: Push, member: _Member) -> None:
        if push.generation >= self._generation:
            self._rule.apply(held.value, push.delta, self.divisor, held.kept)
            self._added += 1
        held.applied[push.worker] = push.sequence
        held.rounds[push.worker] = member.first_round + push.sequence
        held.steps[push.worker] = member.first_step + push.step

    def _due(self, slice_id: int, held: _Slice) -> tuple[ServerCommand, ...]:
        """Answers that the gate lets through now; a bare acknowledgement never waits."""
        answers = []
        slowest = min(held.steps.values(), default=0)
        for worker, push in sorted(held.waiting.items()):
            verdict = self._gate(CommitProgress(worker, held.rounds, held.steps)) if push.pull else None
            if verdict is not None and not verdict.open:
                continue
            reason = verdict.reason if verdict is not None else "push only"
            # A worker counts its own steps from 0 in each life; the slowest is told on that same count.
            relative = slowest - self._members[worker].first_step
            answers.append(
                Answer(
                    worker=worker,
                    incarnation=push.incarnation,
                    sequence=push.sequence,
                    slice_id=slice_id,
                    pull=push.pull,
                    slowest_step=relative,
                    generation=self._generation,
                    reason=reason,
                )
            )
        for answer in answers:
            del held.waiting[answer.worker]
        return tuple(answers)

    def _all_due(self) -> tuple[ServerCommand, ...]:
        return tuple(command for i, held in self._slices.items() for command in self._due(i, held))

    def _join(self, worker: int, incarnation: int) -> tuple[ServerCommand, ...]:
        if incarnation < self._incarnations.get(worker, 0):
            return (
                Dropped(worker, -1, f"join of life {incarnation}, {self._incarnations[worker]} is newer"),
            )
        left = self._leave(worker)
        self._incarnations[worker] = incarnation
        first_round = max((r for s in self._slices.values() for r in s.rounds.values()), default=0)
        first_step = min((n for s in self._slices.values() for n in s.steps.values()), default=0)
        self._members[worker] = _Member(incarnation, first_round, first_step)
        for held in self._slices.values():
            held.applied[worker], held.rounds[worker], held.steps[worker] = 0, first_round, first_step
        welcome = tuple(
            Answer(worker, incarnation, 0, i, True, 0, self._generation, "joined") for i in self._slices
        )
        return left + welcome

    def _leave(self, worker: int) -> tuple[ServerCommand, ...]:
        self._finished.pop(worker, None)
        if self._members.pop(worker, None) is not None:
            self._forget(worker)
        return self._all_due() + self._final()

    def _forget(self, worker: int) -> None:
        for held in self._slices.values():
            for book in (held.applied, held.rounds, held.steps, held.waiting):
                book.pop(worker, None)  # type: ignore[attr-defined]

    def _finish(self, worker: int, incarnation: int) -> tuple[ServerCommand, ...]:
        member = self._members.get(worker)
        if member is None or member.incarnation != incarnation:
            return (Dropped(worker, -1, f"finish of life {incarnation}, which isn't training"),)
        del self._members[worker]
        self._finished[worker] = incarnation
        self._forget(worker)
        return self._all_due() + self._final()

    def _final(self) -> tuple[ServerCommand, ...]:
        if self._members:
            return ()
        finished, self._finished = sorted(self._finished.items()), {}
        return tuple(
            Answer(w, life, FINAL, i, True, 0, self._generation, "all have finished")
            for w, life in finished
            for i in self._slices
        )

    def _restore(self, generation: int) -> tuple[ServerCommand, ...]:
        if any(held.saved is None for held in self._slices.values()):
            raise InternalError("restore without a saved copy")
        self._generation = max(self._generation, generation)
        for held in self._slices.values():
            held.value[:] = held.saved
            held.kept = Accumulators()
        return ()
