"""The knobs: one table, and one loader that says where each value came from.

Where in the flow: entry points (``register``, ``run``, the command line) hand over their arguments and the environment;
every other module receives the finished, frozen ``Config``.

Invariants: the class ``Config`` *is* the table: a knob exists exactly when it has a field there, and the README's table,
``commhooks env`` and the comparison between ranks are all derived from it.  The loader is pure: the environment is an
argument.  Order: argument > environment > default, and ``COMMHOOKS=0`` beats all.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from commhooks.errors import ConfigError, Mismatch

PREFIX = "COMMHOOKS"
# Variables under our prefix that our own tools set for the processes they start; they are no settings of a user.
TOOL_PREFIXES = ("COMMHOOKS_LAB",)

Value = bool | int | float | str | None
T = TypeVar("T")


# --- Kinds of values: each parses what a user wrote and describes the valid form ---------------------------------------


class Kind(Protocol):
    """One kind of value: ``parse`` raises ``ValueError`` for anything that isn't of it."""

    def parse(self, written: object) -> Value:
        """The value that was written, as an argument (any type) or in the environment (a string)."""

    def show(self, value: Value) -> str:
        """The value as a user would write it."""

    @property
    def form(self) -> str:
        """The valid form in words, for the table and for error messages."""


class Plain:
    """Values that are shown as Python shows them."""

    def show(self, value: Value) -> str:
        """The value as a user would write it."""
        return str(value)


SWITCH_WORDS = {
    "1": True,
    "on": True,
    "true": True,
    "yes": True,
    "0": False,
    "off": False,
    "false": False,
    "no": False,
}


class Switch(Plain):
    """On or off."""

    form = "on or off (1/0, true/false, yes/no)"

    def parse(self, written: object) -> bool:
        """``True`` and ``False`` themselves, or one of the words."""
        try:
            return SWITCH_WORDS[str(written).strip().lower()]
        except KeyError:
            raise ValueError(written) from None

    def show(self, value: Value) -> str:
        """``on`` or ``off``."""
        return "on" if value else "off"


class Choice(Plain):
    """One of a few words."""

    def __init__(self, *words: str) -> None:
        self.words = words

    @property
    def form(self) -> str:
        """The words."""
        return " | ".join(self.words)

    def parse(self, written: object) -> str:
        """The word, in lower case."""
        word = str(written).strip().lower()
        if word not in self.words:
            raise ValueError(written)
        return word


class Number(Plain):
    """A finite number within bounds (both included), optionally whole, optionally ``auto`` (which is ``None``)."""

    def __init__(self, low: float, high: float, *, whole: bool = False, auto: bool = False) -> None:
        self.low, self.high, self.whole, self.auto = low, high, whole, auto

    @property
    def form(self) -> str:
        """The bounds in words."""
        noun = "a whole number" if self.whole else "a number"
        return f"{noun} from {self.low:,.12g} to {self.high:,.12g}" + (" | auto" if self.auto else "")

    def parse(self, written: object) -> float | int | None:
        """The number; ``50_000`` and ``5e4`` are both fine for a whole one, ``True`` isn't a number."""
        if isinstance(written, bool):
            raise ValueError(written)
        text = str(written).strip().lower()
        if self.auto and text == "auto":
            return None
        number = float(text)
        if not self.low <= number <= self.high or (self.whole and number != math.floor(number)):
            raise ValueError(written)
        return int(number) if self.whole else number

    def show(self, value: Value) -> str:
        """The number, or ``auto``."""
        return "auto" if value is None else f"{value:.12g}"


class Text(Plain):
    """Free text that isn't empty; ``None`` when nothing is set and the knob may be unset."""

    def __init__(self, form: str) -> None:
        self.form = form

    def parse(self, written: object) -> str:
        """The text without surrounding blanks; a path-like object gives its path."""
        text = os.fspath(written) if isinstance(written, os.PathLike) else written
        if not isinstance(text, str) or not text.strip():
            raise ValueError(written)
        return text.strip()

    def show(self, value: Value) -> str:
        """The text, or ``-`` when unset."""
        return "-" if value is None else str(value)


# --- The table ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Knob:
    """One row of the table.

    Attributes
    ----------
    name : the field of ``Config``, the keyword of ``register``.
    env : the environment variable.
    kind : parses and describes values.
    unit : the unit of a number, else empty.
    default : the value when nothing is set.
    meaning : one line for the user.
    agree : whether all ranks must have the same value.
    """

    name: str
    env: str
    kind: Kind
    unit: str
    default: Value
    meaning: str
    agree: bool


def knob(default: T, kind: Kind, meaning: str, *, unit: str = "", agree: bool = False) -> T:
    """Declare a row; typed as its default so that ``Config``'s fields keep their own types."""
    row = {"kind": kind, "meaning": meaning, "unit": unit, "agree": agree}
    return dataclasses.field(default=default, metadata=row)


