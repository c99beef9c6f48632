"""One policy's training run on this rank: a CNN on digits, steps of a given length, and a record of the global model.

Where in the flow: ``bench converge`` -> **converge_run** -> ``commhooks.adsp`` (or torch's own DDP) -> record -> the time at
which the held-out loss was reached.

How the time is found: every rank notes the time of each of its steps and keeps copies of its part of the global model. After
the run the model is put together for looks at every ``STEPS_PER_LOOK`` steps of all ranks together, the same for all
policies (a loss is noisy: whoever looks more often per progress meets the target sooner), and rank 0 evaluates it.
Nothing of this travels while the run is timed.

Invariants: all ranks start from the same parameters; a step takes as long as asked for, the rest of it slept away.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commhooks import adsp
from commhooks.bench.digits import CHANNELS, Digits
from commhooks.config import Config
from commhooks.core.commit.catalog import CommitOptions
from commhooks.core.commit.update import Array
from commhooks.errors import CommhooksError
from commhooks.flat_parameters import FlatParameters, trainable
from commhooks.handle import Handle

STEPS_PER_LOOK = 21

ENOUGH = 0.9
"""A run goes on until rank 0 has seen the target times this, so that a look surely falls behind the target."""

PEERS = ("ddp", "postlocal")


@dataclass(frozen=True)
class Task:
    """What is trained, how, and until when.

    ``step_s``: of this rank. ``record_s``: between two copies of the global model.
    """

    digits: Digits
    batch: int
    learning_rate: float
    hidden: int
    target_loss: float
    step_s: float
    record_s: float
    longest_s: float
    seed: int


@dataclass(frozen=True)
class Record:
    """One rank's account of a run; times in seconds since the common start."""

    step_times: tuple[float, ...]
    copies: tuple[tuple[float, dict[int, Array]], ...]
    end_s: float
    computing_s: float
    commits: int
    nbytes: int
    late_steps: int
    stats: dict[str, Any]


