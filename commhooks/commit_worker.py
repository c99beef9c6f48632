"""One rank as ADSP's worker: after each step it may commit, and takes in what the shards have answered.

Where in the flow: the optimizer's step hook (training thread) -> **commit_worker** -> messages -> parameter_server; answers
come back in the network thread, are kept, and are written into the model by the training thread between two steps.

Invariants: only the training thread touches the model; local progress since a commit was sent is kept when its answer
arrives (``W = answer + (W_now - W_at_commit)``); a commit is resent after a reconnect with the same number, so it is added
once.

Source: ADSP (AAAI 2020), the worker; overlapping a commit with training is ours.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from commhooks.commit_messages import (
    AnswerHead,
    BufferMean,
    Control,
    Direction,
    Done,
    Gone,
    Hello,
    Numbers,
    PushHead,
    Stop,
    Tags,
    pack_control,
)
from commhooks.core.commit.placement import CommitSlice
from commhooks.core.commit.policy import WorkerPolicy
from commhooks.core.commit.server import FINAL
from commhooks.core.commit.update import Array
from commhooks.core.commit.worker import Answered, Commit, Directed, StepDone, WorkerCore
from commhooks.errors import CommError, CommTimeout, PeerLost
from commhooks.flat_parameters import FlatParameters
from commhooks.messengers import Messenger
from commhooks.parameter_server import ServerLayout

POLL_S = 0.5
"""How often a waiting worker looks whether the network itself has failed."""


@dataclass(frozen=True)
class WorkerSettings:
    """Who this worker is, and its limits. ``report_every_s``: how often counters and losses go to the scheduler."""

    rank: int
    incarnation: int
    report_every_s: float
    timeout_s: float


class _Inbox:
    """What the network thread leaves for the training thread."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.answers: dict[int, tuple[AnswerHead, Array | None]] = {}
        self.arrived_s = 0.0
        self.directions: list[Direction] = []
        self.mean: Array | None = None
        self.failure: CommError | None = None
        self.stop: str | None = None


