"""Side-by-side timing: the same work by several contenders, in turn, in one run, on all ranks together.

Where in the flow: ``bench allreduce``, ``bench train`` and the demo describe their contenders -> **harness** -> medians,
tables, JSON.

How a figure comes about: the result of every contender is checked; each runs once untimed; then rounds A B C, A B C, ...
until the time budget is used.  All ranks enter a measurement together (a barrier), and it took as long as on the slowest
rank.  A figure is the median over the rounds, with minimum and maximum beside it.  The *null* figure compares the first
contender with itself (its even rounds against its odd ones): what it is away from 1 is what the run can't tell.

Invariants: nothing is timed before it was checked; all ranks do the same number of rounds; contenders alternate, so that
what changes slowly (heat, other programs) changes all of them.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from commhooks.errors import ConfigError, MissingDependency
from commhooks.tables import markdown

FEWEST_ROUNDS = 3
MOST_ROUNDS = 500


class Ensemble(Protocol):
    """What timing together needs of the ranks."""

    def barrier(self) -> None:
        """Return when all ranks have called it."""

    def slowest(self, duration_s: float) -> float:
        """The largest of all ranks' values, on all ranks."""


class Alone:
    """An ensemble of one."""

    def barrier(self) -> None:
        """Nobody to wait for."""

    def slowest(self, duration_s: float) -> float:
        """The only value."""
        return duration_s


class GlooEnsemble:
    """The ranks of the default process group, by Gloo (which no contender under test may use from another thread)."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist = torch, dist

    def barrier(self) -> None:
        """Gloo's barrier."""
        self._dist.barrier()

    def slowest(self, duration_s: float) -> float:
        """Gloo's maximum."""
        value = self._torch.tensor([duration_s], dtype=self._torch.float64)
        self._dist.all_reduce(value, op=self._dist.ReduceOp.MAX)
        return float(value)


@dataclass(frozen=True)
class Contender:
    """One way to do the work.

    Attributes
    ----------
    name : the JSON field's stem: ``peer`` gives ``peer_s``, ``peer_min_s``, ``peer_max_s``.
    work : what is timed.
    check : does the work on known input and raises when the result is wrong; runs before anything is timed.
    prepare : runs before each measurement, untimed.
    """

    name: str
    work: Callable[[], object]
    check: Callable[[], object]
    prepare: Callable[[], object] = field(default=lambda: None)


@dataclass(frozen=True)
class Timing:
    """The durations of one contender, in seconds, in the order of the rounds."""

    durations_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """What is reported."""
        return statistics.median(self.durations_s)

    @property
    def min_s(self) -> float:
        """The fastest round."""
        return min(self.durations_s)

    @property
    def max_s(self) -> float:
        """The slowest round."""
        return max(self.durations_s)

    @property
    def null_ratio(self) -> float:
        """Even rounds' median over odd rounds' median: 1 but for what the run can't tell."""
        if len(self.durations_s) < 2:
            return 1.0
        return statistics.median(self.durations_s[::2]) / statistics.median(self.durations_s[1::2])

    def fields(self, name: str, digits: int = 6) -> dict[str, float]:
        """``{name}_s``, ``{name}_min_s`` and ``{name}_max_s``."""
        values = {"s": self.median_s, "min_s": self.min_s, "max_s": self.max_s}
        return {f"{name}_{key}": round(value, digits) for key, value in values.items()}


