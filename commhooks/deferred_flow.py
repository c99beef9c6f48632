"""Gradients on their way: from DDP's buckets to averages, parameter by parameter, in forward order.

Where in the flow: DDP hook -> **deferred_flow** (slices, exchange, gates) -> deferred, which steps what is complete.

Parameters are numbered in forward order: as declared at first, as rank 0's first forward read them from the second step on, and
again when the order is seen to have changed.  The numbers are equal on all ranks.

Invariants: a step's buckets leave only after everything of the step before is back and used; priorities change only then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import torch

from commhooks.core.gates import ForwardOrder, Gates, GateState, displaced
from commhooks.deferred_buckets import BucketHome, Unit
from commhooks.errors import InternalError
from commhooks.exchanges import SliceExchange
from commhooks.layers import LayerOrder

# Every so many steps ranks ask rank 0 whether the forward order has changed: a message through the launcher's store.
RELEARN_STEPS = 64
# A forward in which fewer reads than this came too early is served well enough by the order there is.
_TOLERATED_SHARE = 0.1
# DDP rebuilds its buckets once, before the second step (the third, for a static graph).  From the step after that one on, a
# gradient's place in them is known beforehand.
_STABLE_STEP = 3


class GradientFlow:
    """The gradients of one model on one rank.

    Parameters
    ----------
    model : the module whose parameters are trained
    parameters : those DDP reduces, as declared
    exchange : averages slices
    by_layer : send by forward order; False sends first come, first served
    static_graph : whether DDP was told that the graph never changes
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Sequence[torch.Tensor],
        exchange: SliceExchange,
        by_layer: bool,
        static_graph: bool,
    ) -> None:
        self._stable_step = _STABLE_STEP + static_graph
        self._exchange = exchange
        self._by_layer = by_layer
        self._declared = tuple(parameters)
        self._declared_place = {id(parameter): place for place, parameter in enumerate(parameters)}
        self._layers = LayerOrder(model)
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._homes: dict[int, BucketHome] = {}
        self._lodgings: dict[int, tuple[BucketHome, int]] = {}
        self._buckets_seen: set[int] = set()
        self._epoch = exchange.epoch
        self._learned: tuple[int, ...] = tuple(range(len(parameters)))
        self.step = 0
        self.waited_s = 0.0
        self.slices = 0
        self._number()

    def _number(self) -> None:
        self.parameters = tuple(self._declared[place] for place in self._learned)
        self._numbers = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        self._averages: dict[int, torch.Tensor] = {}
        self.gates = Gates(len(self.parameters))
        self._homes.clear()
        self._lodgings.clear()
        tell = getattr(self._exchange, "name_layers", None)
        if tell is not None:
            names = self.forward_names()
            priorities = [self._layers.place(parameter)[0] for parameter in self.parameters]
            tell(
                dict(zip(reversed(priorities), reversed(names), strict=True))
            )  # a layer goes by its first parameter

    # -- a step's gradients leave -----------------------------------------------------------------------------------

    def has_seen(self, bucket: int) -> bool:
        """Whether DDP has handed over this bucket in the step that began last."""
        return bucket in self._buckets_seen

    def begin_step(self, seen: ForwardOrder | None) -> bool:
        """Another backward pass; nothing of the last one is outstanding.  Collective at some steps.

        Returns whether parameters have new numbers.

        Parameters
        ----------
        seen : what the last forward read, if all of it was seen
        """
        self._buckets_seen.clear()
        self.step += 1
        self._exchange.begin(self.step)
        if self._exchange.epoch != self._epoch:
            self._epoch = self._exchange.epoch
            self._homes.clear()
            self._lodgings.clear()
        for home in self._homes.values():
            for unit in home.units:
                unit.begin()
        return (self.step == 2 or self.step % RELEARN_STEPS == 0) and self._agree_on_order(seen)

    def _agree_on_order(self, seen: ForwardOrder | None) -> bool:
        wish: tuple[int, ...] = ()
        if seen is not None and seen.seen:
            order = seen.order()
            tolerated = _TOLERATED_SHARE * seen.seen if self.step > 2 else 0
            if displaced(range(len(order)), order[: seen.seen]) > tolerated:
                wish = tuple(self._declared_place[id(self.parameters[number])] for number in order)
        agreed = tuple(self._exchange.agree("forward order", wish))
        if agreed:
            self._learned = agreed
            self._layers.learn([self._declared[place] for place in agreed])
            self._number()
        return bool(agreed)

    def gradient_ready(self, parameter: torch.Tensor) -> None:
        """A gradient is in ``.grad``, before DDP's bucket is full; its unit leaves when it is complete.  Doesn't block.

        Left to the bucket: the first steps, after which DDP rebuilds its buckets, and exchanges that need one order.
        """
        if (
            self.step < self._stable_step
            or not self._exchange.any_order
            or id(parameter) not in self._lodgings
        ):
            return
        home, member = self._lodgings[id(parameter)]
        unit = home.unit_of[member]
        gradient = parameter.grad
        if unit.departed or gradient is None or gradient.layout is not torch.strided:
            return
        home.averages[member].copy_(gradient)
        unit.missing.discard(member)
        if not unit.missing:
            self._depart(home, unit)

    def bucket_ready(self, index: int, buffer: torch.Tensor, parameters: Sequence[torch.Tensor]) -> None:
        """DDP's bucket is full: what hasn't left of it leaves.  Doesn't block."""
        home = self._homes.get(index)
        if home is None or not home.fits(buffer, parameters):
            home = self._settle_in(index, buffer, parameters)
        self._buckets_seen.add(index)
        for unit in home.units:
            if not unit.departed:
                unit.flat.copy_(buffer[unit.start : unit.stop])
                self._depart(home, unit)

    def _settle_in(self, index: int, buffer: torch.Tensor, parameters: Sequence[torch.Tensor]) -> BucketHome:
        """A bucket of new content, after DDP's rebuild or with a new forward order."""
        numbers = [self._numbers[id(parameter)] for parameter in parameters]
        left = [number for number in numbers if self.gates.state(number) is not GateState.OPEN]
        if left:
            raise InternalError(
                f"step {self.step} bucket {index}: DDP changed its buckets in the middle of a backward pass, after gradients "
                f"of parameters {left} had left by the old ones; please report this with the version of torch"
            )
        home = BucketHome(index, buffer, parameters, numbers, self._layers, self._by_layer, self._exchange)
        self._homes[index] = home
        self._lodgings.update((id(parameter), (home, member)) for member, parameter in enumerate(parameters))
        return home

    def _depart(self, home: BucketHome, unit: Unit) -> None:
        unit.departed = True
        numbers = [home.numbers[member] for member in unit.members]
        self._averages.update(
            (number, home.averages[member]) for number, member in zip(numbers, unit.members, strict=True)
        )
        self.gates.depart(unit.slices, numbers)
        self.slices += len(unit.slices)
        if unit.slices:
            self._exchange.start(self.step, unit.bucket, unit.flat, unit.layout)

    def seal(self) -> None:
        """All buckets of this backward pass have left."""
        self._exchange.seal()

    # -- averages come back -----------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Take note of what came back.  Doesn't block; raises the exchange's error."""
        for key in self._exchange.poll():
            self.gates.slice_done(key)

    def wait(self, numbers: Iterable[int], meanwhile: Callable[[], bool] | None = None) -> None:
        """Block until the averages of `numbers` are there.

        Parameters
        ----------
        numbers : parameters
        meanwhile : called instead of blocking as long as it returns True
        """
        chosen = list(numbers)
        self.drain()
        while awaited := self.gates.awaited(chosen):
            if meanwhile is None or not meanwhile():
                start = time.perf_counter()
                self._exchange.wait(awaited)
                self.waited_s += time.perf_counter() - start
            self.drain()

    def wait_for_all(self) -> None:
        """Block until nothing is outstanding."""
        self.wait(range(len(self.parameters)))

    # -- questions --------------------------------------------------------------------------------------------------

    def number(self, parameter: torch.Tensor) -> int | None:
        """A parameter's place in forward order; None for one that DDP doesn't reduce."""
        return self._numbers.get(id(parameter))

    def average(self, number: int) -> torch.Tensor:
        """Where a parameter's average is, or will be."""
        return self._averages[number]

    def in_flight(self, numbers: Iterable[int]) -> list[int]:
        """Those of `numbers` whose gradient left and whose step wasn't asked for."""
        return [number for number in numbers if self.gates.state(number) is GateState.IN_FLIGHT]

    def name(self, number: int) -> str:
        """A parameter's name."""
        return self._names[id(self.parameters[number])]

    def forward_names(self) -> list[str]:
        """The parameters' names in forward order."""
        return [self._names[id(parameter)] for parameter in self.parameters]
