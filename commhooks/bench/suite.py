"""``commhooks bench all``: every fixed call, one after the other, and one table of what was reached.

Where in the flow: a command; suite_calls (calls and goals) -> **suite** -> each command as a process -> its JSON -> table.

Invariants: one call at a time, because the calls are timed; a call that can't run or fails is a row that says so; after each
call ``results.json`` holds everything so far.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commhooks import __version__, shell
from commhooks.bench.suite_calls import CALLS, Call, Rows
from commhooks.errors import CommhooksError, ConfigError
from commhooks.lab_ranks import Interrupted, signals_interrupt
from commhooks.tables import markdown

_ITSELF = (sys.executable, "-m", "commhooks")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and without the long calls")
    parser.add_argument("--output", default="out", metavar="DIR", help="where results.json goes (out)")
    parser.add_argument("--only", metavar="N1,N4", help="only these")


def main(namespace: argparse.Namespace) -> int:
    """Run the calls; 1 when a figure falls short or a call fails."""
    calls = _chosen(namespace.only)
    left_out = [call for call in calls if namespace.quick and call.quick is None]
    calls = [call for call in calls if call not in left_out]
    folder = Path(namespace.output)
    folder.mkdir(parents=True, exist_ok=True)
    with signals_interrupt():
        try:
            done = _run_all(calls, namespace.quick, folder / "results.json")
        except Interrupted as interrupt:
            return 128 + interrupt.number
    rows = [row for each in done for row in each.rows()]
    print(json.dumps(rows, indent=2) if namespace.json else table(rows, left_out, folder))
    return 0 if all(row["ok"] is not False for row in rows) else 1


def _chosen(text: str | None) -> list[Call]:
    if text is None:
        return list(CALLS)
    wanted = [number.strip() for number in text.split(",")]
    known = list(dict.fromkeys(call.number for call in CALLS))
    if unknown := [number for number in wanted if number not in known]:
        raise ConfigError(f"--only: unknown {', '.join(unknown)}; there are {', '.join(known)}")
    return [call for call in CALLS if call.number in wanted]


@dataclass(frozen=True)
class Done:
    """A call that was tried.

    Attributes
    ----------
    problem : why it has no figures (then nothing was reached); empty: it has.
    possible : False when this machine can't run it, which isn't a failure.
    """

    call: Call
    quick: bool
    seconds: float
    figures: Rows
    problem: str = ""
    possible: bool = True

    def rows(self) -> list[dict[str, Any]]:
        """One per goal; a single one for a call without figures."""
        if self.problem:
            return [self._row("", None, "", self.problem, None if not self.possible else False)]
        made = []
        for goal in self.call.goals:
            reached = goal.measure(self.figures)
            verdict = goal.verdict(reached)
            ok: bool | None = verdict == "reached"
            if reached is None and (self.quick or goal.excused):
                ok = None
            made.append(self._row(goal.name, reached, goal.target_text, verdict, ok))
        return made

    def _row(
        self, goal: str, reached: float | None, target: str, verdict: str, ok: bool | None
    ) -> dict[str, Any]:
        return {
            "number": self.call.number,
            "command": self.call.command(self.quick),
            "goal": goal,
            "reached": None if reached is None else round(reached, 4),
            "target": target,
            "verdict": verdict,
            "ok": ok,
            "seconds": round(self.seconds, 1),
        }

    def as_json(self) -> dict[str, Any]:
        """For the file: the verdicts and all that the command printed."""
        return {"rows": self.rows(), "figures": [dict(row) for row in self.figures]}


def table(rows: Sequence[Mapping[str, Any]], left_out: Sequence[Call], folder: Path) -> str:
    """Markdown: a row for each figure, the command only where it changes; then what was left out."""
    lines = []
    before = None
    for row in rows:
        command = f"`{row['command']}`" if row["command"] != before else ""
        before = row["command"]
        reached = "–" if row["reached"] is None else f"{row['reached']:.4g}"
        lines.append([row["number"], command, row["goal"], reached, row["target"], row["verdict"]])
    text = markdown(("#", "command", "figure", "reached", "target", "verdict"), lines)
    notes = [f"All figures: {folder / 'results.json'}"]
    if left_out:
        notes.append("Left out by --quick:")
        notes += [f"* {call.number}: `{call.command(False)}`" for call in left_out]
    return "\n".join([text, "", *notes])


# --- Running -----------------------------------------------------------------------------------------------------------


def _run_all(calls: Sequence[Call], quick: bool, path: Path) -> list[Done]:
    done: list[Done] = []
    no_lab = _why_no_lab() if any(call.network for call in calls) else ""
    for number, call in enumerate(calls, 1):
        _say(f"[{number}/{len(calls)}] {call.number}: {call.command(quick)}")
        if call.network and no_lab:
            done.append(Done(call, quick, 0.0, [], f"can't run: {no_lab}", possible=False))
        else:
            done.append(run_call(call, quick))
        for row in done[-1].rows():
            _say(f"    {row['goal']} {row['reached']} {row['target']}: {row['verdict']}")
        _write(path, done, quick)
    return done


def _why_no_lab() -> str:
    """Empty when networks can be emulated here; tried, because a user namespace may do as well as root."""
    shown = (*_ITSELF, "lab", "nic:100*2", "--", "sh", "-c", "echo $GLOO_SOCKET_IFNAME")
    finished = _finished(shown, 60.0)
    if finished.exit_code != 0:
        return _last_words(finished)
    return "" if finished.stdout.strip() == "eth0" else "emulating networks needs root, or a user namespace"


def run_call(call: Call, quick: bool) -> Done:
    """One command, in a lab where it needs a network; what it printed, or why there is nothing."""
    inner = (*_ITSELF, *call.arguments(quick))
    command = (*_ITSELF, "lab", call.network, "--", *inner) if call.network else inner
    limit_s = call.quick_limit_s if quick else call.limit_s
    began_s = time.monotonic()
    try:
        finished = _finished(command, limit_s)
    except CommhooksError as error:
        return Done(call, quick, time.monotonic() - began_s, [], f"failed: {error}")
    seconds = time.monotonic() - began_s
    figures = _figures(finished.stdout)
    if figures is None:
        words = f"not done after {limit_s:g} s" if finished.exit_code == 124 else _last_words(finished)
        return Done(call, quick, seconds, [], f"failed: {words}")
    return Done(call, quick, seconds, figures)


def _finished(command: Sequence[str], limit_s: float) -> shell.Finished:
    child = shell.start(command, None, stdout=shell.PIPE, stderr=shell.PIPE)
    return shell.collect(child, limit_s)


def _figures(text: str) -> Rows | None:
    """The array that a command printed; None when it printed something else."""
    try:
        rows = json.loads(text)
    except ValueError:
        return None
    return rows if isinstance(rows, list) and rows else None


def _last_words(finished: shell.Finished) -> str:
    """The line of standard error that says most: the last one that has an error's name, else the last one."""
    lines = [line.strip() for line in finished.stderr.splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower()] or lines
    return f"exit code {finished.exit_code}" + (f": {telling[-1][:300]}" if telling else "")


def _write(path: Path, done: Sequence[Done], quick: bool) -> None:
    content = {
        "version": __version__,
        "quick": quick,
        "machine": {
            "cpus": os.cpu_count(),
            "kernel": platform.release(),
            "python": platform.python_version(),
        },
        "calls": [each.as_json() for each in done],
    }
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1))
    part.replace(path)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