def build_model(hidden: int, seed: int) -> torch.nn.Module:
    """Two convolutions and three linear layers for 8x8 images, He-scaled."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, CHANNELS[0], 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.AvgPool2d(2),
        torch.nn.Conv2d(*CHANNELS, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.AvgPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(4 * CHANNELS[1], hidden),
        torch.nn.ReLU(),
        torch.nn.Linear(hidden, hidden),
        torch.nn.ReLU(),
        torch.nn.Linear(hidden, 10),
    )
    # torch's own scale is smaller and starts on a plateau, which has little to do with how workers exchange.
    for layer in model:
        if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear):
            torch.nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            torch.nn.init.constant_(layer.bias, 0.0)  # type: ignore[arg-type]
    return model


class Batches:
    """Random mini-batches of the training digits, the same for a seed and rank."""

    def __init__(self, task: Task, rank: int) -> None:
        self._x = torch.from_numpy(task.digits.train_x).unsqueeze(1)
        self._y = torch.from_numpy(task.digits.train_y)
        self._batch = task.batch
        self._generator = torch.Generator().manual_seed(1000 * task.seed + rank)

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        picks = torch.randint(0, len(self._y), (self._batch,), generator=self._generator)
        return self._x[picks], self._y[picks]


class Evaluator:
    """Held-out loss and accuracy of parameters given as a flat vector."""

    def __init__(self, task: Task) -> None:
        self._model = build_model(task.hidden, 0)
        self._parameters = FlatParameters(trainable(self._model))
        self._x = torch.from_numpy(task.digits.test_x).unsqueeze(1)
        self._y = torch.from_numpy(task.digits.test_y)

    def __call__(self, flat: Array) -> tuple[float, float]:
        for piece in adsp.cut(self._parameters.numels, 1 << 30):
            start, end = self._parameters.span(piece)
            self._parameters.write(piece, flat[start:end])
        with torch.no_grad():
            logits = self._model(self._x)
            loss = torch.nn.functional.cross_entropy(logits, self._y)
        return float(loss), float((logits.argmax(1) == self._y).float().mean())


class Contender:
    """One policy on this rank, ready to train: a step function and access to its part of the global model."""

    def __init__(self, policy: str, task: Task, config: Config, options: CommitOptions) -> None:
        self.policy = policy
        self._rank = dist.get_rank()
        self._model = DistributedDataParallel(build_model(task.hidden, task.seed))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=task.learning_rate)
        self._batches = Batches(task, self._rank)
        self._parameters = FlatParameters(trainable(self._model.module))
        self._averager: Any = None
        self._stop = torch.zeros(1)
        self._handle: adsp.CommitHandle | None = None
        self._overslept_s = 0.0
        self._deadline_s = 0.0
        self._in_time = True
        if policy == "postlocal":
            self._use_averager(options.local_steps)
        elif policy != "ddp":
            # Before the commit's own hook, so that the optimizer's work belongs to the step.
            self._optimizer.register_step_post_hook(lambda *_: self._sleep())
            self._handle = adsp.register(self._model, self._optimizer, config, options)
        self._warm_up()

    def _warm_up(self) -> None:
        """One backward without a step: what torch sets up lazily belongs to no policy."""
        x, y = self._batches.next()
        torch.nn.functional.cross_entropy(self._model(x), y).backward()
        self._optimizer.zero_grad()

    def _use_averager(self, period: int) -> None:
        """PyTorch's post-local SGD, local from the first step."""
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

        self._model.register_comm_hook(None, adsp.local_hook)
        self._averager = PeriodicModelAverager(period=period, warmup_steps=0)

    @property
    def handle(self) -> Handle | None:
        return self._handle

    def step(self, step_s: float) -> bool:
        """One training step that takes ``step_s`` (the exchange not counted); False if it took longer."""
        began_s = time.monotonic() - self._overslept_s
        x, y = self._batches.next()
        self._optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self._model(x), y)
        self._deadline_s = began_s + step_s
        if self._handle is None:  # torch's exchange is inside backward or behind step: sleep before it
            self._sleep()
        loss.backward()
        if self._handle is not None:
            self._handle.report_loss(loss.item())
        self._optimizer.step()
        if self._averager is not None:
            self._averager.average_parameters(self._model.parameters())
        return self._in_time

    def _sleep(self) -> None:
        """What is left of the step."""
        left_s = self._deadline_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)
        # A sleep is always a little too long; the next step gets that back.
        self._overslept_s = max(0.0, time.monotonic() - self._deadline_s) if left_s > 0 else 0.0
        self._in_time = left_s > -1e-3

    def own_part(self) -> dict[int, Array]:
        """A copy of what this rank holds of the global model; for torch's peers rank 0 holds everything."""
        if self._handle is not None:
            committer = self._handle.committer
            part: dict[int, Array] = committer.on_server(committer.server.snapshot)
            return part
        return {-1: self._parameters.read()} if self._rank == 0 else {}

    def seen_model(self) -> Array:
        """The global model as this rank last saw it."""
        return (
            self._handle.committer.worker.seen_model if self._handle is not None else self._parameters.read()
        )

    def should_stop(self, wanted: bool) -> bool:
        """Whether all ranks stop; with torch's peers they agree every ten steps, by an all-reduce."""
        if self._handle is not None:
            if wanted and not self._handle.should_stop:
                self._handle.stop_all("target reached")
            return self._handle.should_stop
        self._stop.fill_(float(wanted))
        dist.all_reduce(self._stop)
        return bool(self._stop.item())

    def commits(self) -> int:
        return int(self._handle.committer.worker.stats()["commits"]) if self._handle is not None else 0

    def close(self) -> dict[str, Any]:
        """Finish together; returns the statistics."""
        if self._handle is None:
            return {}
        self._handle.finish()
        stats = self._handle.stats()
        dist.barrier()
        self._handle.committer.close()
        return stats

    def assemble(self, parts: list[dict[int, Array]]) -> Array:
        """All ranks' parts as one flat vector."""
        whole = {i: v for part in parts for i, v in part.items()}
        return np.concatenate([whole[i] for i in sorted(whole)])


