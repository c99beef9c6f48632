"""The fixed calls of the suite, what each has to reach, and the verdict.  Pure: figures in, words out.

Where in the flow: **suite_calls** (which commands, which goals) -> suite (runs them) -> the table.

The numbers N1 to N11 are the project's own; N10 (planning times) has no command of its own and is shown by the tests.  Ratios
come from interleaved rounds inside one call, so that what else the machine does changes both sides.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Rows = Sequence[Mapping[str, Any]]
Measure = Callable[[Rows], float | None]

_SHORT_S = 300.0
_LONG_S = 3600.0


@dataclass(frozen=True)
class Goal:
    """One figure that a call has to reach.

    Attributes
    ----------
    name : what it is called in the table.
    measure : the figure, from the call's JSON; None when it isn't in there.
    target : the figure to reach.
    at_least : whether more is better.
    lacks : what is missing when there is no figure.
    excused : whether there may be none, because this machine lacks what it takes.
    """

    name: str
    measure: Measure
    target: float
    at_least: bool = True
    lacks: str = "not measured"
    excused: bool = False

    def verdict(self, reached: float | None) -> str:
        """``reached``, ``short by …`` or what is missing."""
        if reached is None:
            return self.lacks
        if reached >= self.target if self.at_least else reached <= self.target:
            return "reached"
        away = abs(reached - self.target)
        share = f" ({100 * away / self.target:.1f} %)" if self.target else ""
        return f"short by {away:.3g}{share}"

    @property
    def target_text(self) -> str:
        """The target with its sense."""
        return f"{'>=' if self.at_least else '<='} {self.target:g}"


@dataclass(frozen=True)
class Call:
    """One command of the suite.

    Attributes
    ----------
    number : N-number, or a name.
    words : what follows ``commhooks``.
    goals : what its JSON must show.
    network : the lab's topology; empty: the command needs no emulated network.
    quick : options with values added by ``--quick``; None: ``--quick`` leaves the call out.
    limit_s, quick_limit_s : when to give up.
    """

    number: str
    words: tuple[str, ...]
    goals: tuple[Goal, ...]
    network: str = ""
    quick: tuple[str, ...] | None = ()
    limit_s: float = 900.0
    quick_limit_s: float = _SHORT_S

    def arguments(self, quick: bool) -> tuple[str, ...]:
        """The bench's words, without the lab; an option of ``quick`` takes the place of the same one."""
        words, extra = list(self.words), (self.quick or ()) if quick else ()
        for option, value in zip(extra[::2], extra[1::2], strict=True):
            if option in words:
                words[words.index(option) + 1] = value
            else:
                words += [option, value]
        return (*words, "--json")

    def command(self, quick: bool) -> str:
        """The line that a user would write."""
        lab = f"commhooks lab {self.network} -- " if self.network else ""
        return f"{lab}commhooks {' '.join(self.arguments(quick))}"


# --- Figures -----------------------------------------------------------------------------------------------------------


def figure(name: str, **where: Any) -> Measure:
    """A field of the first row that has the given values."""

    def measure(rows: Rows) -> float | None:
        for row in rows:
            if all(row.get(key) == value for key, value in where.items()):
                value = row.get(name)
                return None if value is None else float(value)
        return None

    return measure


def _optimal(rows: Rows) -> float:
    return sum(
        math.isclose(row["rate"], row["lambda"], rel_tol=1e-4)
        and math.isclose(row["rate_allreduce"], row["tau"], rel_tol=1e-4)
        for row in rows
    )


def _ok_cases(rows: Rows) -> float:
    return sum(bool(row["ok"]) for row in rows)


def _named(rows: Rows) -> float:
    return sum(row["names_culprit"] is not False for row in rows)


def _slowest_error_of_the_dead(rows: Rows) -> float | None:
    """Of the ranks whose end nobody had to wait for."""
    dead = [row for row in rows if row["error"] == "PeerLost" and "SIGSTOP" not in row["case"]]
    return max((row["last_error_s"] for row in dead if row["last_error_s"] is not None), default=None)


def _allreduce(speedup: float, of_bound: float | None = None) -> tuple[Goal, ...]:
    goals = (Goal("speedup", figure("speedup"), speedup),)
    return goals + (() if of_bound is None else (Goal("of_bound", figure("of_bound"), of_bound),))


def _train(speedup: float, peer: str = "ddp", lacks: str = "not measured") -> Goal:
    name = f"speedup_{peer.replace('-', '_')}"
    return Goal(f"speedup over {peer}", figure(name), speedup, lacks=lacks, excused=peer == "horovod")


