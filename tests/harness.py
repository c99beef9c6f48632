"""Real ranks for tests: one process each, started in milliseconds, with every rank's traceback in the failure.

``run(3, some_function, 7)`` calls ``some_function(7)`` in three processes that have joined a Gloo group, and returns what each
returned (JSON values).  `Ranks` is the same by hand, for tests in which ranks die.

A *nursery* process imports torch and this package once per test session; ranks are forked from it while it has one thread, so a
launch costs no import.  Taking an interpreter with torch in it apart costs a second of a busy machine, so ranks leave after
their exit handlers unless a test asks for the whole end.
Only processes that were started here are ever signalled, by their ids.
"""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

LIMIT_S = 240.0  # generous: the machine may be busy with other tests
GLOO_TIMEOUT_S = 60

_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one rank ended.

    Attributes
    ----------
    code : the exit code; negative: the signal; None: still running when the limit was up
    value : what the function returned
    error : names of the exception's classes, most derived first; empty: none
    message : the exception's words
    told : its traceback and everything that it wrote
    function_s, exit_s : seconds that the function took, and from its end to the end of the process
    """

    rank: int
    code: int | None
    value: Any
    error: tuple[str, ...]
    message: str
    told: str
    function_s: float
    exit_s: float


# --- the test's side ---------------------------------------------------------------------------------------------------


class _Nursery:
    def __init__(self) -> None:
        quiet = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **quiet, "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"},
            text=True,
        )
        atexit.register(self.close)

    def ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(
                "the nursery of test ranks has ended; its words are in pytest's captured stderr"
            )
        return json.loads(answer)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


_nursery: _Nursery | None = None


def _ask(request: dict[str, Any]) -> Any:
    global _nursery
    if _nursery is None:
        _nursery = _Nursery()
    return _nursery.ask(request)


class Ranks:
    """`world_size` processes that call ``function(*arguments)``, each a rank of a Gloo group.

    Use as a context manager; at its end, what still runs is killed.

    Parameters
    ----------
    function : importable by its module's name; called after the process group is there
    environment : variables on top of the test's own
    whole_end : end as a script does, with the interpreter's finalisation
    """

    def __init__(
        self,
        world_size: int,
        function: Callable[..., Any],
        *arguments: Any,
        environment: dict[str, str] | None = None,
        limit_s: float = LIMIT_S,
        whole_end: bool = False,
    ) -> None:
        self.world_size = world_size
        self.limit_s = limit_s
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self.folder = Path(self._folder.name)
        self._outcomes: dict[int, Outcome] = {}
        self._ended_s: dict[int, float] = {}
        request = {
            "folder": self._folder.name,
            "world_size": world_size,
            "module": function.__module__,
            "function": function.__name__,
            "arguments": arguments,
            "environment": environment or {},
            "limit_s": limit_s,
            "whole_end": whole_end,
        }
        self.pids: list[int] = [_ask({**request, "rank": rank}) for rank in range(world_size)]
        self._alive = {os.pidfd_open(pid): rank for rank, pid in enumerate(self.pids)}

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Signal one rank that hasn't been reaped."""
        os.kill(self.pids[rank], number)

    def note(self, name: str, value: Any = 1) -> None:
        """Leave a JSON value for the ranks."""
        _notes(self._folder.name).set(name, json.dumps(value))

    def noted(self, name: str) -> Any:
        """What a rank has left (or is about to)."""
        return json.loads(_notes(self._folder.name).get(name))

    def wait(self, ranks: Sequence[int] | None = None, limit_s: float | None = None) -> list[Outcome]:
        """The outcomes of `ranks` (default: all), which are killed when the limit is up."""
        awaited = set(range(self.world_size) if ranks is None else ranks)
        deadline_s = time.monotonic() + (self.limit_s if limit_s is None else limit_s)
        while awaited - self._ended_s.keys() and (left_s := deadline_s - time.monotonic()) > 0:
            ready, _, _ = select.select(list(self._alive), [], [], left_s)
            for fd in ready:
                self._ended_s[self._alive.pop(fd)] = time.monotonic()
                os.close(fd)
        return [self._outcome(rank) for rank in sorted(awaited)]

    def _outcome(self, rank: int) -> Outcome:
        if rank not in self._outcomes:
            late = rank not in self._ended_s
            if late:
                self.signal(rank, signal.SIGKILL)
            code = _ask({"reap": self.pids[rank]})
            self._outcomes[rank] = self._read(rank, None if late else code)
        return self._outcomes[rank]

    def _read(self, rank: int, code: int | None) -> Outcome:
        path = self.folder / f"{rank}.json"
        report = json.loads(path.read_text()) if path.exists() else {}
        told = report.get("traceback", "") + (self.folder / f"{rank}.log").read_text(errors="replace")
        return Outcome(
            rank,
            code,
            report.get("value"),
            tuple(report.get("error", ())),
            report.get("message", ""),
            told,
            report.get("function_s", -1.0),
            self._ended_s.get(rank, 0.0) - report.get("ended_s", 0.0),
        )

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in range(self.world_size):
            if rank not in self._outcomes:
                self._outcome(rank)
        for fd in self._alive:
            os.close(fd)
        self._alive.clear()
        self._folder.cleanup()


def run(
    world_size: int,
    function: Callable[..., Any],
    *arguments: Any,
    environment: dict[str, str] | None = None,
    limit_s: float = LIMIT_S,
) -> list[Any]:
    """What ``function(*arguments)`` returned on each rank; fails with every rank's words when one of them failed."""
    with Ranks(world_size, function, *arguments, environment=environment, limit_s=limit_s) as ranks:
        outcomes = ranks.wait()
    if any(outcome.code != 0 for outcome in outcomes):
        raise AssertionError(describe(outcomes))
    return [outcome.value for outcome in outcomes]


