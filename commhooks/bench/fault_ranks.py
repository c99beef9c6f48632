"""What the ranks of ``bench faults`` do: train, and one of them misbehaves in the middle of a step.

Where in the flow: faults (the judge) -> one forked process per rank -> **fault_ranks** -> ``commhooks.register``.

Invariants: a rank tells the judge everything over its own socket, as one JSON object per message: ``address`` (where its links
listen), ``deed`` (the moment before the culprit acts) and ``ended``; times are of the clock that all processes of a host share.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.bench import launch
from commhooks.engine import Engine
from commhooks.errors import CommError
from commhooks.groups import engine_for, load_config

DEED_STEP = 2  # by then DDP has rebuilt its buckets
STEPS = 12
WIDTH = 16


@dataclass(frozen=True)
class Part:
    """One rank's part in a case."""

    act: str
    rank: int
    ranks: int
    culprit: int
    settings: dict[str, Any]
    store_path: str

    @property
    def guilty(self) -> bool:
        """Whether this rank misbehaves."""
        return self.rank == self.culprit


class LivesOn(Exception):
    """The culprit caught its own mistake."""


class Model(torch.nn.Module):
    """Two layers with a place between them to act in the middle of the backward pass."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, width)
        self.last = torch.nn.Linear(width, WIDTH)
        self.act: Callable[[], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The backward pass, between the layers, calls `act` once."""
        x = self.first(x)
        if self.act is not None:
            act, self.act = self.act, None
            x.register_hook(lambda _: act())
        return self.last(x)


class Rank:
    """One rank's process, from joining to its report."""

    def __init__(self, part: Part, judge: socket.socket) -> None:
        self._part = part
        self._judge = judge
        self._longest_s = 0.0

    def run(self) -> None:
        """Train until an error comes or all steps are done, and report; what the user's own code raises goes on."""
        with launch.forked_rank(self._part.rank, self._part.ranks, self._part.store_path):
            try:
                self._train()
                self._end(None)
            except (CommError, RuntimeError) as error:
                self._end(error)

    def _tell(self, what: str, **fields: Any) -> None:
        self._judge.send(json.dumps({"what": what, "rank": self._part.rank, **fields}).encode())

    def _end(self, error: Exception | None) -> None:
        self._tell(
            "ended",
            at_s=time.monotonic(),
            error=type(error).__name__ if error is not None else "",
            message=str(error or "")[:4000],
            longest_step_s=self._longest_s,
            strangers=_engine(self._part.settings).stats()["strangers_dropped"] if error is None else 0,
        )

    # -- training ------------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        part = self._part
        model = Model(self._width())
        # init_sync would find another width before any gradient does.
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.001, init_sync=part.act != "width")
        settings = self._settings()
        commhooks.register(ddp, **settings)
        for step in range(STEPS):
            if part.act == "strangers" and step == DEED_STEP:
                self._await_strangers(_engine(settings))
            began_s = time.monotonic()
            try:
                if part.guilty and step == (0 if part.act == "width" else DEED_STEP):
                    self._misbehave(model)
                ddp(torch.full((4, WIDTH), float(part.rank + step))).square().sum().backward()
            except LivesOn:
                _live_on(_engine(settings))
            if part.act == "strangers":
                _check_sum(part, settings)
            self._longest_s = max(self._longest_s, time.monotonic() - began_s)

    def _await_strangers(self, engine: Engine) -> None:
        self._tell("address", address=list(engine.placements[self._part.rank].tcp[0]))
        self._judge.recv(1)

    # -- deeds ---------------------------------------------------------------------------------------------------------

    def _deed(self) -> None:
        self._tell("deed", at_s=time.monotonic())

    def _width(self) -> int:
        return WIDTH + 1 if self._part.act == "width" and self._part.guilty else WIDTH

    def _settings(self) -> dict[str, Any]:
        settings = self._part.settings
        if self._part.act != "settings" or not self._part.guilty:
            return settings
        self._deed()
        return {**settings, "slice_numel": settings["slice_numel"] + 1}

    def _misbehave(self, model: Model) -> None:
        match self._part.act:
            case "kill":
                model.act = lambda: self._signal(signal.SIGKILL)
            case "stop":
                model.act = lambda: self._signal(signal.SIGSTOP)
            case "leave":
                self._deed()
                sys.exit(0)
            case "raise":
                model.act = lambda: self._raise(ValueError("a mistake in the user's own code"))
            case "raise and catch":
                model.act = lambda: self._raise(LivesOn())
            case "width":
                self._deed()
            case "skip":
                self._deed()
                raise LivesOn

    def _signal(self, number: signal.Signals) -> None:
        self._deed()
        os.kill(os.getpid(), number)

    def _raise(self, error: Exception) -> None:
        self._deed()
        raise error


def _engine(settings: dict[str, Any]) -> Engine:
    """The one that `register` has started with these settings."""
    return engine_for(None, load_config(settings))


def _live_on(engine: Engine) -> None:
    """Compute on without ever communicating again, until the engine knows of an error; then meet it."""
    while engine.error is None:
        time.sleep(0.01)
    engine.raise_if_failed()


def _check_sum(part: Part, settings: dict[str, Any]) -> None:
    """Whole numbers, whose sum is exact."""
    tensor = torch.arange(1000.0) + part.rank
    commhooks.all_reduce(tensor, **settings)
    wanted = torch.arange(1000.0) * part.ranks + sum(range(part.ranks))
    if not torch.equal(tensor, wanted):
        raise RuntimeError(f"rank {part.rank}: wrong sums after strangers came")