def _commit(name: str, policy: str, target: float) -> Goal:
    return Goal(f"{policy} {name}", figure(name, policy=policy), target, at_least=False)


# --- The calls -----------------------------------------------------------------------------------------------------------

UNEVEN = "nic:200,800,800,800"
SITES = "sites:4+4@200/1000"
EVEN = "nic:200,200,200,200"
_ALLREDUCE = ("bench", "allreduce", "--mb", "25")
_TRAIN = ("bench", "train", "--model")
_BRIEFLY = ("--seconds", "6")
_FEW = ("--rounds", "2", "--steps", "3")
_CONVERGE = ("bench", "converge", "--speeds", "1,1,3", "--exchange-steps")
_NO_HOROVOD = "can't run: Horovod isn't installed (commhooks doctor says more)"

CALLS: tuple[Call, ...] = (
    Call("N1", _ALLREDUCE, _allreduce(1.48, 0.97), UNEVEN, _BRIEFLY),
    Call("N2", _ALLREDUCE, _allreduce(7.0, 0.95), SITES, ("--rounds", "3")),
    Call("N3", _ALLREDUCE, _allreduce(0.98), "nic:800,800,800,800", _BRIEFLY),
    Call("N4", (*_ALLREDUCE, "--ranks", "4"), _allreduce(1.8), "", _BRIEFLY),
    Call(
        "N5",
        (*_TRAIN, "resnet50", "--balance", "1.0"),
        (_train(1.25), Goal("of_bound", figure("of_bound"), 0.93)),
        EVEN,
        _FEW,
    ),
    Call(
        "N5",
        (*_TRAIN, "vgg19", "--balance", "1.0"),
        (_train(1.25), Goal("of_bound", figure("of_bound"), 0.93)),
        EVEN,
        None,
    ),
    Call(
        "N6",
        (*_TRAIN, "resnet50", "--balance", "1.5", "--peers", "ddp,horovod"),
        (_train(1.7), _train(1.7, "horovod", _NO_HOROVOD)),
        UNEVEN,
        _FEW,
    ),
    Call(
        "N6",
        (*_TRAIN, "resnet50", "--balance", "6", "--peers", "ddp,horovod"),
        (_train(5.0), _train(5.0, "horovod", _NO_HOROVOD)),
        SITES,
        None,
    ),
    Call("N7", (*_TRAIN, "resnet50", "--balance", "0.3"), (_train(0.98),), EVEN, None),
    Call("N7", (*_TRAIN, "tiny", "--balance", "1.0"), (_train(0.98),), EVEN, _BRIEFLY),
    *(
        Call(
            "N8",
            (*_TRAIN, model, "--balance", "1.0", "--peers", "p3-baseline"),
            (_train(gain, "p3-baseline"),),
            EVEN,
            None,
        )
        for model, gain in (("resnet50", 1.25), ("vgg19", 1.66), ("sockeye", 1.38))
    ),
    Call(
        "N9",
        ("bench", "plans"),
        (
            Goal("allocations at the optimum", _optimal, 60),
            Goal("trees of a broadcast", lambda rows: max(row["trees"] for row in rows), 6, at_least=False),
            Goal(
                "best all-reduce over NCCL's rings", lambda rows: max(row["speedup"] for row in rows), 8.0
            ),
            Goal(
                "geometric mean of them",
                lambda rows: statistics.geometric_mean(row["speedup"] for row in rows),
                2.0,
            ),
        ),
    ),
    Call(
        "N11",
        (*_CONVERGE, "3", "--policies", "adsp,adsp-paper,bsp,fixed,adacomm,ssp"),
        (
            _commit("of_bsp", "adsp-paper", 0.28),
            _commit("of_best_fixed", "adsp-paper", 0.55),
            _commit("waiting_share", "adsp-paper", 0.12),
            _commit("of_bsp", "adsp", 0.23),
            _commit("waiting_share", "adsp", 0.05),
        ),
        "nic:200,200,200",
        ("--policies", "adsp,adsp-paper,bsp", "--longest-s", "60"),
        _LONG_S,
        _LONG_S / 6,
    ),
    Call(
        "N11",
        (*_CONVERGE, "1", "--policies", "adsp-paper,bsp"),
        (_commit("of_bsp", "adsp-paper", 0.40),),
        "nic:200,200,200",
        None,
        _LONG_S,
    ),
    Call(
        "faults",
        ("bench", "faults"),
        (
            Goal("cases ok", _ok_cases, 9),
            Goal("cases that name the culprit", _named, 9),
            Goal("seconds until a dead rank is an error on all", _slowest_error_of_the_dead, 5.0, at_least=False),
        ),
    ),
)  # fmt: skip
