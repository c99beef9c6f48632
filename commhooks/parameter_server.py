"""The parameter server inside the job: this rank's shard of the parameters, and (on one rank) the scheduler.

Where in the flow: commit_worker -> messages -> **parameter_server** -> ``core.commit.server`` / ``scheduler`` -> answers and
directives back.

Invariants: everything here happens in the network thread of this rank, so the cores need no lock; the shell decides nothing:
it turns messages into events and commands into messages; a lost worker becomes a ``Leave``, a lost shard holder everyone's
error.

Source: ADSP (AAAI 2020), parameter server and scheduler.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from commhooks.commit_checkpoint import ShardFile
from commhooks.commit_messages import (
    AnswerHead,
    BufferMean,
    Control,
    Direction,
    Done,
    GoBack,
    Gone,
    Hello,
    Keep,
    Numbers,
    PushHead,
    Tags,
    pack_control,
    unpack_control,
)
from commhooks.core.commit.catalog import CommitPolicy
from commhooks.core.commit.scheduler import (
    Direct,
    LossReport,
    RestoreModel,
    SaveModel,
    SchedulerEvent,
    Tick,
    WorkerJoined,
    WorkerLeft,
    WorkerReport,
)
from commhooks.core.commit.server import (
    Answer,
    Finish,
    Join,
    Leave,
    Push,
    Restore,
    Save,
    ServerCommand,
    ShardCore,
)
from commhooks.core.commit.theory import batch_sizes, heterogeneity, implicit_momentum
from commhooks.core.commit.update import Array
from commhooks.messengers import Messenger

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerLayout:
    """Who holds what; equal on all ranks. The scheduler is on the lowest rank that holds something."""

    world_size: int
    holders: tuple[int, ...]

    @property
    def servers(self) -> tuple[int, ...]:
        """Ranks that hold a slice, ascending."""
        return tuple(sorted(set(self.holders)))

    @property
    def scheduler(self) -> int:
        """The scheduler's rank."""
        return self.servers[0]

    def held_by(self, rank: int) -> tuple[int, ...]:
        """Slices that ``rank`` holds."""
        return tuple(i for i, holder in enumerate(self.holders) if holder == rank)