@dataclass(frozen=True)
class Config:
    """All settings of one engine; ``Config()`` has every default, ``Config.load`` reads arguments and environment."""

    enabled: bool = knob(
        True, Switch(), "Everything on or off; `COMMHOOKS=0` beats every argument and setting.", agree=True
    )
    overlap: str = knob(
        "auto",
        Choice("auto", "backward", "forward"),
        "What communication overlaps with: the backward pass, or also the optimizer step and the next forward. "
        "`auto`: forward when an optimizer is passed.",
        agree=True,
    )
    schedule: str = knob(
        "auto",
        Choice("auto", "trees", "ring", "native"),
        "How slices travel: packed trees, ring pairs, or the framework's own collective. "
        "`auto`: the fastest for the topology.",
        agree=True,
    )
    slice_numel: int | None = knob(
        None,
        Number(1, 2**31 - 1, whole=True, auto=True),
        "Largest slice; P3's paper uses 50,000.",
        unit="elements",
        agree=True,
    )
    priority: str = knob(
        "layer",
        Choice("layer", "fifo"),
        "Order of sending: the first forward layer first, or first come, first served.",
        agree=True,
    )
    topology: str = knob(
        "uniform",
        Text("probe | uniform | a topology string such as `nic:200,800` | a file"),
        "The network to plan for: assumed uniform, measured at start, described, or read from a file.",
        agree=True,
    )
    probe_fallback: bool = knob(
        False,
        Switch(),
        "With `topology=probe`: when measuring fails, assume a uniform network instead of stopping.",
        agree=True,
    )
    links: str = knob(
        "auto",
        Choice("auto", "tcp", "shm"),
        "How bytes move between ranks; `auto`: memory on the same host, TCP between hosts.",
        agree=True,
    )
    interface: str | None = knob(
        None,
        Text("the name of a network interface, such as `eth0`"),
        "Interface to listen on. Unset: `GLOO_SOCKET_IFNAME`, then the route to the rendezvous.",
    )
    timeout_s: float = knob(
        300.0,
        Number(0.1, 86_400),
        "A live peer that delivers nothing for this long is an error that says what was awaited.",
        unit="s",
    )
    heartbeat_s: float = knob(
        20.0,
        Number(0.1, 3_600),
        "A peer process that is silent for this long counts as lost.",
        unit="s",
        agree=True,
    )
    commit: str = knob(
        "none",
        Choice("none", "adsp", "adsp-paper", "ssp", "adacomm", "fixed", "bsp"),
        "When workers exchange: every step (`none`), or by a commit policy (ADSP and its baselines).",
        agree=True,
    )
    check_period_s: float = knob(
        60.0,
        Number(0.01, 86_400),
        "ADSP's check period: the time between checkpoints, at which all workers have equal commit counts.",
        unit="s",
        agree=True,
    )
    commit_rate: float | None = knob(
        None,
        Number(0.001, 1_000_000, auto=True),
        "Commits of each worker per check period; `auto`: searched while training.",
        unit="commits",
        agree=True,
    )
    commit_server: str = knob(
        "sharded",
        Choice("sharded", "rank0"),
        "Who holds the parameters of a commit policy: all ranks by their bandwidth, or rank 0 alone (then any other "
        "rank may die and the rest go on).",
        agree=True,
    )
    commit_checkpoint: str | None = knob(
        None,
        Text("the path of a file"),
        "File to which the parameter-server shards are saved once per check period.",
    )
    checksum: bool = knob(
        False,
        Switch(),
        "Check every frame's bytes on arrival; costs time, finds broken networks.",
        agree=True,
    )
    tcp_congestion: str = knob(
        "auto",
        Text("auto | the name of one of the kernel's congestion controls, such as `cubic`"),
        "TCP congestion control of our sockets.",
    )
    send_window: int = knob(
        0,
        Number(0, 1_000_000, whole=True),
        "Slices in flight per link; 0: as many as the kernel's small buffer takes, 1: stop and wait, as in P3's paper.",
        unit="slices",
        agree=True,
    )
    replan: bool = knob(
        True,
        Switch(),
        "Plan again while training when links no longer run as planned (needs a topology that is not `uniform`).",
        agree=True,
    )
    timeline: str | None = knob(
        None,
        Text("the path of a file"),
        "Write a trace (Perfetto/Chrome format) to this file; `{rank}` stands for the rank.",
    )
    log_level: str = knob(
        "info",
        Choice("debug", "info", "warning", "error"),
        "Level of the `commhooks` logger, set by the `commhooks` commands and zero-code runs only.",
    )
    _sources: tuple[tuple[str, str], ...] = dataclasses.field(default=(), compare=False, repr=False)

    @classmethod
    def load(cls, arguments: Mapping[str, object], environ: Mapping[str, str]) -> Config:
        """Read the settings.

        Parameters
        ----------
        arguments : by field name; ``None`` means "not given".
        environ : the environment; only names that start with ``COMMHOOKS`` are looked at.

        Raises
        ------
        ConfigError
            An unknown name (with the nearest match), or a bad value (with its name and the valid form).
            Nothing but the switch itself is read when ``COMMHOOKS`` is off.
        """
        if environ.get(PREFIX) is not None and not _parsed(KNOBS[0], environ[PREFIX], PREFIX):
            return cls(enabled=False, _sources=(("enabled", PREFIX),))
        given = {name: value for name, value in arguments.items() if value is not None}
        _refuse_unknown(given, environ)
        values: dict[str, Any] = {}
        sources: list[tuple[str, str]] = []
        for row, written, source in _written(given, environ):
            values[row.name] = _parsed(row, written, row.name if source == "argument" else source)
            sources.append((row.name, source))
        return cls(**values, _sources=tuple(sources))

    @property
    def sources(self) -> dict[str, str]:
        """For each field ``argument``, ``default``, or the name of the environment variable it came from."""
        return {row.name: "default" for row in KNOBS} | dict(self._sources)

    def must_agree(self) -> dict[str, Value]:
        """The values that must be equal on all ranks, ready for JSON; see ``compare_across_ranks``."""
        return {row.name: getattr(self, row.name) for row in KNOBS if row.agree}


