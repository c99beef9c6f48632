"""Averages an optimizer's gradients as they appear, one parcel at a time.

Where in the flow: autograd -> **reducer** -> sender (our engine, or Horovod's own all-reduce) -> the user's optimizer.

Algorithm, per step and parameter:
(1) each backward pass adds to the gradient; autograd tells us after it has (a post-accumulate hook);
(2) after ``backward_passes_per_step`` passes the parameter is ready; when all members of its parcel are, the parcel is sent;
(3) when a backward pass ends and everything has been sent, we wait there and put the results into ``.grad``: what
    reads gradients after ``backward()`` (clipping, GradScaler, logging) sees averages, as with DDP;
(4) where parameters took no part (their parcels are not sent yet), ``synchronize()`` fills in zeros, sends and waits: a
    rank that waited for its peers before having sent everything itself could wait for ever.

Invariants: a gradient is reduced exactly once per step; all ranks send the same parcels each step; a gradient that was
changed while its sum was under way is an error, never a lost edit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from commhooks.errors import ConfigError, UnsupportedModelError
from commhooks.handle import Handle, Off
from commhooks.parcels import Parcel, make_parcels
from commhooks.reduction import AgreedOrder, Options, Pending, Sender, World, agree_on_order, few
from commhooks.stall_watch import Progress


@dataclass
class _Piece:
    """One gradient inside a parcel that was sent."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    version: int
    flat: torch.Tensor
    shape: torch.Size
    context: Any
    in_place: bool


class _Plan:
    """Parcels over the parameters that are trainable now, and the sender for them; one per world and set of parameters."""

    def __init__(self, token: object, order: AgreedOrder, sender: Sender) -> None:
        self.token = token
        self.entries = order.entries
        self.parameters = parameters = order.parameters
        self.sender = sender
        self.position = {parameter: position for position, parameter in enumerate(parameters)}
        self.parcels: tuple[Parcel, ...] = ()
        self.parcel_of: dict[int, Parcel] = {}

    def divide(self, groups: Sequence[Sequence[int]], small_numel: int) -> None:
        """Make the parcels."""
        self.parcels = make_parcels(self.entries, groups, small_numel)
        self.parcel_of = {position: parcel for parcel in self.parcels for position in parcel.members}