class _Recorder:
    """Copies this rank's part of the global model every ``record_s``; on rank 0 also looks whether the target is near."""

    def __init__(self, contender: Contender, task: Task, evaluate: Evaluator | None, start_s: float) -> None:
        self._contender, self._task, self._evaluate, self._start_s = contender, task, evaluate, start_s
        self.copies: list[tuple[float, dict[int, Array]]] = []
        self.enough = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        turn = 0
        while not self._end.is_set():
            now_s = time.monotonic() - self._start_s
            self.copies.append((now_s, self._contender.own_part()))
            turn += 1
            # An evaluation takes some milliseconds of a core: rarer than copies.
            if self._evaluate is not None and turn % 15 == 0 and not self.enough:
                loss, _ = self._evaluate(self._contender.seen_model())
                self.enough = loss <= ENOUGH * self._task.target_loss
            self._end.wait(max(0.0, self._start_s + turn * self._task.record_s - (time.monotonic())))


def train(contender: Contender, task: Task) -> Record:
    """Train until the target is surely passed (or time is up), on all ranks together."""
    rank = dist.get_rank()
    dist.barrier()
    start_s = time.monotonic()
    if contender.handle is not None:
        contender.handle.committer.worker.restart_clock()  # type: ignore[attr-defined]
    recorder = _Recorder(contender, task, Evaluator(task) if rank == 0 else None, start_s)
    times: list[float] = []
    late = 0
    while True:
        late += not contender.step(task.step_s)
        times.append(time.monotonic() - start_s)
        wanted = recorder.enough or times[-1] > task.longest_s
        if (contender.handle is not None or len(times) % 10 == 0) and contender.should_stop(wanted):
            break
    end_s = time.monotonic() - start_s
    commits = contender.commits()
    recorder.close()
    stats = contender.close()
    return Record(
        step_times=tuple(times),
        copies=tuple(recorder.copies),
        end_s=end_s,
        computing_s=task.step_s * len(times),
        commits=commits,
        nbytes=int(stats.get("worker", {}).get("bytes", 0)),
        late_steps=late,
        stats=stats,
    )


@dataclass(frozen=True)
class Reached:
    """When the target was reached and what it took until then; ``time_s`` None: it was not."""

    time_s: float | None
    steps: int
    waiting_share: float
    loss: float
    accuracy: float
    losses: tuple[tuple[float, float], ...]


def find_target(record: Record, task: Task, assemble: Callable[[list[dict[int, Array]]], Array]) -> Reached:
    """Look at the recorded global models; collective. The result is the same on all ranks.

    Raises
    ------
    CommhooksError
        A rank has recorded nothing.
    """
    times = _gathered(list(record.step_times))
    merged = sorted(t for own in times for t in own)
    looks = merged[STEPS_PER_LOOK - 1 :: STEPS_PER_LOOK]
    evaluate = Evaluator(task)
    losses: list[tuple[float, float]] = []
    seen = (float("inf"), 0.0)
    reached_s: float | None = None
    for look_s in looks:
        parts = _gather_parts(_copy_after(record, look_s))
        verdict = [evaluate(assemble(parts)) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(verdict)
        assert verdict[0] is not None
        seen = verdict[0]
        losses.append((look_s, seen[0]))
        if seen[0] <= task.target_loss:
            reached_s = look_s
            break
    until_s = reached_s if reached_s is not None else record.end_s
    steps = [sum(t <= until_s for t in own) for own in times]
    steps_s = _gathered(task.step_s)
    computing_s = sum(n * s for n, s in zip(steps, steps_s))
    waiting = max(0.0, 1.0 - computing_s / (until_s * len(times)))
    return Reached(reached_s, sum(steps), waiting, seen[0], seen[1], tuple(losses))


def _copy_after(record: Record, look_s: float) -> dict[int, Array]:
    if not record.copies:
        raise CommhooksError(f"rank {dist.get_rank()} has no copy of the model: the run was too short")
    return next((part for t, part in record.copies if t >= look_s), record.copies[-1][1])


def _gathered(value: Any) -> list[Any]:
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def _gather_parts(part: dict[int, Array]) -> list[dict[int, Array]]:
    """All ranks' parts, on rank 0."""
    out: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(part, out)
    return out or []