def _rows() -> Iterator[Knob]:
    for field in dataclasses.fields(Config):
        if field.metadata:
            env = PREFIX if field.name == "enabled" else f"{PREFIX}_{field.name.upper()}"
            yield Knob(name=field.name, env=env, default=cast(Value, field.default), **field.metadata)


KNOBS: tuple[Knob, ...] = tuple(_rows())


# --- Loading and comparing ---------------------------------------------------------------------------------------------


def _written(given: Mapping[str, object], environ: Mapping[str, str]) -> Iterator[tuple[Knob, object, str]]:
    """Each knob that someone set, what was written, and where (``argument`` or the variable's name)."""
    for row in KNOBS:
        if row.name in given:
            yield row, given[row.name], "argument"
        elif row.env in environ:
            yield row, environ[row.env], row.env


def _parsed(row: Knob, written: object, name: str) -> Value:
    try:
        return row.kind.parse(written)
    except ValueError:
        unit = f" ({row.unit})" if row.unit else ""
        raise ConfigError(f"{name}={written!r}: expected {row.kind.form}{unit}") from None


def _refuse_unknown(given: Mapping[str, object], environ: Mapping[str, str]) -> None:
    """Unknown names are errors: a misspelt knob that is silently ignored costs its user a whole run."""
    _refuse("setting", given, [row.name for row in KNOBS])
    ours = [name for name in environ if name.split("_")[0] == PREFIX and not name.startswith(TOOL_PREFIXES)]
    _refuse("environment variable", ours, [row.env for row in KNOBS])


def _refuse(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    by_short = {_short(name): name for name in known}
    for name in sorted(set(names) - set(by_short.values())):
        nearest = by_short[difflib.get_close_matches(_short(name), by_short, n=1, cutoff=0.0)[0]]
        raise ConfigError(
            f"unknown {what} {name}; the nearest known one is {nearest} (all of them: `commhooks env`)"
        )


def _short(name: str) -> str:
    """The part that tells names apart: what they all start with would make them all look alike."""
    return name.removeprefix(f"{PREFIX}_")


def compare_across_ranks(by_rank: Sequence[Mapping[str, Value]]) -> None:
    """Check that every rank's ``Config.must_agree()`` is the same.

    Parameters
    ----------
    by_rank : the dictionaries in rank order.

    Raises
    ------
    Mismatch
        Names each field that differs, and the values of rank 0 and of the first rank that has another one.
    """
    names = [row.name for row in KNOBS if any(row.name in values for values in by_rank)]
    foreign = sorted({name for values in by_rank for name in values} - set(names))
    problems = [text for name in names + foreign if (text := _disagreement(name, by_rank))]
    if problems:
        raise Mismatch("settings that must be equal on all ranks differ: " + "; ".join(problems))


def _disagreement(name: str, by_rank: Sequence[Mapping[str, Value]]) -> str | None:
    """``None`` when all agree; a rank that doesn't know the field (another version) disagrees."""
    missing = object()
    seen = [values.get(name, missing) for values in by_rank]
    for rank, value in enumerate(seen):
        if value != seen[0]:
            first, other = ("no such field" if v is missing else repr(v) for v in (seen[0], value))
            env = next((row.env for row in KNOBS if row.name == name), "a field of another version")
            return f"{name} ({env}): rank 0 has {first}, rank {rank} has {other}"
    return None
