"""``commhooks bench faults``: how soon a rank that dies, stops, raises, skips or disagrees is a named error on all others.

Where in the flow: a command; **faults** (starts ranks, strangers and the clock, judges) -> fault_ranks (what the ranks do).

Algorithm, for each case:
(1) fork the ranks; they train, and in the middle of a step the culprit tells the time and acts;
(2) every other rank tells which error it raised where its user waits, and when;
(3) the case is ok when all of them raised the expected kind, named the culprit, and did so within the limit.

The limit is what has to pass by the settings before anybody can know (nothing for a dead process, ``--wait`` for a silent one
or one that doesn't deliver), plus `ALLOWANCE_S` for a busy machine.

Invariants: only processes that were started here are signalled, by their ids, and none outlives the command.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import re
import secrets
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commhooks import shell
from commhooks.bench import launch
from commhooks.bench.harness import render
from commhooks.errors import ConfigError
from commhooks.links.admission import LONGEST_MESSAGE_BYTES, Claim, Connecting

CULPRIT = 1
ALLOWANCE_S = 5.0
START_LIMIT_S = 60.0  # for joining and the first steps; nothing that is measured
STRANGERS_REFUSED = 3  # of the four that come to each rank one says nothing, and is dropped later
_MESSAGE_BYTES = 1 << 16
_PATIENT_S = 60.0


@dataclass(frozen=True)
class Case:
    """One misbehaviour.

    Attributes
    ----------
    name : for the table.
    act : what `fault_ranks` calls it.
    error : the class that every survivor must raise; empty: none, nothing may happen.
    setting : the setting whose limit has to pass first, or empty.
    culprit_raises : whether the culprit lives on and must raise as well.
    """

    name: str
    act: str
    error: str
    setting: str = ""
    culprit_raises: bool = False

    def settings(self, wait_s: float) -> dict[str, float]:
        """Every limit long but the one that the case waits for."""
        limits = dict.fromkeys(("timeout_s", "heartbeat_s"), _PATIENT_S)
        return limits | ({self.setting: wait_s} if self.setting else {})

    def limit_s(self, wait_s: float) -> float:
        """Seconds in which all survivors must have raised."""
        if not self.setting:
            return ALLOWANCE_S
        grace_s = wait_s / 4 if self.setting == "timeout_s" else 0.0  # for the question who keeps the slice
        return wait_s + grace_s + ALLOWANCE_S


CASES = (
    Case("killed (SIGKILL)", "kill", "PeerLost"),
    Case("stopped (SIGSTOP)", "stop", "PeerLost", "heartbeat_s"),
    Case("exits in order", "leave", "PeerLost"),
    Case("raises in backward", "raise", "PeerLost"),
    Case("raises, caught", "raise and catch", "CommTimeout", "timeout_s", culprit_raises=True),
    Case("skips a backward", "skip", "CommTimeout", "timeout_s", culprit_raises=True),
    Case("other width", "width", "Mismatch", culprit_raises=True),
    Case("other settings", "settings", "Mismatch", culprit_raises=True),
    Case("strangers on the port", "strangers", "", culprit_raises=True),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    acts = ", ".join(case.act for case in CASES)
    parser.add_argument("--ranks", type=int, default=4, help="processes, on loopback (4)")
    parser.add_argument("--links", default="tcp", choices=("tcp", "shm"), help="how they are joined (tcp)")
    parser.add_argument("--schedule", default="trees", choices=("trees", "ring"), help="plan (trees)")
    parser.add_argument(
        "--wait", type=float, default=2.0, help="the limits that some cases wait for, in s (2)"
    )
    parser.add_argument("--cases", help=f"some of: {acts} (all)")


def main(namespace: argparse.Namespace) -> int:
    """Run the cases; 1 when one of them isn't ok."""
    cases = _chosen(namespace.cases)
    if namespace.ranks < 2 or namespace.wait <= 0:
        raise ConfigError(
            f"--ranks {namespace.ranks}, --wait {namespace.wait:g}: at least 2 ranks, above 0 s"
        )
    if launch.launched():
        raise ConfigError("bench faults starts ranks of its own; run it without a launcher")
    if not launch.settings().enabled:
        raise ConfigError("COMMHOOKS=0 switches off what is to be tried here")
    _load()

    rows = [_row(case, namespace) for case in cases]
    notes = [f"not ok: {row['case']}: {row['said']}" for row in rows if not row["ok"]]
    shown = rows if namespace.json else [_short(row) for row in rows]
    print(render(shown, namespace.json, notes))
    return 0 if all(row["ok"] for row in rows) else 1


