"""The DDP hook that reduces during the backward pass, and `register`, which attaches it.

Where in the flow: DDP bucket -> **ddp** -> slicing -> engine; the bucket's Future completes when its slices are done.

Invariants: one tensor of the bucket's shape comes back, averaged exactly once, in the bucket's own memory; every path returns a
Future; nothing depends on the bucket index being stable (buckets are rebuilt); errors are raised where the user waits,
by their own type, which a Future can't carry (see `_Backward`).
"""

# No postponed annotations here: torch compares the hook's annotation with the class itself.

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commhooks.buffers import check_tensor
from commhooks.chooser import Chooser
from commhooks.core.choice import Choice, Way
from commhooks.core.slicing import Layout
from commhooks.engine import Engine
from commhooks.errors import CommError, ConfigError, UnsupportedModelError
from commhooks.groups import engine_for, load_config
from commhooks.handle import Handle, Off
from commhooks.jobs import Job, JobKey
from commhooks.layers import LayerOrder

log = logging.getLogger(__name__)

_Future = torch.futures.Future


class CommHookState:
    """State of `allreduce_hook`: which engine, which layers.

    Creating it is collective: every rank of the group does it in the same order.

    Parameters
    ----------
    process_group : the group that DDP reduces over; None: the default group
    model : the wrapped module; its layers give the priorities (without it, the order in which buckets come does)
    settings : knobs by field name, over the environment's
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        model: torch.nn.Module | None = None,
        **settings: Any,
    ) -> None:
        self._settings = settings
        self.config = load_config(settings)
        self.order = LayerOrder(model)
        self._layouts: dict[tuple[Any, ...], Layout] = {}
        self._step = 0
        self._jobs: list[Job] = []
        self._natives: list[_Future[torch.Tensor]] = []
        self._graph_task = -1
        self._begun = -1
        self._chooser: Chooser | None = None
        self.buckets_seen = 0
        self.native_buckets = 0
        self.parameters_seen: set[int] = set()
        self._group = process_group
        self.engine: Engine | None = None
        self._stream = -1
        self.bind(process_group)

    def bind(self, process_group: dist.ProcessGroup | None) -> None:
        """Attach to a process group (again, after unpickling).  Collective."""
        self._group = process_group
        if self.config.enabled and self.config.schedule != "native":
            self.engine = engine_for(process_group, self.config)
            self._stream = self.engine.model_registers()
            if self.config.schedule == "auto":
                self._chooser = Chooser(self.engine, self.engine.predicted_choice())
        elif not dist.is_initialized():
            raise ConfigError("no process group: call torch.distributed.init_process_group(...) first")

    @property
    def unbound(self) -> bool:
        """Whether this came from a copy or a file and has no engine yet."""
        return self.engine is None and self.config.enabled and self.config.schedule != "native"

    # -- pickling: settings and counters travel, process groups, threads and sockets don't --------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {"settings": self._settings, **self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(
            _settings=state["settings"],
            config=load_config(state["settings"]),
            order=LayerOrder(None),
            _layouts={},
            _jobs=[],
            _natives=[],
            _graph_task=-1,
            _begun=-1,
            _chooser=None,
            native_buckets=0,
            parameters_seen=set(),
            _group=None,
            engine=None,
            _stream=-1,
            _step=0,
            buckets_seen=0,
        )
        self.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"buckets_seen": self.buckets_seen}

    def load_state_dict(self, state: dict[str, Any], process_group: dist.ProcessGroup | None = None) -> None:
        """Take a checkpoint's counters over; with `process_group`, also bind to it (collective)."""
        self.buckets_seen = int(state["buckets_seen"])
        if process_group is not None:
            self.bind(process_group)

    # -- one bucket ---------------------------------------------------------------------------------------------------------

    def on_bucket(self, bucket: dist.GradBucket) -> "_Future[torch.Tensor]":
        """Start reducing a bucket; the Future completes with the bucket's own memory, averaged."""
        if self.unbound:
            raise ConfigError(
                "this CommHookState was unpickled; call state.bind(process_group) on every rank first"
            )
        tensor = bucket.buffer()
        self.buckets_seen += 1
        step = self._step
        if step == 0:
            self.parameters_seen.update(map(id, bucket.parameters()))
        if bucket.is_last():  # whichever way it goes: the last bucket may be a sparse one
            self._step += 1
        if self.engine is None:
            return self._native(tensor)
        self.engine.raise_if_failed()
        if tensor.layout is not torch.strided:
            return self._native(tensor)
        self._begin_step(step)
        key = JobKey(self._stream, step, bucket.index())
        way = self._chooser.way(step) if self._chooser is not None else Way.TREES
        if tensor.numel() == 0:
            return completed(tensor)
        if way is Way.NATIVE:
            self._natives.append(self._native(tensor))
            self._watch_backward()
            return self._natives[-1]
        future: _Future[torch.Tensor] = _Future()
        layout = self._layout(bucket, tensor)
        # A bucket that was set to another tensor (compression wrappers) may be any shape.
        flat = tensor.detach().view(-1)
        job = self.engine.start_job(
            key, flat, layout, average=True, on_done=lambda job: complete(future, tensor, job.error)
        )
        self._jobs.append(job)
        self._watch_backward()
        return future

    def _begin_step(self, step: int) -> None:
        """Once per step, before its first bucket: plan and slice size may change here, on all ranks alike."""
        if self._begun == step:
            return
        self._begun = step
        if self._chooser is None or self._chooser.chose_trees:
            assert self.engine is not None
            self.engine.step_begins(self._stream)

    def _layout(self, bucket: dist.GradBucket, tensor: torch.Tensor) -> Layout:
        parameters = bucket.parameters()
        assert self.engine is not None
        key = (self.engine.epoch, tensor.numel(), tensor.element_size(), *map(id, parameters))
        layout = self._layouts.get(key)
        if layout is None:
            segments = self.order.segments(parameters, by_layer=self.config.priority == "layer")
            if sum(segment.numel for segment in segments) != tensor.numel():
                raise UnsupportedModelError(
                    f"bucket {bucket.index()} holds {tensor.numel()} elements for parameters of "
                    f"{sum(segment.numel for segment in segments)}: another hook has reshaped it; put commhooks innermost"
                )
            layout = self._layouts[key] = self.engine.layout(segments, tensor.element_size())
        return layout

    def _native(self, tensor: torch.Tensor) -> "_Future[torch.Tensor]":
        """The group's own all-reduce: sparse gradients, and ``schedule=native``."""
        self.native_buckets += 1
        group = self._group if self._group is not None else dist.group.WORLD
        world_size = dist.get_world_size(group)
        if tensor.layout is torch.strided:
            tensor.div_(world_size)
            work = dist.all_reduce(tensor, group=group, async_op=True)
            return work.get_future().then(lambda future: future.value()[0])
        work = dist.all_reduce(tensor, group=group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0] / world_size)

    # -- raising where the user waits -----------------------------------------------------------------------------------------

    def _watch_backward(self) -> None:
        """Wait for this backward's jobs in a callback that autograd runs before DDP's own.

        A Future loses its exception's type on the way through DDP; an exception from a callback reaches the user as it is.
        """
        task = torch._C._current_graph_task_id()
        if task == -1:  # ranks that ran out of inputs (`Join`) wait for the Futures themselves
            self._jobs = [job for job in self._jobs if not job.ended]
            self._natives = [future for future in self._natives if not future.done()]
        if task not in (-1, self._graph_task):  # a backward that raised has never run its callback
            self._graph_task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)  # type: ignore[attr-defined]

    def _finish_backward(self) -> None:
        jobs, self._jobs = self._jobs, []
        natives, self._natives = self._natives, []
        assert self.engine is not None
        for job in jobs:
            self.engine.wait(job)
        for future in natives:
            self._wait_native(future)
        if self._chooser is not None:
            self._chooser.ended()

    def _wait_native(self, future: "_Future[torch.Tensor]") -> None:
        """The group's own collective may hang for ever on a rank that is stopped; our links notice."""
        assert self.engine is not None
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        while not done.wait(1.0):
            self.engine.raise_if_failed()
        try:
            future.wait()
        except RuntimeError as error:
            self.engine.raise_named(error)

    def flush(self) -> None:
        """Block until every bucket under way is reduced."""
        if self._jobs or self._natives:
            self._finish_backward()

    def stats(self) -> dict[str, Any]:
        """The engine's counters and this model's."""
        engine = self.engine.stats() if self.engine is not None else {"plan": "native all-reduce"}
        asked = Choice(
            Way.TREES if self.engine is not None else Way.NATIVE, f"schedule={self.config.schedule}"
        )
        choice = self._chooser.choice if self._chooser is not None else asked
        return {
            "enabled": True,
            "overlap": "backward",
            "schedule": choice.way.value,
            "schedule_reason": choice.reason,
            "buckets": self.buckets_seen,
            "native_buckets": self.native_buckets,
            "steps": self._step,
            **engine,
        }

    @property
    def steps(self) -> int:
        """Backward passes reduced so far."""
        return self._step

    def report_loss(self, loss: float) -> None: ...

    def finish(self) -> None:
        self.flush()