class CommitWorker:
    """One worker's commits.

    Parameters
    ----------
    messenger, tags, layout : as for the parameter server
    slices : how the parameters are cut
    parameters : the model's
    policy : when to commit
    settings : who this is
    """

    def __init__(
        self,
        messenger: Messenger,
        tags: Tags,
        layout: ServerLayout,
        slices: Sequence[CommitSlice],
        parameters: FlatParameters,
        policy: WorkerPolicy,
        settings: WorkerSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._messenger = messenger
        self._tags = tags
        self._layout = layout
        self._slices = slices
        self._spans = [parameters.span(piece) for piece in slices]
        self._parameters = parameters
        self._settings = settings
        self._clock = clock
        self._inbox = _Inbox()
        self._start_s = clock()
        self._step_began_s = self._start_s
        self._ended_s: float | None = None
        self._core = WorkerCore(policy, self._start_s)
        self._base = np.zeros(0, np.float32)
        self._at_commit = self._base_at_commit = self._base
        self._pull = True
        self._commit: Commit | None = None
        self._outstanding: set[int] = set()
        self._heads: list[AnswerHead] = []
        self._loss_sum = 0.0
        self._loss_count = 0
        self._reported_s = self._start_s
        self._bytes = 0
        messenger.on_message(tags.answer, self._on_answer)
        messenger.on_loss(self._on_loss)

    # -- training thread ---------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Say hello to all shards and take the model from them.  Blocks until it is here."""
        hello = pack_control(Hello(self._settings.rank, self._settings.incarnation))
        self._base = self._parameters.read()
        self._at_commit = self._base
        self._outstanding = set(range(len(self._slices)))
        self._tell({*self._layout.servers}, hello)
        self._wait_for_answers(0, "the model, at the start")
        self.restart_clock()

    def restart_clock(self) -> None:
        """The statistics' time and the first step begin now."""
        self._start_s = self._step_began_s = self._reported_s = self._clock()

    def after_step(self) -> None:
        """The optimizer has stepped: commit if it is time, take in answers, go on.  Blocks only for own commits."""
        now_s = self._clock()
        self._raise_if_failed()
        self._take_directions(now_s)
        self._take_answers()
        command = self._core.handle(StepDone(now_s - self._step_began_s), now_s)
        if isinstance(command, Commit):
            self._send(command)
            if command.block:
                self._wait_for_answers(command.sequence, f"the answer to its commit {command.sequence}")
        self._report_if_due(self._clock())
        self._step_began_s = self._clock()

    def report_loss(self, loss: float) -> None:
        """Note a loss for the rate search."""
        self._loss_sum += loss
        self._loss_count += 1

    def flush(self) -> None:
        """Wait until no commit is under way."""
        if self._commit is not None:
            self._wait_for_answers(self._commit.sequence, f"the answer to its commit {self._commit.sequence}")

    def finish(self, buffers: Array | None = None) -> Array | None:
        """Commit what is left, wait until all live workers have, and take the final model.  Blocks.

        Parameters
        ----------
        buffers : this rank's floating-point buffers, flat

        Returns
        -------
        Their mean over all workers that finished, if any were given.
        """
        self._raise_if_failed()
        self.flush()
        if self._core.numbers.step and np.any(self._parameters.read() != self._base):
            self._send(self._core.commit_now(self._clock(), "the last one"), pull=False)
            self.flush()
        self._ended_s = self._clock()
        self._report(self._ended_s)
        self._outstanding = set(range(len(self._slices)))
        self._heads = []
        done = pack_control(Done(self._settings.rank, self._settings.incarnation))
        self._tell({*self._layout.servers}, done, buffers)
        self._wait_for_answers(
            FINAL, "the final model, which the last worker to finish completes", limited=False
        )
        return self._wait_for_mean() if buffers is not None and buffers.size else None

    def _wait_for_mean(self) -> Array:
        while True:
            failure = self._inbox.failure
            if self._inbox.mean is not None:
                return self._inbox.mean
            self._raise(failure)
            with self._inbox.changed:
                self._inbox.changed.wait_for(
                    lambda: self._inbox.mean is not None or self._inbox.failure, timeout=POLL_S
                )

    def resend(self) -> None:
        """After a reconnect: send again what has not been answered."""
        if self._commit is not None:
            delta = self._at_commit - self._base_at_commit
            for i in sorted(self._outstanding):
                self._push_slice(self._commit, i, delta)

    @property
    def stop_reason(self) -> str | None:
        """Why training should stop, if someone said so."""
        return self._inbox.stop

    @property
    def seen_model(self) -> Array:
        """The global model as it was when this worker last took it in (mixed, while an answer is arriving)."""
        return self._base.copy()

    def stats(self) -> dict[str, Any]:
        """Counters of this worker."""
        numbers = self._core.numbers
        elapsed_s = (self._ended_s or self._clock()) - self._start_s
        directive = self._core.directive
        return {
            "steps": numbers.step,
            "commits": numbers.commits,
            "commit_s": numbers.overhead_s,
            "step_s": numbers.step_s,
            "compute_s": numbers.compute_s,
            "elapsed_s": elapsed_s,
            "waiting_share": max(0.0, 1.0 - numbers.compute_s / elapsed_s) if elapsed_s > 0 else 0.0,
            "bytes": self._bytes,
            "commit_interval_s": directive.interval_s,
            "local_steps": directive.steps,
        }

    def _send(self, commit: Commit, pull: bool | None = None) -> None:
        self._at_commit = self._parameters.read()
        delta = self._at_commit - self._base
        self._base_at_commit = self._base
        self._commit = commit
        self._pull = commit.pull if pull is None else pull
        self._outstanding = set(range(len(self._slices)))
        self._heads = []
        self._bytes += delta.nbytes
        # In one go from the network thread: each send from here would hand it the interpreter in between.
        self._messenger.run_soon(lambda: self._push_all(commit, delta))

    def _push_all(self, commit: Commit, delta: Array) -> None:
        for i in range(len(self._slices)):
            self._push_slice(commit, i, delta)

    def _push_slice(self, commit: Commit, i: int, delta: Array) -> None:
        head = PushHead(
            worker=self._settings.rank,
            incarnation=self._settings.incarnation,
            sequence=commit.sequence,
            slice_id=i,
            step=commit.step,
            generation=commit.generation,
            pull=self._pull,
        )
        start, end = self._spans[i]
        body = memoryview(delta[start:end]).cast("B")
        self._messenger.send(
            self._layout.holders[i], self._tags.push, head.pack(), body, (commit.sequence, i, 0)
        )

    def _wait_for_answers(self, sequence: int, what: str, limited: bool = True) -> None:
        """Until every slice of ``sequence`` is taken in; looks regularly whether the network has failed."""
        began_s = self._clock()
        while True:
            # Read before the answers are taken: a holder that answered everything and left has failed nobody.
            failure = self._inbox.failure
            self._take_answers(sequence)
            if not self._outstanding:
                return
            self._raise(failure)
            with self._inbox.changed:
                self._inbox.changed.wait_for(
                    lambda: self._inbox.answers or self._inbox.failure, timeout=POLL_S
                )
            if limited and self._clock() - began_s > self._settings.timeout_s:
                holders = sorted({self._layout.holders[i] for i in self._outstanding})
                raise CommTimeout(
                    f"rank {self._settings.rank} has waited {self._clock() - began_s:.1f} s for {what} "
                    f"({len(self._outstanding)} slices from ranks {holders}; limit {self._settings.timeout_s:g} s, "
                    "COMMHOOKS_TIMEOUT_S)"
                )

    def _take_answers(self, expected: int | None = None) -> None:
        """Write into the model what has arrived."""
        if not self._inbox.answers:
            return
        with self._inbox.changed:
            arrived, self._inbox.answers = self._inbox.answers, {}
        if expected is None:
            expected = self._commit.sequence if self._commit is not None else -1
        fresh = {
            i: (h, v) for i, (h, v) in arrived.items() if h.sequence == expected and i in self._outstanding
        }
        if not fresh:
            return
        now = self._parameters.read()
        for i in sorted(fresh):
            self._take_slice(i, *fresh[i], now)
        if not self._outstanding and self._commit is not None and expected == self._commit.sequence:
            self._conclude()

    def _take_slice(self, i: int, head: AnswerHead, values: Array | None, now: Array) -> None:
        start, end = self._spans[i]
        self._outstanding.discard(i)
        self._heads.append(head)
        if self._base is self._base_at_commit:
            self._base = self._base.copy()  # the old one is still needed to resend
        if values is None:
            self._base[start:end] = self._at_commit[start:end]
            return
        self._bytes += values.nbytes
        self._base[start:end] = values
        moved = now[start:end] - self._at_commit[start:end] if head.sequence not in (0, FINAL) else None
        # Without local progress the values are taken as they are, so that all ranks of a barrier agree to the bit.
        if moved is not None and np.any(moved):
            values = values + moved
        self._parameters.write(self._slices[i], values)

    def _conclude(self) -> None:
        assert self._commit is not None
        pulled = [h for h in self._heads if h.pull]
        answered = Answered(
            sequence=self._commit.sequence,
            slowest_step=min(h.slowest_step for h in pulled) if pulled else None,
            generation=min((h.generation for h in pulled), default=0),
        )
        self._commit = None
        # An overlapped commit took until its answer came, not until a step's end made it visible.
        self._core.handle(answered, self._clock() if self._core.blocked else self._inbox.arrived_s)

    def _take_directions(self, now_s: float) -> None:
        if self._inbox.directions:
            with self._inbox.changed:
                directions, self._inbox.directions = self._inbox.directions, []
            for direction in directions:
                self._core.handle(Directed(direction.directive), now_s)

    def _report_if_due(self, now_s: float) -> None:
        if now_s - self._reported_s >= self._settings.report_every_s:
            self._report(now_s)

    def _report(self, now_s: float) -> None:
        self._reported_s = now_s
        n = self._core.numbers
        message = Numbers(
            worker=self._settings.rank,
            commits=n.commits,
            step=n.step,
            step_s=n.step_s,
            overhead_s=n.overhead_s,
            waited_s=n.waited_s,
            compute_s=n.compute_s,
            loss=self._loss_sum / self._loss_count if self._loss_count else 0.0,
            losses=self._loss_count,
        )
        self._loss_sum, self._loss_count = 0.0, 0
        self._tell({self._layout.scheduler}, pack_control(message))

    def _tell(self, ranks: set[int], text: bytes, array: Array | None = None) -> None:
        body = memoryview(array).cast("B") if array is not None and array.size else None
        for rank in sorted(ranks):
            self._messenger.send(rank, self._tags.control, text, body, key=(0, 0, 0))

    def _raise_if_failed(self) -> None:
        self._raise(self._inbox.failure)

    def _raise(self, failure: CommError | None) -> None:
        if failure is not None:
            raise type(failure)(*failure.args)
        self._messenger.raise_if_failed()

    # -- network thread ----------------------------------------------------------------------------------------------

    def on_control(self, message: Control, body: memoryview) -> None:
        """A control message that may be for this worker."""
        if isinstance(message, Direction):
            with self._inbox.changed:
                self._inbox.directions.append(message)
        elif isinstance(message, Gone):
            if message.worker in self._layout.servers:
                self._holder_lost(message.worker, message.words)
        elif isinstance(message, BufferMean):
            with self._inbox.changed:
                self._inbox.mean = np.frombuffer(bytes(body), np.float32)
                self._inbox.changed.notify_all()
        elif isinstance(message, Stop):
            self._inbox.stop = message.reason

    def _on_answer(self, peer: int, text: bytes, body: memoryview) -> None:
        head = AnswerHead.unpack(text)
        if head.incarnation != self._settings.incarnation:
            return
        values = np.frombuffer(bytes(body), np.float32) if head.pull else None
        with self._inbox.changed:
            self._inbox.answers[head.slice_id] = (head, values)
            self._inbox.arrived_s = self._clock()
            self._inbox.changed.notify_all()

    def _on_loss(self, peer: int, words: str) -> None:
        if peer in self._layout.servers:
            self._holder_lost(peer, words)
            # The others may hear of our own end before they hear of the rank that caused it.
            self._tell(
                set(self._layout.servers) - {peer, self._settings.rank}, pack_control(Gone(peer, words))
            )

    def _holder_lost(self, peer: int, words: str) -> None:
        held = len(self._layout.held_by(peer))
        with self._inbox.changed:
            self._inbox.failure = self._inbox.failure or PeerLost(
                f"{words}; it held {held} of {len(self._slices)} slices of the parameters (the parameter server), so no worker "
                "can go on. Restart the job; with COMMHOOKS_COMMIT_CHECKPOINT it goes on from the last saved shards"
            )
            self._inbox.changed.notify_all()