def _load() -> None:
    """Import once what every rank needs; the first DDP model imports torch._dynamo, for seconds."""
    for module in ("torch._dynamo", "commhooks.bench.fault_ranks"):
        importlib.import_module(module)
    gc.freeze()  # the ranks' collections needn't touch, and so copy, all of it


def _chosen(text: str | None) -> list[Case]:
    if text is None:
        return list(CASES)
    by_act = {case.act: case for case in CASES}
    acts = [act.strip() for act in text.split(",")]
    unknown = [act for act in acts if act not in by_act]
    if unknown:
        raise ConfigError(f"--cases: unknown {', '.join(map(repr, unknown))}; there are {', '.join(by_act)}")
    return [by_act[act] for act in acts]


# --- Judging: pure -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """A rank's own words at its end."""

    rank: int
    at_s: float
    error: str
    message: str
    longest_step_s: float
    strangers: int


@dataclass(frozen=True)
class Observed:
    """What happened in a case: when the culprit acted (None: nobody did), and the reports that came."""

    deed_s: float | None
    reports: tuple[Report, ...]


def judge(case: Case, ranks: int, limit_s: float, seen: Observed) -> dict[str, Any]:
    """The case's row."""
    awaited = [rank for rank in range(ranks) if rank != CULPRIT or case.culprit_raises]
    reports = [report for report in seen.reports if report.rank in awaited]
    complete = len(reports) == len(awaited)
    after = sorted(
        report.at_s - seen.deed_s for report in reports if report.error and seen.deed_s is not None
    )
    names = [re.search(rf"\brank {CULPRIT}\b", report.message) is not None for report in reports]
    kinds = {report.error for report in reports}
    if case.error:
        ok = complete and kinds == {case.error} and all(names) and bool(after) and after[-1] <= limit_s
    else:
        refused = all(report.strangers >= STRANGERS_REFUSED for report in reports)
        ok = complete and kinds == {""} and refused and max(r.longest_step_s for r in reports) <= limit_s
    silent = sorted(set(awaited) - {report.rank for report in reports})
    return {
        "case": case.name,
        "ranks": ranks,
        "limit_s": round(limit_s, 3),
        "first_error_s": round(after[0], 4) if after else None,
        "last_error_s": round(after[-1], 4) if after else None,
        "error": ", ".join(sorted(kind or "none" for kind in kinds)),
        "errors": {str(report.rank): report.error or "none" for report in reports},
        "names_culprit": all(names) and complete if case.error else None,
        "strangers": [report.strangers for report in reports] if not case.error else None,
        "longest_step_s": round(max((r.longest_step_s for r in reports), default=0.0), 4),
        "said": reports[0].message if reports else "",
        "silent": silent,
        "ok": ok,
    }


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """The columns of the table."""
    names = ("case", "ranks", "limit_s", "first_error_s", "last_error_s", "error", "names_culprit", "ok")
    words = {True: "yes", False: "no"}
    return {name: words[row[name]] if isinstance(row[name], bool) else row[name] for name in names}


# --- Running -----------------------------------------------------------------------------------------------------------


def _row(case: Case, namespace: argparse.Namespace) -> dict[str, Any]:
    settings = {
        "schedule": namespace.schedule,
        "links": namespace.links,
        "topology": "uniform",
        "slice_numel": 100,
        **case.settings(namespace.wait),
    }
    limit_s = case.limit_s(namespace.wait)
    with Trial(case, namespace.ranks, settings) as trial:
        row = judge(case, namespace.ranks, limit_s, trial.observe(limit_s))
        if not row["ok"]:
            sys.stderr.write(trial.logs())
    return row