def completed(tensor: torch.Tensor) -> "_Future[torch.Tensor]":
    """A Future that is done."""
    future: _Future[torch.Tensor] = _Future()
    future.set_result(tensor)
    return future


def complete(future: "_Future[torch.Tensor]", tensor: torch.Tensor, error: CommError | None) -> None:
    """End a bucket's Future; a failed one carries the words, the type is raised by the backward's callback."""
    if error is None:
        future.set_result(tensor)
    else:
        future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))  # type: ignore[arg-type]


def allreduce_hook(state: CommHookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """PyTorch's hook convention: average a bucket over the ranks.

    ``ddp.register_comm_hook(CommHookState(group), allreduce_hook)``; torch's ``fp16_compress_wrapper`` may be put around it.
    """
    return state.on_bucket(bucket)


Hook = Callable[[Any, dist.GradBucket], Any]


def compose(*wrappers: Callable[[Hook], Hook]) -> Hook:
    """Our hook inside other hooks' wrappers, outermost first.

    ``ddp.register_comm_hook(commhooks.CommHookState(), commhooks.compose(fp16_compress_wrapper))``
    """
    hook: Hook = allreduce_hook
    for wrapper in reversed(wrappers):
        hook = wrapper(hook)
    return hook


def register(
    ddp_model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer | None = None,
    **settings: Any,
) -> Handle:
    """Switch commhooks on for a DDP model.  Collective: every rank of its group calls it in the same order.

    Parameters
    ----------
    ddp_model : a `DistributedDataParallel` without a communication hook
    optimizer : with it, the step and the next forward overlap with communication (``overlap="forward"``)
    settings : knobs by field name (``slice_numel=…``, ``topology="nic:200,800"``, ``commit="adsp"`` …)

    Returns
    -------
    Handle
        ``flush``, ``stats``, ``report_loss``, ``finish``; a context manager.

    Raises
    ------
    ConfigError
        Not a DDP model, no process group, a bad setting, or another hook is registered already.
    UnsupportedModelError
        The model or the optimizer can't be served in this mode.
    """
    config = load_config(settings)
    if not isinstance(ddp_model, DistributedDataParallel):
        raise ConfigError(
            f"register() got a {type(ddp_model).__name__}; wrap the model first: "
            "DistributedDataParallel(model), then commhooks.register(ddp_model)"
        )
    if not config.enabled:
        return Handle(Off())
    present = _present(ddp_model)
    if present is not None:
        return present
    if config.commit != "none":
        from commhooks import adsp

        return _remember(ddp_model, adsp.register(ddp_model, optimizer, config))
    if config.overlap == "forward" or (config.overlap == "auto" and optimizer is not None):
        from commhooks import deferred

        return _remember(ddp_model, deferred.register(ddp_model, optimizer, config))
    if config.schedule != "native":
        _check_parameters(ddp_model)
    state = CommHookState(ddp_model.process_group, ddp_model.module, **settings)
    _attach(ddp_model, state)
    return _remember(ddp_model, Handle(state))


_handles: "weakref.WeakKeyDictionary[DistributedDataParallel, Handle]" = weakref.WeakKeyDictionary()


def _remember(ddp_model: DistributedDataParallel, handle: Handle) -> Handle:
    _handles[ddp_model] = handle
    return handle


def _present(ddp_model: DistributedDataParallel) -> Handle | None:
    """The handle of an earlier registration; a foreign hook is an error.

    torch appends to its list even when registering fails, so this comes first.
    """
    if ddp_model in _handles:
        return _handles[ddp_model]
    for hook, state in getattr(ddp_model, "_comm_hooks", []):
        if isinstance(state, CommHookState):  # ours, bare or inside wrappers
            # A copy, whose reducer has never heard of the hook that it lists.
            if hook is allreduce_hook and state.unbound:
                _guard_of(ddp_model, state).attach_again(ddp_model)
            return _remember(ddp_model, Handle(state))
        raise _taken(getattr(hook, "__qualname__", hook))
    # torch's built-in hooks are in no list; registering over one would fail half-way.
    built_in = ddp_model._get_ddp_logging_data().get("comm_hook")
    if built_in:
        raise _taken(built_in)
    return None


def _taken(name: object) -> ConfigError:
    return ConfigError(
        f"this DDP model already has the communication hook {name!r}, and DDP takes only one. Register commhooks instead "
        "of it; a wrapper such as fp16_compress_wrapper goes around ours: "
        "ddp.register_comm_hook(commhooks.CommHookState(), commhooks.compose(fp16_compress_wrapper))"
    )


def _attach(ddp_model: DistributedDataParallel, state: CommHookState) -> None:
    ddp_model.register_comm_hook(state, allreduce_hook)
    _guard_of(ddp_model, state).adopt(ddp_model)


def _guard_of(ddp_model: DistributedDataParallel, state: CommHookState) -> "ForwardGuard":
    """The model's guard, made when it has none."""
    for hook in ddp_model._forward_pre_hooks.values():
        if isinstance(hook, ForwardGuard):
            return hook
    guard = ForwardGuard(state)
    ddp_model.register_forward_pre_hook(guard)
    return guard


def _check_parameters(ddp_model: DistributedDataParallel) -> None:
    """Refuse at once what the first backward would refuse."""
    for name, parameter in ddp_model.module.named_parameters():
        if parameter.requires_grad:
            try:
                check_tensor(torch.empty(0, dtype=parameter.dtype, device=parameter.device))
            except UnsupportedModelError as error:
                raise UnsupportedModelError(f"parameter {name}: {error}") from None


class ForwardGuard:
    """Runs before each forward of the DDP model: raises a latched error, and sees what DDP keeps silent about."""

    def __init__(self, state: CommHookState) -> None:
        self._state = state
        self._reducer: Any | None = None
        self._outside: list[torch.nn.Parameter] = []  # in no bucket, so never synchronised
        self._steps = -1
        self._warned = 0
        self._first = True

    def __getstate__(self) -> dict[str, Any]:
        return {"state": self._state}

    def __setstate__(self, fields: dict[str, Any]) -> None:
        self.__init__(fields["state"])  # type: ignore[misc]

    def adopt(self, ddp_model: DistributedDataParallel) -> None:
        self._reducer = weakref.ref(ddp_model)
        self._outside = [parameter for parameter in _synchronised(ddp_model) if not parameter.requires_grad]
        self._steps = -1

    def __call__(self, ddp_model: DistributedDataParallel, _: Any) -> None:
        if self._reducer is None or self._reducer() is not ddp_model:
            self.attach_again(ddp_model)
        if self._state.engine is not None and self._state.engine.error is not None:
            error = self._state.engine.error
            raise type(error)(
                f"{error} (this DDP model failed then and stays unusable; restart from a checkpoint)"
            )
        if torch.is_grad_enabled():
            if ddp_model.static_graph:
                self._check_static_graph(ddp_model)
            if self._first:
                self._first = False
                self._check_delayed(ddp_model)
            self._check_trainable(ddp_model)

    def attach_again(self, ddp_model: DistributedDataParallel) -> None:
        """A deep copy or an unpickled model lists our hook, but its new reducer has never heard of it."""
        state = self._state
        if state.unbound:
            state.order = LayerOrder(ddp_model.module)
            state.bind(ddp_model.process_group)
        ddp_model._comm_hooks = [pair for pair in ddp_model._comm_hooks if pair[0] is not allreduce_hook]
        ddp_model.register_comm_hook(state, allreduce_hook)
        self.adopt(ddp_model)
        log.info("commhooks: attached again to a copied model")

    def _check_static_graph(self, ddp_model: DistributedDataParallel) -> None:
        trained = getattr(ddp_model, "_static_graph_delay_allreduce_enqueued", True)
        if not trained and not ddp_model.require_backward_grad_sync:
            raise UnsupportedModelError(
                "static_graph=True with the first backward inside no_sync() fails an internal check of PyTorch, with or "
                "without a hook: run the first step outside no_sync(), or drop static_graph"
            )

    def _check_delayed(self, ddp_model: DistributedDataParallel) -> None:
        delayed = getattr(ddp_model, "_delay_all_reduce_params", [])
        if delayed:
            log.warning(
                "commhooks: %d parameters are in delay_all_reduce_named_params; DDP reduces them itself, outside the hook",
                len(delayed),
            )

    def _check_trainable(self, ddp_model: DistributedDataParallel) -> None:
        """Trainable parameters that are in no bucket: known after the first step; before, those frozen at the start."""
        if self._steps < 1 <= self._state.steps:
            seen = self._state.parameters_seen
            self._outside = [parameter for parameter in _synchronised(ddp_model) if id(parameter) not in seen]
        self._steps = self._state.steps
        count = sum(parameter.requires_grad for parameter in self._outside)
        if count > self._warned:
            log.warning(
                "commhooks: %d parameters became trainable after DDP was built; DDP does not synchronise them (with or "
                "without a hook): wrap the model again after unfreezing",
                count,
            )
        self._warned = max(count, self._warned)


def _synchronised(ddp_model: DistributedDataParallel) -> list[torch.nn.Parameter]:
    """The parameters that DDP was not told to leave alone or to reduce by itself."""
    ignored: set[str] = getattr(ddp_model, "parameters_to_ignore", set())
    delayed = {id(parameter) for parameter in getattr(ddp_model, "_delay_all_reduce_params", [])}
    return [
        parameter
        for name, parameter in ddp_model.module.named_parameters()
        if name not in ignored and id(parameter) not in delayed
    ]
