"""Says which rank keeps the others waiting, and for which parameter: a thread beside training.

Where in the flow: reducers -> **stall watch** -> the launcher's key-value store -> the log (and the text of time-out errors).

Each rank's thread tells the store every few seconds where its reducers stand.  A rank that has waited longer than the limit
reads what the others have told and names those that are behind.  The thread is alive where the training thread is stuck
in a loader or a debugger, so a stuck rank is named with what it lacks; a rank whose process is gone is named by its silence.

Invariants: nothing here touches gradients or Horovod's collectives, so it works when those are stuck; one report per wait,
then at doubling intervals; a store that can't be reached costs the ranks' names in the report, nothing else.
"""

from __future__ import annotations

import http.client
import json
import logging
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

log = logging.getLogger(__name__)

_STORE_LIMIT_S = 2.0
SCOPE = "commhooks_progress"


@dataclass(frozen=True)
class Progress:
    """Where one optimizer stands on one rank.

    Attributes
    ----------
    step : steps reduced so far
    waiting_for : parameters of the parcel that the training thread waits for; empty when it doesn't wait
    missing : parameters without a gradient in this step, on this rank
    """

    optimizer: str
    step: int
    waiting_for: tuple[str, ...]
    missing: tuple[str, ...]


class Reporter(Protocol):
    """What the watch asks; called from its thread, must not block."""

    def progress(self) -> Progress:
        """Now."""


class Store(Protocol):
    """A key-value store that all ranks reach."""

    def put(self, key: str, value: bytes) -> None:
        """Overwrite a key; failures are silent."""

    def get(self, key: str) -> bytes | None:
        """A key's value, or None."""


class LauncherStore:
    """Horovod's rendezvous server as a key-value store (plain HTTP, no proxy)."""

    def __init__(self, host: str, port: int, scope: str = SCOPE) -> None:
        self._host = host
        self._port = port
        self._scope = scope

    def put(self, key: str, value: bytes) -> None:
        """See `Store`."""
        self._ask("PUT", key, value)

    def get(self, key: str) -> bytes | None:
        """See `Store`."""
        return self._ask("GET", key, None)

    def _ask(self, method: str, key: str, body: bytes | None) -> bytes | None:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_STORE_LIMIT_S)
        try:
            connection.request(method, f"/{self._scope}/{key}", body)
            answer = connection.getresponse()
            content = answer.read()
            return content if answer.status == 200 else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()


class StallWatch:
    """Watches all reducers of this rank.

    Parameters
    ----------
    store : where ranks tell their progress; None: reports name no ranks
    rank : this rank's number in the job
    limit_s : how long a wait is normal
    """

    def __init__(self, store: Store | None, rank: int, limit_s: float) -> None:
        self._store = store
        self._rank = rank
        self._ranks: dict[str, tuple[int, ...]] = {}  # optimizer -> who takes part
        self._limit_s = limit_s
        self.reporters: weakref.WeakSet[Any] = weakref.WeakSet()
        self._ended = threading.Event()
        self._beat = 0
        self._thread = threading.Thread(target=self._run, name="commhooks-stall-watch", daemon=True)
        self._waits: dict[str, tuple[Progress, float, float]] = {}  # optimizer -> (state, since, next report)

    def add(self, reporter: Reporter, ranks: Sequence[int]) -> None:
        """Watch one more, which reduces among `ranks` (of the job)."""
        self.reporters.add(reporter)
        self._ranks[reporter.progress().optimizer] = tuple(ranks)

    def start(self) -> None:
        """Start the thread; harmless when it runs."""
        if not self._thread.is_alive() and not self._ended.is_set():
            self._thread.start()

    def close(self) -> None:
        """End the thread (soon; it isn't waited for)."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(self._limit_s / 4):
            self.turn(time.monotonic())

    def turn(self, now_s: float) -> list[str]:
        """Tell the store, and report the waits that have lasted too long; returns what was logged."""
        states = [reporter.progress() for reporter in list(self.reporters)]
        self._beat += 1
        if self._store is not None:
            content = {"beat": self._beat, "states": [asdict(state) for state in states]}
            self._store.put(str(self._rank), json.dumps(content).encode())
        reports = [self.explain(state, since) for state, since in self._overdue(states, now_s)]
        for report in reports:
            log.warning("%s", report)
        return reports

    def _overdue(self, states: Iterable[Progress], now_s: float) -> Iterable[tuple[Progress, float]]:
        for state in states:
            known = self._waits.get(state.optimizer)
            if not state.waiting_for or known is None or known[0] != state:
                self._waits[state.optimizer] = (state, now_s, now_s + self._limit_s)
                continue
            _, since_s, report_s = known
            if now_s >= report_s:
                waited_s = now_s - since_s
                self._waits[state.optimizer] = (state, since_s, now_s + 2 * waited_s)
                yield state, waited_s

    def explain(self, state: Progress, waited_s: float) -> str:
        """One wait in words, with the ranks that are behind."""
        return (
            f"rank {self._rank}, optimizer {state.optimizer}, step {state.step}: waiting for "
            f"{_few(state.waiting_for)} for {waited_s:.1f} s; {self._behind(state)}"
        )

    def _behind(self, state: Progress) -> str:
        if self._store is None:
            return "which rank is behind isn't known (the launcher has no store that could be asked)"
        parts = []
        for rank in self._ranks.get(state.optimizer, ()):
            if rank != self._rank:
                content = self._store.get(str(rank))
                theirs = _states(content).get(state.optimizer) if content else None
                parts.append(_compared(rank, state, theirs))
        return (
            "; ".join(part for part in parts if part)
            or "every other rank has sent it: the network is slow or stuck"
        )


def _states(content: bytes) -> dict[str, Progress]:
    """What a rank has told; nothing from the store is trusted to be more than text and numbers."""
    try:
        return {
            str(s["optimizer"]): Progress(
                str(s["optimizer"]),
                int(s["step"]),
                tuple(map(str, s["waiting_for"])),
                tuple(map(str, s["missing"])),
            )
            for s in json.loads(content)["states"]
        }
    except (ValueError, KeyError, TypeError):
        return {}


def _compared(rank: int, ours: Progress, theirs: Progress | None) -> str:
    """What keeps `rank` from having sent what we wait for; empty when nothing does."""
    if theirs is None:
        return f"rank {rank} has told nothing (it hasn't come to this optimizer, or its process is gone)"
    lacks = [name for name in ours.waiting_for if name in theirs.missing]
    if theirs.step < ours.step or (theirs.step == ours.step and lacks):
        what = _few(lacks or theirs.missing)
        return f"rank {rank} is in step {theirs.step} and has no gradient yet for {what}"
    return ""


def _few(names: Sequence[str]) -> str:
    return (
        ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        if names
        else "nothing"
    )