class ParameterServer:
    """One rank's part of the parameter server.

    Parameters
    ----------
    messenger : this rank's
    tags : of this model
    layout : who holds what
    values : initial parameters of the slices held here
    policy : its gate, update rule and (on the scheduler's rank) scheduler
    check_period_s : how often a checkpoint is written
    checkpoint : where this shard is saved; None: nowhere
    """

    def __init__(
        self,
        messenger: Messenger,
        tags: Tags,
        layout: ServerLayout,
        values: Mapping[int, Array],
        policy: CommitPolicy,
        check_period_s: float,
        checkpoint: ShardFile | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._messenger = messenger
        self._tags = tags
        self._layout = layout
        self._core = ShardCore(values, policy.update, policy.gate)
        self._scheduler = _SchedulerHost(messenger, tags, layout, policy, clock) if self._schedules else None
        self._checkpoint = checkpoint
        self._check_period_s = check_period_s
        self._saved_s = clock()
        self._clock = clock
        self._dropped = 0
        self._buffers = _Buffers()
        self._order = 0
        messenger.on_message(tags.push, self._on_push)
        messenger.on_loss(self._on_loss)

    @property
    def _schedules(self) -> bool:
        return self._messenger.rank == self._layout.scheduler

    def on_control(self, message: Control, body: memoryview) -> None:
        """A control message that isn't for the worker; network thread."""
        match message:
            case Hello(worker, incarnation):
                self._carry_out(self._core.handle(Join(worker, incarnation)))
            case Done(worker, incarnation):
                self._buffers.add(worker, body)
                self._carry_out(self._core.handle(Finish(worker, incarnation)))
                self._send_mean_if_over()
            case Gone(worker, words):
                self._carry_out(self._core.handle(Leave(worker, words)))
                self._send_mean_if_over()
            case Keep():
                self._carry_out(self._core.handle(Save()))
            case GoBack(generation):
                self._carry_out(self._core.handle(Restore(generation)))
        if self._scheduler is not None:
            self._scheduler.on_control(message)

    def snapshot(self) -> dict[int, Array]:
        """A copy of all values held here; network thread."""
        return {i: self._core.value(i).copy() for i in self._core.slice_ids}

    def commits(self) -> dict[int, int]:
        """Commits added in full, per live worker of this shard; network thread."""
        return {w: self._core.commits(w) for w in self._core.members}

    def stats(self) -> dict[str, Any]:
        """Counters; network thread."""
        shard = {
            "slices_held": len(self._core.slice_ids),
            "slices_added": self._core.slices_added,
            "dropped": self._dropped,
            "members": list(self._core.members),
            "commits": {str(w): n for w, n in self.commits().items()},
        }
        return {"shard": shard, "scheduler": self._scheduler.stats() if self._scheduler is not None else None}

    def _on_push(self, peer: int, text: bytes, body: memoryview) -> None:
        head = PushHead.unpack(text)
        delta = np.frombuffer(body, np.float32)
        event = Push(
            worker=head.worker,
            incarnation=head.incarnation,
            sequence=head.sequence,
            slice_id=head.slice_id,
            step=head.step,
            delta=delta,
            pull=head.pull,
            generation=head.generation,
        )
        # A waiting push keeps its event but only for the ids: the body's memory is the link's.
        self._carry_out(self._core.handle(event))
        self._save_if_due()

    def _carry_out(self, commands: Iterable[ServerCommand]) -> None:
        for command in commands:
            if isinstance(command, Answer):
                self._answer(command)
            else:
                self._dropped += 1
                log.debug("dropped worker %d slice %d: %s", command.worker, command.slice_id, command.reason)

    def _answer(self, answer: Answer) -> None:
        head = AnswerHead(
            incarnation=answer.incarnation,
            sequence=answer.sequence,
            slice_id=answer.slice_id,
            slowest_step=answer.slowest_step,
            pull=answer.pull,
            generation=answer.generation,
        )
        # A copy: the next commit may be added before the network has read this one.
        values = memoryview(self._core.value(answer.slice_id).copy()).cast("B") if answer.pull else None
        self._order += 1
        key = (answer.sequence, answer.slice_id, self._order)
        self._messenger.send(answer.worker, self._tags.answer, head.pack(), values, key)

    def _on_loss(self, peer: int, words: str) -> None:
        self._carry_out(self._core.handle(Leave(peer, words)))
        self._send_mean_if_over()
        if self._scheduler is not None:
            self._scheduler.lost(peer)
            for server in self._layout.servers:
                if server not in (self._messenger.rank, peer):
                    gone = pack_control(Gone(peer, words))
                    self._messenger.send(server, self._tags.control, gone, key=(0, 0, 0))

    def _send_mean_if_over(self) -> None:
        """Every live worker has finished: the buffers' mean, from the scheduler's rank."""
        if self._scheduler is None or self._core.divisor:
            return
        mean = self._buffers.mean()
        if mean is not None:
            text, body = pack_control(BufferMean()), memoryview(mean).cast("B")
            for worker in self._buffers.workers:
                self._messenger.send(worker, self._tags.control, text, body, (0, 0, 0))
        self._buffers = _Buffers()

    def _save_if_due(self) -> None:
        if self._checkpoint is None or self._clock() - self._saved_s < self._check_period_s:
            return
        self._saved_s = self._clock()
        values, file = self.snapshot(), self._checkpoint
        # Not here: a disk may be slow, and every worker waits for this thread.
        threading.Thread(target=file.save, args=(values,), name="commhooks-checkpoint").start()


class _Buffers:
    """The finished workers' buffers (BatchNorm's statistics) until all are there."""

    def __init__(self) -> None:
        self._held: dict[int, Array] = {}

    @property
    def workers(self) -> list[int]:
        return sorted(self._held)

    def add(self, worker: int, body: memoryview) -> None:
        if body.nbytes:
            self._held[worker] = np.frombuffer(bytes(body), np.float32)

    def mean(self) -> Array | None:
        return np.mean(list(self._held.values()), axis=0, dtype=np.float32) if self._held else None


class _SchedulerHost:
    """The scheduler and its messages."""

    def __init__(
        self,
        messenger: Messenger,
        tags: Tags,
        layout: ServerLayout,
        policy: CommitPolicy,
        clock: Callable[[], float],
    ) -> None:
        self._messenger = messenger
        self._tags = tags
        self._layout = layout
        self._core = policy.scheduler
        self._clock = clock
        self._start_s = clock()
        self._numbers: dict[int, Numbers] = {}
        self._left: list[int] = []
        self._logged = 0

    def on_control(self, message: Control) -> None:
        match message:
            case Hello(worker, _):
                self._handle(WorkerJoined(worker))
            case Done(worker, _):
                self._handle(WorkerLeft(worker))
            case Numbers():
                self._take(message)
            case _:
                pass

    def lost(self, worker: int) -> None:
        self._left.append(worker)
        self._handle(WorkerLeft(worker))

    def _take(self, n: Numbers) -> None:
        self._numbers[n.worker] = n
        self._handle(WorkerReport(n.worker, n.commits, n.step, n.step_s, n.overhead_s))
        if n.losses:
            self._handle(LossReport(n.worker, n.loss, n.losses))

    def _handle(self, event: SchedulerEvent) -> None:
        now_s = self._clock() - self._start_s
        for command in (*self._core.handle(Tick(), now_s), *self._core.handle(event, now_s)):
            match command:
                case Direct(worker, d, reason):
                    log.debug("worker %d: %s (%s)", worker, d, reason)
                    self._tell((worker,), Direction(d.number, d.interval_s, d.steps))
                case SaveModel():
                    self._tell(self._layout.servers, Keep())
                case RestoreModel(generation):
                    self._tell(self._layout.servers, GoBack(generation))

        self._log_new_windows()

    def _log_new_windows(self) -> None:
        for record in self._core.history[self._logged :]:
            self._logged += 1
            changed = record.next_rate != record.rate
            level = logging.INFO if changed or self._logged == 1 else logging.DEBUG
            log.log(
                level, "commhooks: commit rate %.4g -> %.4g: %s", record.rate, record.next_rate, record.reason
            )

    def _tell(self, ranks: Sequence[int], message: Control) -> None:
        text = pack_control(message)
        for rank in ranks:
            self._messenger.send(rank, self._tags.control, text, key=(0, 0, 0))

    def stats(self) -> dict[str, Any]:
        workers = {str(w): asdict(n) for w, n in sorted(self._numbers.items())}
        history = [asdict(record) for record in self._core.history]
        return {"workers": workers, "lost": self._left, "windows": history, **self._theory()}

    def _theory(self) -> dict[str, Any]:
        """Heterogeneity, and Theorem 1's momentum where commits go by a check period."""
        numbers = [n for _, n in sorted(self._numbers.items())]
        if not numbers or min(n.step_s for n in numbers) <= 0:
            return {}
        speeds = [1.0 / n.step_s for n in numbers]
        seen: dict[str, Any] = {"heterogeneity": heterogeneity(speeds)}
        # BatchTune's advice: samples in proportion to speed, of a hundred per worker.
        advice = batch_sizes(100 * len(speeds), [1.0 / v for v in speeds])
        seen["batch_advice"] = {str(w): share for w, share in zip(sorted(self._numbers), advice)}
        if self._core.history:
            last = self._core.history[-1]
            period_s = last.end_s - last.start_s
            seen["implicit_momentum"] = implicit_momentum(period_s, [last.next_rate] * len(speeds), speeds)
        return seen


ControlHandler = Callable[[Control, memoryview], None]


def control_handler(
    server: ParameterServer, worker: ControlHandler
) -> Callable[[int, bytes, memoryview], None]:
    """One handler for a rank's control messages: what is for its worker goes there, the rest to its server."""

    def handle(peer: int, text: bytes, body: memoryview) -> None:
        message = unpack_control(text)
        worker(message, body)
        server.on_control(message, body)

    return handle