class GradientReducer:
    """Reduces the gradients of one optimizer.

    Parameters
    ----------
    label : the optimizer's name in messages, such as ``SGD #0``
    named : (name, parameter) in forward order; the frozen ones too, they may be unfrozen later
    world : the launcher's side
    passes : backward passes per step
    options : the user's choices
    """

    def __init__(
        self,
        label: str,
        named: Sequence[tuple[str, torch.Tensor]],
        world: World,
        passes: int,
        options: Options,
    ) -> None:
        self.label = label
        self.passes = passes
        self.step = 0
        self.waiting_for: Parcel | None = None
        self._world = world
        self._options = options
        self._named: list[tuple[str, torch.Tensor]] = []
        self._hooks: dict[torch.Tensor, Any] = {}
        self._sparse: set[torch.Tensor] = set()
        self._plan: _Plan | None = None
        self._reset_step()
        self.add_parameters(named)

    # -- who takes part -----------------------------------------------------------------------------------------------

    def add_parameters(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Take more parameters in; the plan is made anew before the next step."""
        self._named.extend(named)
        self._watch_parameters()

    def _watch_parameters(self) -> None:
        """Hooks can only sit on trainable parameters: those unfrozen since get theirs now."""
        hook = _weak_hook(weakref.ref(self))
        for _, parameter in self._named:
            if parameter.requires_grad and parameter not in self._hooks:
                self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[attr-defined]

    def plan(self) -> _Plan:
        """The plan for the world and the trainable parameters of now; collective when they have changed."""
        plan = self._plan
        if plan is not None and (plan.token is self._world.token() and self._still_trainable(plan)):
            return plan
        self.close()
        self._plan = self._make_plan()
        self._reset_step()
        return self._plan

    def _still_trainable(self, plan: _Plan) -> bool:
        if self._arrivals:  # decided once per step
            return True
        return [p for _, p in self._named if p.requires_grad and p in plan.position] == [
            p for _, p in self._named if p.requires_grad or p in plan.position
        ]

    def _make_plan(self) -> _Plan:
        self._watch_parameters()
        order = agree_on_order(self._world, self._named, self.label)
        sender = self._world.open_sender(order.entries, self.label)
        plan = _Plan(self._world.token(), order, sender)
        groups = [[plan.position[p] for p in group if p in plan.position] for group in self._options.groups]
        plan.divide(groups, plan.sender.small_numel if self._options.elementwise else 0)
        self.step = 0  # a rank that joins the world now counts from here
        self._world.watch(self)
        return plan

    # -- one step -----------------------------------------------------------------------------------------------------

    def _reset_step(self) -> None:
        self._arrivals: dict[torch.Tensor, int] = {}
        self._left: dict[int, int] = {}  # parcel -> members that aren't ready
        self._sent: dict[int, tuple[list[_Piece], torch.Tensor, Pending]] = {}
        self._sparse_sent: dict[torch.Tensor, Callable[[], torch.Tensor]] = {}
        self.synchronized = False
        self._callback_queued = False

    @property
    def under_way(self) -> bool:
        """Whether gradients of this step have been sent and not been waited for."""
        return bool(self._sent or self._sparse_sent)

    def missing(self) -> list[str]:
        """Names of the parameters whose gradient isn't ready in this step, in forward order."""
        plan = self._plan
        if plan is None:
            return []
        ready = self._arrivals
        return [e.name for e, p in zip(plan.entries, plan.parameters) if ready.get(p, 0) < self.passes]

    def progress(self) -> Progress:
        """Where this reducer stands, for the watch (its thread; reads only)."""
        plan, parcel = self._plan, self.waiting_for
        waiting = (
            tuple(plan.entries[i].name for i in parcel.members)
            if plan is not None and parcel is not None
            else ()
        )
        return Progress(self.label, self.step, waiting, tuple(self.missing()))

    def _arrived(self, parameter: torch.Tensor) -> None:
        """Autograd has added to this parameter's gradient (its thread; nothing here waits for a peer)."""
        plan = self.plan()
        count = self._arrivals[parameter] = self._arrivals.get(parameter, 0) + 1
        self.synchronized = False
        if count > self.passes:
            self._refuse_pass(plan, parameter, count)
        if not self._callback_queued:
            self._callback_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)  # type: ignore[attr-defined]
        if count == self.passes:
            self._ready(plan, parameter)

    def _refuse_pass(self, plan: _Plan, parameter: torch.Tensor, count: int) -> None:
        name = plan.entries[plan.position[parameter]].name
        raise ConfigError(
            f"optimizer {self.label}, step {self.step}: parameter {name} got gradient number {count} since the last "
            f"step(), and backward_passes_per_step is {self.passes}. Call step() or zero_grad() of this optimizer after "
            f"every {self.passes} backward passes (also where an epoch ends with fewer: what is left over counts into "
            "the next one), or pass a larger backward_passes_per_step"
        )

    def _ready(self, plan: _Plan, parameter: torch.Tensor) -> None:
        parcel = plan.parcel_of[plan.position[parameter]]
        left = self._left.get(parcel.index, len(parcel.members)) - 1
        self._left[parcel.index] = left
        if left == 0:
            self._send(plan, parcel)

    def _backward_ended(self) -> None:
        """Everything is sent: wait here, so that whoever looks at gradients next sees averages."""
        self._callback_queued = False
        plan = self._plan
        if plan is not None and len(self._left) == len(plan.parcels) and not any(self._left.values()):
            self._finish(plan)

    def synchronize(self) -> None:
        """Make every gradient the average, also where this rank computed none; collective unless that is done already."""
        if not self.synchronized:
            plan = self.plan()
            for parcel in plan.parcels:
                if self._left.get(parcel.index) != 0:
                    self._send(plan, parcel)
            self._finish(plan)
        self._arrivals.clear()

    def forget(self) -> None:
        """Start the step anew (zero_grad): what has been accumulated and not sent doesn't count.

        Raises
        ------
        ConfigError
            Gradients have been sent: other ranks wait for this step.
        """
        if self.under_way:
            raise ConfigError(
                f"optimizer {self.label}, step {self.step}: zero_grad() after backward() and before step() or "
                f"synchronize(), while {len(self._sent)} parcels are under way and no gradient came for "
                f"{few(self.missing())}; call step() or synchronize() first"
            )
        synchronized = self.synchronized
        self._reset_step()
        self.synchronized = synchronized

    def stepped(self) -> None:
        """The user's optimizer has stepped: another step() without a backward pass would reduce again, as Horovod's does."""
        self._reset_step()

    def abandon(self) -> None:
        """Another state is loaded: nothing of this step counts, whatever is under way (after a failure, nothing will come)."""
        self._reset_step()

    def close(self) -> None:
        """Give the sender up; the plan is made anew when it is needed."""
        plan, self._plan = self._plan, None
        if plan is not None:
            plan.sender.close()

    @property
    def handle(self) -> Handle:
        """For the user."""
        return Handle(_Backend(self))

    def stats(self) -> dict[str, Any]:
        """Where gradients go, in how many parcels, and the sender's own counters."""
        plan = self._plan
        known = {"optimizer": self.label, "overlap": "backward", "steps": self.step}
        return known if plan is None else known | {"parcels": len(plan.parcels)} | plan.sender.stats()

    def detach(self) -> None:
        """Take the hooks off and give the sender up."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self.close()

    # -- sending and receiving ----------------------------------------------------------------------------------------

    def _send(self, plan: _Plan, parcel: Parcel) -> None:
        self._left[parcel.index] = 0
        pieces = [
            piece for i in parcel.members if (piece := self._piece(plan.parameters[i], plan.entries[i].name))
        ]
        if not pieces:
            return
        if len(pieces) == 1:
            flat = pieces[0].flat
        else:
            flat = torch.cat([piece.flat for piece in pieces])
            self._point_into(flat, pieces)
        self._sent[parcel.index] = (pieces, flat, plan.sender.send(parcel, flat, self.step))

    @staticmethod
    def _point_into(flat: torch.Tensor, pieces: list[_Piece]) -> None:
        start = 0
        for piece in pieces:
            numel = piece.flat.numel()
            piece.flat, piece.in_place = flat[start : start + numel], False
            start += numel

    @property
    def needs_zeros(self) -> bool:
        """Whether a joined rank has to send zeros itself (Horovod's own all-reduce makes them)."""
        return self._plan is not None and self._plan.sender.needs_zeros

    def why_not_zeros(self) -> str:
        """Why a rank can't take part with zeros; empty when it can."""
        if self._sparse and not self._options.sparse_as_dense:
            return f"optimizer {self.label} has sparse gradients"
        return "" if self._world.everyone else f"optimizer {self.label} has a process set"

    def reduce_zeros(self) -> None:
        """Take part in one step without gradients of one's own (a joined rank); leaves ``.grad`` alone."""
        plan = self.plan()
        under_way = [
            plan.sender.send(parcel, self._zeros(plan, parcel), self.step) for parcel in plan.parcels
        ]
        for pending in under_way:
            pending.wait()
        self.step += 1

    def _zeros(self, plan: _Plan, parcel: Parcel) -> torch.Tensor:
        flats = []
        for member in parcel.members:
            zeros = torch.zeros_like(plan.parameters[member], requires_grad=False)
            if self._options.compression is not None:
                zeros, _ = self._options.compression.compress(zeros)
            flats.append(zeros.reshape(-1))
        return torch.cat(flats)

    def _piece(self, parameter: torch.Tensor, name: str) -> _Piece | None:
        """What travels of one gradient; None when it goes by the sparse way."""
        gradient = self._gradient(parameter, name)
        if gradient.is_sparse and not self._options.sparse_as_dense:
            self._sparse_sent[parameter] = self._world.reduce_sparse(name, gradient)
            return None
        # `.data` has a version of its own: what senders do to it doesn't look like the user's edits.
        dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.data
        compression, context = self._options.compression, None
        if compression is not None:
            dense, context = compression.compress(dense)
        flat = dense.contiguous().view(-1)
        in_place = flat.data_ptr() == gradient.data_ptr() if not gradient.is_sparse else False
        return _Piece(parameter, gradient, gradient._version, flat, dense.shape, context, in_place)

    def _gradient(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """The gradient, or zeros where this rank computed none: other ranks may have one."""
        gradient = parameter.grad
        if gradient is None:
            if parameter in self._sparse:
                gradient = torch.zeros_like(parameter, requires_grad=False).to_sparse(1)
            else:
                gradient = torch.zeros_like(parameter, requires_grad=False)
            parameter.grad = gradient
        if gradient.requires_grad:
            raise UnsupportedModelError(
                f"optimizer {self.label}: the gradient of {name} has a graph of its own (backward(create_graph=True)), which a "
                "reduction would cut; use torch.autograd.grad for second-order terms"
            )
        if gradient.is_sparse:
            self._sparse.add(parameter)
        return gradient

    def _finish(self, plan: _Plan) -> None:
        """Wait for everything that was sent, the most urgent first, and put the results into the gradients."""
        arrivals = self._arrivals
        try:
            self._take_results(plan)
        finally:
            self.waiting_for = None
            self._reset_step()  # after a failure too: an elastic job restores its state and goes on
        self._arrivals = arrivals
        self.synchronized = True
        self.step += 1

    def _take_results(self, plan: _Plan) -> None:
        for index in sorted(self._sent):
            pieces, _, pending = self._sent[index]
            self.waiting_for = plan.parcels[index]
            pending.wait()
            for piece in pieces:
                self._put(plan, piece)
        for parameter, wait in self._sparse_sent.items():
            parameter.grad = wait()

    def _put(self, plan: _Plan, piece: _Piece) -> None:
        parameter, gradient = piece.parameter, piece.gradient
        if parameter.grad is not gradient or gradient._version != piece.version:
            name = plan.entries[plan.position[parameter]].name
            raise UnsupportedModelError(
                f"optimizer {self.label}, step {self.step}: the gradient of {name} was changed (clipping, scaling, "
                "zeroing) while its average was under way; call synchronize() of this optimizer before that"
            )
        if piece.in_place and self._options.compression is None:
            return
        reduced = piece.flat.view(piece.shape)
        if self._options.compression is not None:
            reduced = self._options.compression.decompress(reduced, piece.context)
        if gradient.is_sparse:
            parameter.grad = reduced.to_sparse()
        else:
            gradient.detach().copy_(reduced)


def _weak_hook(reducer: weakref.ref[GradientReducer]) -> Callable[[torch.Tensor], None]:
    """Parameters outlive optimizers: the hook of an optimizer that is gone does nothing."""

    def hook(parameter: torch.Tensor) -> None:
        alive = reducer()
        if alive is not None:
            alive._arrived(parameter)

    return hook


class _Backend:
    """A reducer behind a `Handle`."""

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = reducer

    def flush(self) -> None:
        """Nothing is under way between steps."""

    def stats(self) -> dict[str, Any]:
        """See `GradientReducer.stats`."""
        return self._reducer.stats()

    def report_loss(self, loss: float) -> None:
        """Nothing to steer: steps are synchronous."""

    def finish(self) -> None:
        """From now on every rank trains alone."""
        self._reducer.detach()


class NoReducer:
    """Stands for a reducer where there is nothing to reduce: one rank, or one that isn't in the process set."""

    under_way = False

    def __init__(self, label: str, passes: int, handle: Handle | None = None) -> None:
        self.label = label
        self.passes = passes
        self.handle = handle or Handle(Off())

    def add_parameters(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Nothing."""

    def synchronize(self) -> None:
        """Nothing."""

    def forget(self) -> None:
        """Nothing."""

    def stepped(self) -> None:
        """Nothing."""

    def abandon(self) -> None:
        """Nothing."""