class Trial:
    """The processes of one case."""

    def __init__(self, case: Case, ranks: int, settings: dict[str, Any]) -> None:
        self._case = case
        self._ranks = ranks
        self._settings = settings
        self._folder = Path(tempfile.mkdtemp(prefix="commhooks-faults-"))
        self._sockets: dict[int, socket.socket] = {}
        self._pids: dict[int, int] = {}
        self._strangers = ExitStack()

    def __enter__(self) -> Trial:
        try:
            for rank in range(self._ranks):
                self._start(rank)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _start(self, rank: int) -> None:
        from commhooks.bench.fault_ranks import Part, Rank

        part = Part(self._case.act, rank, self._ranks, CULPRIT, self._settings, str(self._folder / "store"))
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def work() -> None:
            self._words_to(rank)
            for other in (own, *self._sockets.values()):
                other.close()
            Rank(part, theirs).run()

        self._pids[rank] = shell.fork(work)
        self._sockets[rank] = own
        theirs.close()

    def _words_to(self, rank: int) -> None:
        """In a rank: what it writes goes to a file, and isn't shown unless its case isn't ok."""
        with open(self._folder / f"{rank}.log", "wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)

    def observe(self, limit_s: float) -> Observed:
        """Wait for the survivors' reports: for the limit and some more, from the deed on."""
        awaited = {rank for rank in self._pids if rank != CULPRIT or self._case.culprit_raises}
        deadline_s = time.monotonic() + START_LIMIT_S
        deed_s: float | None = None
        reports: dict[int, Report] = {}
        addresses: list[tuple[int, tuple[str, int]]] = []
        open_sockets = dict(self._sockets)
        while awaited - reports.keys() and open_sockets and (left_s := deadline_s - time.monotonic()) > 0:
            ready, _, _ = select.select(list(open_sockets.values()), [], [], left_s)
            for rank in [rank for rank, sock in open_sockets.items() if sock in ready]:
                message = _received(open_sockets[rank])
                if message is None:
                    del open_sockets[rank]  # this rank has ended
                    continue
                what, _ = message.pop("what"), message.pop("rank")
                if what == "deed":
                    deed_s = message["at_s"]
                    deadline_s = min(deadline_s, time.monotonic() + 2 * limit_s)
                elif what == "ended":
                    reports[rank] = Report(rank, **message)
                else:
                    addresses.append((rank, (message["address"][0], message["address"][1])))
                    if len(addresses) == self._ranks:
                        self._let_strangers_in(addresses)
            if not awaited & (open_sockets.keys() | reports.keys()):
                break
        return Observed(deed_s, tuple(reports[rank] for rank in sorted(reports)))

    def _let_strangers_in(self, addresses: Sequence[tuple[int, tuple[str, int]]]) -> None:
        for rank, address in addresses:
            for visit in (_random_bytes, _old_version, _wrong_secret, _silent):
                visit(self._strangers.enter_context(socket.create_connection(address, timeout=10.0)), rank)
        for sock in self._sockets.values():
            sock.send(b"g")

    def logs(self) -> str:
        """What the ranks wrote, the ends of it."""
        parts = []
        for rank in self._pids:
            path = self._folder / f"{rank}.log"
            text = path.read_text(errors="replace")[-2000:] if path.exists() else ""
            parts += [f"[{self._case.name}, rank {rank}] {line}\n" for line in text.splitlines()]
        return "".join(parts)

    def _close(self) -> None:
        for sock in self._sockets.values():
            sock.close()
        self._strangers.close()
        for pid in self._pids.values():  # none has been waited for yet, so the ids are still theirs
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._pids.clear()
        shutil.rmtree(self._folder, ignore_errors=True)


def _received(sock: socket.socket) -> dict[str, Any] | None:
    try:
        text = sock.recv(_MESSAGE_BYTES)
    except OSError:
        return None
    return json.loads(text) if text else None


# --- Strangers ---------------------------------------------------------------------------------------------------------


def _random_bytes(sock: socket.socket, rank: int) -> None:
    sock.sendall(secrets.token_bytes(LONGEST_MESSAGE_BYTES))


def _old_version(sock: socket.socket, rank: int) -> None:
    hello = _hello(sock, rank)
    sock.sendall(hello[:8] + bytes(2) + hello[10:])  # the magic word, then the version


def _wrong_secret(sock: socket.socket, rank: int) -> None:
    sock.sendall(_hello(sock, rank))


def _silent(sock: socket.socket, rank: int) -> None:
    """Comes and says nothing."""


def _hello(sock: socket.socket, rank: int) -> bytes:
    """The right words by somebody who doesn't know the secret."""
    side = Connecting(secrets.token_bytes(32), secrets.token_bytes(32), Claim(CULPRIT, rank, 0))
    hello = b""
    while not hello:
        chunk = sock.recv(side.wanted_bytes)
        if not chunk:
            break
        hello = side.receive(chunk)
    return hello
