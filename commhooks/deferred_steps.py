"""The deferred steps of one model: what happens at each bucket, step, read, backward and forward.

Where in the flow: DDP hook -> deferred_flow -> **deferred_steps** -> the user's optimizer, just before a parameter's next
read.  The algorithm and its numbers (1) to (4) are in `deferred`.

Invariants: no read sees an old value; a parameter is stepped once per call of ``step``, with that call's settings and the
average over all ranks; nothing of ours reads through the watch.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commhooks import backward_watch, interpreter, reads
from commhooks.buffers import check_tensor
from commhooks.config import Config
from commhooks.core.gates import ForwardOrder, GateState
from commhooks.core.overlap_trial import WARM_UP_STEPS, OverlapTrial, verdict
from commhooks.deferred_flow import GradientFlow
from commhooks.deferred_gradients import LocalGradients
from commhooks.deferred_hooks import ForwardCall, InertSteps, OnGradient, reads_are_hidden
from commhooks.deferred_optimizer import PartialStepper, Recorded
from commhooks.deferred_runs import PartialRuns
from commhooks.errors import CommError, ConfigError, UnsupportedModelError
from commhooks.exchanges import SliceExchange
from commhooks.optimizer_calls import OptimizerCalls
from commhooks.timeline import Recorder

log = logging.getLogger(__name__)

#: How long an end may wait for slices that peers still need.
EXIT_LIMIT_S = 5.0

#: Models whose steps are deferred now.
live: weakref.WeakSet[DeferredSteps] = weakref.WeakSet()


class DeferredSteps:
    """The state of one registered model (a `commhooks.handle.Backend`); everything runs on the user's thread.

    Parameters
    ----------
    ddp : the wrapped model
    optimizers : between them they hold parameters of this model only
    exchange : averages slices; this model's own
    config : ``priority`` is read
    trial : times steps with overlap and without, and decides; None: overlap
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizers: Sequence[torch.optim.Optimizer],
        exchange: SliceExchange,
        config: Config,
        trial: OverlapTrial | None = None,
    ) -> None:
        self._trial = trial
        self._why = "as asked" if trial is None else "on trial against plain steps"
        # Whether this step goes as without us, and whether that is how all later ones will go.
        self._plain = self._retiring = False
        reduced = [
            p
            for name, p in ddp.module.named_parameters()
            if p.requires_grad and name not in ddp.parameters_to_ignore
        ]
        self._ddp_ref = weakref.ref(ddp)
        self._exchange = exchange
        timeline: Recorder | None = getattr(exchange, "timeline", None)
        self._forward_began_s = self._backward_began_s = 0.0
        self._flow = GradientFlow(
            ddp.module, reduced, exchange, config.priority != "fifo", bool(ddp.static_graph)
        )
        self._gradients = LocalGradients()
        self._watch = reads.ReadWatch(self._on_read, self._on_gradient_read)
        self._watch_thread = 0
        self._steppers: dict[int, PartialStepper] = {}
        self._calls = [OptimizerCalls(one, self) for one in optimizers]
        self._runs = PartialRuns(self._flow, self._gradients, self._watch, timeline)
        self._dropped: set[int] = set()
        self._reading: ForwardOrder | None = None
        self._seen: ForwardOrder | None = None
        self._hidden = reads_are_hidden(ddp.module)
        # Whether anything of this model was read since its last step: only then can a backward pass concern it.
        self._touched = False
        # Autograd's number of the backward pass whose gradients are collected, and whether DDP will reduce the next one's.
        self._task = -1
        self._in_pass = False
        self._armed = False
        self._finished = False
        self._warned: set[str] = set()
        self._counts = {"steps": 0, "overlapped": 0, "arrived_before_step": 0, "whole": 0}
        self._hook_handles: list[Any] = []
        for dtype in sorted({p.dtype for p in reduced}, key=str):
            check_tensor(torch.empty(0, dtype=dtype, device=reduced[0].device))
        self._own(reduced)

    def _own(self, reduced: Sequence[torch.Tensor]) -> None:
        """Which optimizer steps which parameter; strangers are refused."""
        known = {id(parameter) for parameter in reduced}
        for call in self._calls:
            for parameter in call.parameters():
                if parameter.requires_grad and id(parameter) not in known:
                    raise UnsupportedModelError(
                        f"{call.stepper.name} holds a parameter of shape {tuple(parameter.shape)} that this DDP model doesn't "
                        "reduce; register each model with its own optimizer, made from its parameters"
                    )
                other = self._steppers.setdefault(id(parameter), call.stepper)
                if other is not call.stepper:
                    raise UnsupportedModelError(
                        f"a parameter of shape {tuple(parameter.shape)} is in two of the optimizers; keep it in one"
                    )

    def wire(self) -> None:
        """Take over what the user calls."""
        ddp = self._ddp
        self._hook_handles = [
            ddp.register_forward_pre_hook(ForwardCall(self._before_forward)),
            ddp.register_forward_hook(ForwardCall(self._after_forward), always_call=True),
            *(p.register_post_accumulate_grad_hook(OnGradient(self)) for p in self._flow.parameters),
            *(handle for call in self._calls for handle in call.intercept()),
        ]
        backward_watch.watch(self)
        interpreter.hold_responsive()
        live.add(self)
        log.info(
            "commhooks: steps of %s overlap with the next forward (%d parameters)%s",
            ", ".join(call.stepper.name for call in self._calls),
            len(self._flow.parameters),
            f"; the forward waits for all of them, since {self._hidden}" if self._hidden else "",
        )

    @property
    def _ddp(self) -> DistributedDataParallel:
        ddp = self._ddp_ref()
        if ddp is None:
            raise ConfigError("the DDP model of this handle is gone")
        return ddp

    # -- for the user -----------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Run every step that was asked for; blocks until the gradients for it are there."""
        self._runs.open_all()
        self._tidy()

    def stats(self) -> dict[str, Any]:
        """Counters since the start.

        ``steps`` the user's calls of ``step``; ``overlapped`` those that returned with gradients under way;
        ``arrived_before_step`` those that found all of them there; ``whole`` those that ran as one step;
        ``partial_steps`` runs of the optimizer on some parameters; ``waited_s`` time blocked; ``slices`` sent.
        """
        return {
            **self._counts,
            "partial_steps": self._runs.partial_steps,
            "overlap": "none" if self._retiring else "forward",
            "overlap_reason": self._why,
            "waited_s": self._flow.waited_s,
            "slices": self._flow.slices,
            "forward_order": self._flow.forward_names() if self._ddp_ref() is not None else [],
            "waits_for_all": self._hidden or "",
        }

    @property
    def closed_gates(self) -> int:
        """How many parameters still hold their old value."""
        return self._flow.gates.closed

    def report_loss(self, loss: float) -> None:
        """Nothing to steer here: steps are synchronous (the loss steers ``commit="adsp"``)."""

    def finish(self) -> None:
        """Apply everything and let go; the model then trains as plain DDP.  Harmless when called twice."""
        if self._finished:
            return
        try:
            self._runs.open_all()
            self._settle(self._flow.in_flight(range(len(self._flow.parameters))))
        finally:
            self.let_go(EXIT_LIMIT_S)

    def let_go(self, timeout_s: float) -> None:
        """Undo what `wire` did, apply nothing; waits at most `timeout_s` for slices under way."""
        if self._finished:
            return
        self._finished = True
        interpreter.let_go()
        for handle in self._hook_handles:
            handle.remove()
        backward_watch.unwatch(self)
        live.discard(self)
        self._watch.unwatch()
        self._watch.release_gradients()
        reads.remove(self._watch)
        self._exchange.close(timeout_s)

    # -- (1) buckets ------------------------------------------------------------------------------------------------

    def on_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """DDP's hook: the bucket's gradients leave; the Future is complete at once."""
        buffer = bucket.buffer()
        if self._finished:
            return _stock_average(self._ddp.process_group, buffer)
        index = bucket.index()
        task = torch._C._current_graph_task_id()
        outside = task == -1 and not self._in_pass and (index == 0 or self._flow.has_seen(index))
        if outside or task not in (-1, self._task):
            self._begin_step(task)
        if self._plain or buffer.layout is not torch.strided:
            return _stock_average(self._ddp.process_group, buffer)
        self._flow.bucket_ready(index, buffer, bucket.parameters())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    def on_gradient(self, parameter: torch.Tensor) -> None:
        """Autograd has accumulated a gradient: it leaves before its bucket is full, if DDP is going to reduce it."""
        if self._finished or not self._armed:
            return
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._begin_step(task)
        if not self._plain:
            self._flow.gradient_ready(parameter)

    def _begin_step(self, task: int) -> None:
        """The first gradient of a backward pass (autograd's `task`): usually everything was settled when it began."""
        self._task = task
        self._in_pass = True
        now_s = time.monotonic()
        if self._trial is not None:
            self._trial.record(self._flow.step, now_s - self._backward_began_s)
        self._backward_began_s = now_s
        self._runs.open_all()
        flow = self._flow
        left = flow.in_flight(range(len(flow.parameters)))
        flow.wait_for_all()
        flow.gates.release(left)
        self._dropped.clear()
        if flow.begin_step(self._seen):
            self._seen = None
        if self._trial is not None:
            self._follow(self._trial)
        try:
            # Callbacks run in the order they were queued.  Queued twice more by itself, ours comes after DDP's, which sets
            # .grad and which a static graph's first pass queues from a callback of its own.
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(lambda: queue(lambda: queue(self._on_backward_end)))
        except RuntimeError:  # not in a backward pass: Join runs the hook for a rank that has no more data
            self._in_pass = False

    def _follow(self, trial: OverlapTrial) -> None:
        """Go the way of the trial's next step; at its end, the faster.  Collective at two steps."""
        step = self._flow.step
        if step == WARM_UP_STEPS + 1:
            trial.set_window(int(self._exchange.agree("trial", trial.wish())))
        if step <= WARM_UP_STEPS or step <= trial.last_step:
            self._plain = not trial.overlaps(step)
            return
        chosen = verdict(*self._exchange.agree("verdict", trial.figures()))
        self._trial = None
        self._plain = self._retiring = not chosen.overlap
        self._why = chosen.reason
        log.info(
            "commhooks: overlap with the next forward %s: %s",
            "stays on" if chosen.overlap else "is off",
            self._why,
        )

    def _on_backward_end(self) -> None:
        flow = self._flow
        self._runs.record("training", "backward", self._backward_began_s)
        self._armed = self._in_pass = False
        flow.seal()
        numbers = flow.in_flight(range(len(flow.parameters)))
        self._gradients.remember(flow.parameters[number] for number in numbers)
        self._settle([n for n in numbers if id(flow.parameters[n]) not in self._steppers])

    def before_backward(self) -> None:
        """Finish what the last step left, and hand out averages that no step used, before gradients are added.

        Another model's backward pass leaves our closed gates alone: nothing of ours was read for it.
        """
        if self._ddp_ref() is None:
            self.let_go(1.0)
        if self._finished:
            return
        # A failed exchange is raised where this model is used (its forward, its hook, its step), not in another model's pass.
        with contextlib.suppress(CommError):
            if self._touched:
                self._runs.open_all()
            self._settle(
                [n for n in self._flow.in_flight(range(len(self._flow.parameters))) if n not in self._dropped]
            )
        self._unwatch_when_open()

    def after_backward(self) -> None:
        """From here until ``step`` a read of a gradient must see averages."""
        if self._finished:
            return
        self._guard_gradients()

    def _guard_gradients(self) -> None:
        flow = self._flow
        waiting = [n for n in flow.in_flight(range(len(flow.parameters))) if n not in self._dropped]
        if waiting:
            self._watch.guard_gradients(flow.parameters[number] for number in waiting)
            self._install()
        else:
            self._watch.release_gradients()

    # -- gradients between backward and step ------------------------------------------------------------------------

    def _on_gradient_read(self) -> None:
        """Someone reads ``.grad`` before ``step``: averages first, for all parameters."""
        flow = self._flow
        self._watch.release_gradients()
        self._warn_once(
            "gradients were read or changed between backward() and step() (clipping, scaling or logging does that), so they "
            "were gathered first and this step did not overlap; steps without such reads do"
        )
        self._settle([n for n in flow.in_flight(range(len(flow.parameters))) if n not in self._dropped])

    def _settle(self, numbers: Sequence[int]) -> None:
        """Put averages into ``.grad``, where the user left the gradients that DDP put there."""
        if not numbers:
            return
        flow = self._flow
        flow.wait(numbers)
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for number in numbers:
                parameter = flow.parameters[number]
                if parameter.grad is None or not self._gradients.knows(parameter):
                    continue
                if self._gradients.changed(parameter):
                    self._refuse_edit(parameter)
                    continue
                self._gradients.replace(parameter, flow.average(number))
        flow.gates.release(numbers)

    def _refuse_edit(self, parameter: torch.Tensor) -> None:
        """A gradient was changed in a way that we didn't see; zeros mean that the user dropped it."""
        assert parameter.grad is not None  # both callers looked
        if not parameter.grad.any():
            return
        names = {id(p): name for name, p in self._ddp.module.named_parameters()}
        raise UnsupportedModelError(
            f"the gradient of {names.get(id(parameter), tuple(parameter.shape))} was changed between backward() and step() by "
            "code that commhooks can't see (another thread, an extension, memory shared with it), while its average was still "
            'under way; change gradients through .grad on the training thread, or use overlap="backward"'
        )

    # -- (2) step ---------------------------------------------------------------------------------------------------

    def on_step(self, call: OptimizerCalls, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The user calls ``step``: record and close gates, or run it as a whole where it must be."""
        if (
            self._retiring
        ):  # not in the backward pass that found it: its hooks can't be removed while they run
            self.let_go(EXIT_LIMIT_S)
        if self._finished:
            return call.stepper.run_whole(*args, **kwargs)
        if any(value is not None for value in (*args, *(v for k, v in kwargs.items() if k == "closure"))):
            raise UnsupportedModelError(
                f"{call.stepper.name}.step(closure) evaluates the model inside the step; call backward() first and step() "
                'without a closure, or use overlap="backward"'
            )
        with self._runs.unwatched():
            return self._step(call, kwargs)

    def _step(self, call: OptimizerCalls, kwargs: dict[str, Any]) -> Any:
        flow, gates = self._flow, self._flow.gates
        numbers = [n for p in call.parameters() if (n := flow.number(p)) is not None]
        self._runs.open([n for n in numbers if gates.state(n) is GateState.CLOSED])
        self._refuse_step_without_backward(call)
        self._counts["steps"] += 1
        waiting = [n for n in flow.in_flight(numbers) if n not in self._dropped]
        self._dropped.update(n for n in waiting if flow.parameters[n].grad is None)
        waiting = [n for n in waiting if n not in self._dropped]
        for number in waiting:
            if self._gradients.changed(flow.parameters[number]):
                self._refuse_edit(flow.parameters[number])
                self._dropped.add(number)
        waiting = [n for n in waiting if n not in self._dropped]
        if not waiting or self._must_run_whole(call, kwargs):
            self._settle(waiting)
            self._counts["whole"] += 1
            self._guard_gradients()
            self._tidy()
            return call.stepper.run_whole(**kwargs)
        self._touched = False
        recorded = Recorded(call.optimizer)
        self._step_what_is_not_under_way(call, recorded, set(waiting))
        self._runs.close(waiting, call.stepper, recorded)
        flow.drain()
        if gates.awaited(waiting):
            self._counts["overlapped"] += 1
            self._watch.watch(flow.parameters)
        else:
            self._counts["arrived_before_step"] += 1
            self._runs.open(waiting)
        self._guard_gradients()
        if gates.closed:
            self._install()
        else:
            self._tidy()
        return None

    def _must_run_whole(self, call: OptimizerCalls, kwargs: dict[str, Any]) -> bool:
        """The first step (its forward is being learned, the optimizer is put to the test), and steps that are hooked."""
        if call.stepper.has_step_hooks:
            self._warn_once(
                f"{call.stepper.name} has step hooks, which see a step as a whole; its steps run unoverlapped"
            )
        return self._flow.step <= 1 or call.stepper.unchecked or call.stepper.has_step_hooks or bool(kwargs)

    def _refuse_step_without_backward(self, call: OptimizerCalls) -> None:
        if all(parameter.grad is None for parameter in call.parameters()):
            raise UnsupportedModelError(
                f"{call.stepper.name}.step() was called, but none of its parameters has a gradient; call backward() on the "
                "loss of the registered DDP model first (outside no_sync() for the last of several)"
            )

    def _step_what_is_not_under_way(
        self, call: OptimizerCalls, recorded: Recorded, waiting: set[int]
    ) -> None:
        """Sparse gradients, which DDP averaged, and parameters it doesn't know: what is in ``.grad`` counts, now."""
        now = [p for p in call.parameters() if p.grad is not None and self._flow.number(p) not in waiting]
        if now:
            call.stepper.run(recorded, now, [p.grad for p in now if p.grad is not None])

    def on_zero_grad(self, call: OptimizerCalls) -> None:
        """Averages of gradients that the user throws away are not waited for."""
        if not self._finished:
            flow = self._flow
            numbers = [n for p in call.parameters() if (n := flow.number(p)) is not None]
            self._dropped.update(flow.in_flight(numbers))

    # -- (3) reads --------------------------------------------------------------------------------------------------

    def _on_read(self, numbers: Sequence[int]) -> None:
        self._touched = True
        if self._reading is not None:
            self._reading.read(numbers)
        gates = self._flow.gates
        closed = [number for number in numbers if gates.state(number) is GateState.CLOSED]
        if closed:
            start_s = time.monotonic()
            self._runs.open(closed)
            self._runs.record("gates", self._runs.name(closed[0]), start_s)

    # -- (4) the rest -----------------------------------------------------------------------------------------------

    def _before_forward(self, module: Any, inputs: Any) -> None:
        if torch.compiler.is_compiling():
            raise UnsupportedModelError(
                "torch.compile(ddp) hides the forward from overlap across steps; compile the model inside "
                '(DistributedDataParallel(torch.compile(model))) or use overlap="backward"'
            )
        self._touched = True
        self._forward_began_s = time.monotonic()
        flow = self._flow
        flow.drain()
        if flow.step <= 2 and self._hidden is None:
            self._hidden = reads_are_hidden(self._ddp.module)
        if flow.gates.closed and (self._hidden or self._watch_thread != threading.get_ident()):
            self._runs.open_all()
        if self._hidden is None and (flow.step == 0 or flow.gates.closed):
            self._reading = ForwardOrder(len(flow.parameters))
            self._watch.watch(flow.parameters)
            self._install()

    def _after_forward(self, module: Any, inputs: Any, output: Any) -> None:
        self._runs.record("training", "forward", self._forward_began_s)
        if self._reading is not None:
            if module.training:
                self._seen = self._reading
            self._reading = None
        self._armed = torch.is_grad_enabled() and module.require_forward_param_sync
        if module.training and torch.is_grad_enabled() and not self._finished:
            self._unwatch_when_open()
            # For the gradients of the backward pass that follows; inside backward() it can come too late (see `install`).
            self._install()
        else:
            self._tidy()

    def _install(self) -> None:
        self._watch_thread = threading.get_ident()
        reads.install(self._watch)

    def _unwatch_when_open(self) -> None:
        if not self._flow.gates.closed and self._reading is None:
            self._watch.unwatch()

    def _tidy(self) -> None:
        """Watch no longer than needed: a watch costs a microsecond or two on every torch call."""
        self._unwatch_when_open()
        if self._watch.idle:
            reads.remove(self._watch)

    def _warn_once(self, words: str) -> None:
        if words not in self._warned:
            self._warned.add(words)
            log.warning("commhooks: %s", words)

    # -- copies -----------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> InertSteps:
        """A copied DDP model keeps its reference to a hook, but DDP doesn't call it; the copy trains as plain DDP."""
        return InertSteps()

    def __reduce__(self) -> Any:
        return (InertSteps, ())


def _stock_average(group: Any, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """What DDP does without us, for sparse buckets and after `finish`."""
    buffer.div_(dist.get_world_size(group))
    future = dist.all_reduce(buffer, group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])