def describe(outcomes: Sequence[Outcome]) -> str:
    """Every rank's end and words."""
    parts = []
    for outcome in outcomes:
        end = "still ran at the limit" if outcome.code is None else f"exit code {outcome.code}"
        parts.append(f"---- rank {outcome.rank}: {end} ----\n{outcome.told[-6000:]}")
    return "\n" + "\n".join(parts)


def run_cases(
    world_size: int,
    function: Callable[..., Any],
    names: Sequence[str],
    *arguments: Any,
    limit_s: float = LIMIT_S,
) -> dict[str, str]:
    """Many small cases in few launches: ``function(name, *arguments)`` for each name, in order.

    Returns each case's failure ("" for none).  After a failed case the rest goes on in a fresh launch, since its ranks may
    no longer agree about anything.
    """
    failures: dict[str, str] = {}
    left = list(names)
    while left:
        with Ranks(
            world_size, _cases, function.__module__, function.__name__, left, arguments, limit_s=limit_s
        ) as ranks:
            outcomes = ranks.wait()
            done = min(_count_done(ranks, rank) for rank in range(world_size))
        failures.update(dict.fromkeys(left[:done], ""))
        if done < len(left):
            failures[left[done]] = describe(outcomes)
        elif any(outcome.code != 0 for outcome in outcomes):
            failures[left[-1]] = "after the last case: " + describe(outcomes)
        left = left[done + 1 :]
    return failures


def _notes(folder: str) -> Any:
    import torch.distributed as dist

    return dist.FileStore(f"{folder}/notes", -1)


def note(name: str, value: Any = 1) -> None:
    """In a rank: leave a JSON value for the others and for the test."""
    _notes(_folder).set(name, json.dumps(value))


def await_note(name: str) -> Any:
    """In a rank: block until `name` is noted."""
    return json.loads(_notes(_folder).get(name))


def noted(name: str) -> bool:
    """In a rank: whether `name` is noted."""
    return bool(_notes(_folder).check([name]))


def _count_done(ranks: Ranks, rank: int) -> int:
    path = ranks.folder / f"{rank}.done"
    return len(path.read_text().split()) if path.exists() else 0


def _cases(module: str, name: str, left: Sequence[str], arguments: Sequence[Any]) -> None:
    import torch.distributed as dist

    function = getattr(importlib.import_module(module), name)
    with open(os.path.join(_folder, f"{dist.get_rank()}.done"), "a", buffering=1) as done:
        for case in left:
            print(f"case {case}", flush=True)
            function(case, *arguments)
            dist.barrier()
            done.write(f"{case}\n")


# --- the nursery's and the ranks' side ------------------------------------------------------------------------------------

_folder = ""  # in a rank: where it reports to


def _nursery_main() -> None:
    # The first DDP model imports it: four seconds that each rank would spend for itself.
    import torch._dynamo  # noqa: F401

    import commhooks.collectives
    import commhooks.ddp  # noqa: F401

    gc.freeze()  # the ranks' collections and ends needn't touch (and so copy) all that was imported here
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    children: set[int] = set()
    # Not sys.stdin: what it has read ahead would be the child's too.
    while line := _read_line():
        request = json.loads(line)
        if "reap" in request:
            _, status = os.waitpid(request["reap"], 0)
            children.discard(request["reap"])
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                answers.close()
                _rank_main(request)
            children.add(answer)
        answers.write(f"{json.dumps(answer)}\n")
        answers.flush()
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def _read_line() -> bytes:
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return b""
        line += byte
    return bytes(line)


def _rank_main(request: dict[str, Any]) -> None:
    """Everything a rank does; its process then ends as any script does."""
    global _folder
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    rank, _folder = request["rank"], request["folder"]
    sys.modules.setdefault("harness", sys.modules["__main__"])
    with open(f"{_folder}/{rank}.log", "w") as words, open(os.devnull) as nothing:
        os.dup2(words.fileno(), 1)
        os.dup2(words.fileno(), 2)
        os.dup2(nothing.fileno(), 0)
    _prepare(request)
    started_s = time.monotonic()
    report: dict[str, Any] = {}
    try:
        _join_group(rank, request["world_size"])
        function = getattr(importlib.import_module(request["module"]), request["function"])
        report["value"] = function(*request["arguments"])
    except SystemExit:
        report["value"] = None
    except BaseException as error:  # pytest's own are no Exceptions
        report["error"] = [kind.__name__ for kind in type(error).__mro__]
        report["message"] = str(error)
        report["traceback"] = traceback.format_exc()
    ended_s = time.monotonic()
    report.update(function_s=ended_s - started_s, ended_s=ended_s)
    path = Path(_folder, f"{rank}.json")
    path.with_suffix(".part").write_text(json.dumps(report))
    path.with_suffix(".part").rename(path)
    code = 1 if "error" in report else 0
    if request["whole_end"]:
        sys.exit(code)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def _prepare(request: dict[str, Any]) -> None:
    import faulthandler
    import logging

    import torch

    os.environ.update(request["environment"])
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(name)s %(levelname)s %(message)s")
    # Shortly before the end: where every thread of a rank that hangs is.
    faulthandler.dump_traceback_later(max(1.0, request["limit_s"] - 2.0), exit=False)


def _join_group(rank: int, world_size: int) -> None:
    import datetime

    import torch.distributed as dist

    store = dist.FileStore(f"{_folder}/store", world_size)
    limit = datetime.timedelta(seconds=GLOO_TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)


if __name__ == "__main__":
    _nursery_main()
