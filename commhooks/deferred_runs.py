"""Opens gates: runs the users' optimizers on parameters whose averages are there, a few at a time.

Where in the flow: deferred_steps (a read, a flush) -> **deferred_runs** -> deferred_optimizer; waits in deferred_flow.

Invariants: a parameter is stepped once per recorded call, with that call's settings; what runs here isn't seen by the watch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence

from commhooks.core.gates import GateState
from commhooks.deferred_flow import GradientFlow
from commhooks.deferred_gradients import LocalGradients
from commhooks.deferred_optimizer import PartialStepper, Recorded
from commhooks.reads import ReadWatch
from commhooks.timeline import Recorder

# While a read waits, complete parameters are stepped in runs of about this size, then arrivals are looked at again.
_RUN_NUMEL = 1 << 18
# A read also steps its complete neighbours up to this size: a step's fixed cost is that of some thousand elements.
_NEIGHBOURS_NUMEL = 1 << 15


class PartialRuns:
    """The steps that were asked for and haven't run.

    Parameters
    ----------
    flow : knows what is complete
    gradients : what the user's ``.grad`` held
    watch : paused while we read
    timeline : where to record runs; None: nowhere
    """

    def __init__(
        self, flow: GradientFlow, gradients: LocalGradients, watch: ReadWatch, timeline: Recorder | None
    ) -> None:
        self._flow = flow
        self._gradients = gradients
        self._watch = watch
        self._timeline = timeline
        self._recorded: dict[int, tuple[PartialStepper, Recorded]] = {}
        self.partial_steps = 0

    def close(self, numbers: Sequence[int], stepper: PartialStepper, recorded: Recorded) -> None:
        """A step of `numbers` was asked for: until it has run, nobody may read them."""
        self._flow.gates.close(numbers)
        self._recorded.update((number, (stepper, recorded)) for number in numbers)

    def open_all(self) -> None:
        """Step everything that was asked for."""
        gates = self._flow.gates
        while gates.closed:
            self.open(gates.closed_parameters())

    def open(self, numbers: Sequence[int]) -> None:
        """Step `numbers` as soon as they are complete, and others that are while waiting."""
        if not numbers:
            return
        flow = self._flow
        flow.wait(numbers, self._step_some)
        wanted = [number for number in numbers if flow.gates.state(number) is GateState.CLOSED]
        budget = _NEIGHBOURS_NUMEL
        for number in flow.gates.ready():
            budget -= flow.parameters[number].numel()
            if budget < 0:
                break
            wanted.append(number)
        self._run(dict.fromkeys(wanted))

    def _step_some(self) -> bool:
        """Step a run of complete parameters; False when there is none."""
        chosen = []
        numel = 0
        for number in self._flow.gates.ready():
            chosen.append(number)
            numel += self._flow.parameters[number].numel()
            if numel >= _RUN_NUMEL:
                break
        self._run(chosen)
        return bool(chosen)

    def _run(self, numbers: Iterable[int]) -> None:
        """Run the optimizers on complete parameters."""
        flow = self._flow
        groups: dict[int, tuple[PartialStepper, Recorded, list[int]]] = {}
        for number in numbers:
            stepper, recorded = self._recorded[number]
            groups.setdefault(id(recorded), (stepper, recorded, []))[2].append(number)
        for stepper, recorded, chosen in groups.values():
            parameters = [flow.parameters[number] for number in chosen]
            averages = [flow.average(number) for number in chosen]
            start_s = time.monotonic()
            with self.unwatched():
                stepper.run(recorded, parameters, averages)
            more = f" +{len(chosen) - 1}" if len(chosen) > 1 else ""
            self.record("steps", self.name(chosen[0]) + more, start_s)
            flow.gates.stepped(chosen)
            for number in chosen:
                del self._recorded[number]
            self._gradients.hand_back(parameters, averages)
            self.partial_steps += 1

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """What runs here reads on our behalf."""
        before, self._watch.paused = self._watch.paused, True
        try:
            yield
        finally:
            self._watch.paused = before

    def record(self, track: str, name: str, start_s: float) -> None:
        """On the timeline: what began at `start_s` has ended now."""
        if self._timeline is not None:
            self._timeline.span(track, name, start_s, time.monotonic(), self._flow.step)

    def name(self, number: int) -> str:
        return self._flow.name(number) if self._timeline is not None else ""
