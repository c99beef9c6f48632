"""``hvd.join()`` when gradients travel through our engine: a rank without data feeds zeros.

Where in the flow: ``commhooks.horovod.join`` -> **join** -> reducers.

Horovod's own ``join`` makes zeros for the all-reduces that a joined rank doesn't submit; it knows nothing of our engine's jobs.
Algorithm, on a rank that joins:
(1) one thread per optimizer takes part in step after step with zeros, while
(2) the calling thread is in Horovod's ``join``, which returns when every rank has come (and serves the script's other
    all-reduces meanwhile);
(3) then no thread begins a new step; the ranks exchange how far each has begun, and all go on to the furthest.

Invariants: afterwards all ranks stand at the same step, with nothing under way; averages divide by all ranks, joined or
not, as Horovod's do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from commhooks.errors import ConfigError
from commhooks.reducer import GradientReducer


class ZeroFeeder:
    """Takes part in one optimizer's steps with zeros, in a thread of its own."""

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = reducer
        self._changed = threading.Condition()
        self._begun = reducer.step  # steps before this one have begun
        self._until: int | None = None  # begin no step from there on; None: no end is known
        self._last = False  # whether `_until` is final
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"commhooks-join-{reducer.label}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while self._begin():
                self._reducer.reduce_zeros()
        except BaseException as error:
            self._error = error

    def _begin(self) -> bool:
        with self._changed:
            while self._until is not None and self._begun >= self._until:
                if self._last:
                    return False
                self._changed.wait()
            self._begun += 1
            return True

    def pause(self) -> int:
        """Begin no further step; returns how many have begun."""
        with self._changed:
            self._until = self._begun
            return self._begun

    def finish(self, until: int) -> None:
        """Go on to step `until` and end; raises what went wrong in the thread."""
        with self._changed:
            self._until, self._last = until, True
            self._changed.notify_all()
        self._thread.join()
        if self._error is not None:
            raise self._error


def join(
    reducers: Sequence[GradientReducer],
    native_join: Callable[[], int],
    exchange: Callable[[str, Any], list[Any]],
) -> int:
    """Join; see the module.

    Parameters
    ----------
    reducers : those of this rank, in the same order on all ranks
    native_join : Horovod's
    exchange : all-gather of JSON over all ranks

    Returns
    -------
    int
        The rank that joined last.
    """
    for reducer in reducers:
        if reducer.under_way:
            raise ConfigError(
                f"optimizer {reducer.label}: join() between backward() and step(); call step() first"
            )
        reducer.forget()
    feeders = [ZeroFeeder(reducer) for reducer in reducers]
    last = native_join()
    begun = exchange("join", [feeder.pause() for feeder in feeders])
    for feeder, until in zip(feeders, map(max, zip(*begun, strict=True)), strict=True):
        feeder.finish(until)
    return last