def side_by_side(
    contenders: Sequence[Contender],
    ensemble: Ensemble,
    *,
    rounds: int | None = None,
    budget_s: float = 30.0,
    fewest: int = FEWEST_ROUNDS,
    progress: Callable[[int, int], object] = lambda done, of: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time contenders in turn.

    Parameters
    ----------
    contenders
        In the order of a round; equal on all ranks.
    ensemble
        The ranks.
    rounds
        How many; None: as many as fit into `budget_s`, judged by the first round, at least `fewest`.
    budget_s
        The time for all rounds together, on the slowest rank.
    progress
        Called after each round with its number and the number of all.
    clock
        For tests.

    Returns
    -------
    dict
        For each contender's name its timing, the same on all ranks.

    Raises
    ------
    ConfigError
        No contenders, names that aren't different, or no rounds; and whatever a contender's `check` raises.
    """
    names = [contender.name for contender in contenders]
    if not names or len(set(names)) != len(names) or (rounds is not None and rounds < 1):
        raise ConfigError(
            f"side by side: contenders {names}, rounds {rounds}; expected different names and at least 1"
        )
    for contender in contenders:
        contender.check()
    for contender in contenders:  # buffers, caches, connections, congestion windows
        _measure(contender, ensemble, clock)
    durations: dict[str, list[float]] = {name: [] for name in names}
    start = clock()
    done, planned = 0, rounds or fewest
    while done < planned:
        for contender in contenders:
            durations[contender.name].append(_measure(contender, ensemble, clock))
        done += 1
        if done == 1 and rounds is None:
            planned = _rounds_for(budget_s, ensemble.slowest(clock() - start), fewest)
        progress(done, planned)
    return {name: Timing(tuple(values)) for name, values in durations.items()}


def _rounds_for(budget_s: float, round_s: float, fewest: int) -> int:
    return max(fewest, min(MOST_ROUNDS, int(budget_s / max(round_s, 1e-9))))


def _measure(contender: Contender, ensemble: Ensemble, clock: Callable[[], float]) -> float:
    contender.prepare()
    ensemble.barrier()
    start = clock()
    contender.work()
    return ensemble.slowest(clock() - start)


# --- Rendering ---------------------------------------------------------------------------------------------------------

Row = Mapping[str, Any]


def render(rows: Sequence[Row], as_json: bool, notes: Sequence[str] = ()) -> str:
    """A JSON array, or a Markdown table with notes below it.

    In the table a figure's minimum and maximum stand in its own cell; in JSON all fields are as given.
    """
    if as_json:
        return json.dumps([dict(row) for row in rows], indent=2, allow_nan=False)
    header = list(dict.fromkeys(name for row in rows for name in row if not _is_extreme(name, row)))
    table = markdown(header, [[_cell(row, name) for name in header] for row in rows])
    return "\n".join([table, *(["", *notes] if notes else [])])


def _is_extreme(name: str, row: Row) -> bool:
    return any(name.endswith(end) and name.removesuffix(end) + "_s" in row for end in ("_min_s", "_max_s"))


def _cell(row: Row, name: str) -> str:
    value = row.get(name)
    low, high = (row.get(name.removesuffix("_s") + end) for end in ("_min_s", "_max_s"))
    if not name.endswith("_s") or value is None or low is None or high is None:
        return _shown(value)
    return f"{_shown(value)} ({_shown(low)}–{_shown(high)})"


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def null_note(name: str, timing: Timing) -> str:
    """The line that says how far two equal contenders seemed apart in this run."""
    return (
        f"null A/A ({name} against itself, {len(timing.durations_s)} rounds in turn): {timing.null_ratio:.3f} "
        "(1 is perfect; smaller differences than this mean nothing)"
    )


def ratio(numerator: float | None, denominator: float | None, digits: int = 4) -> float | None:
    """A rounded quotient; None when either isn't known."""
    if numerator is None or not denominator:
        return None
    return round(numerator / denominator, digits)


def positive_numbers(name: str, text: str) -> tuple[float, ...]:
    """What an option with commas says.

    Raises
    ------
    ConfigError
        Something in it isn't a number above 0.
    """
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) <= 0:
        raise ConfigError(
            f"{name} {text!r}: expected numbers above 0 with commas between them, such as 1,1,3"
        )
    return numbers


def pyplot() -> Any:
    """matplotlib's, drawing to files.

    Raises
    ------
    MissingDependency
        matplotlib isn't there.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise MissingDependency("--plot needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as drawing

    return drawing
