"""Sees every read of a parameter, before it happens, wherever in the code it stands.

Where in the flow: the user's code -> **reads** -> deferred, which steps the parameter first.

A module's forward pre-hook is not enough: weights are also read functionally (tied heads, attention's output
projection), by code outside a forward (checkpoints, averages of weights), or in an order that changes from step to step.  A
`TorchFunctionMode` sees every eager torch call of its thread; while it is on the stack it costs about 1.5 us a call (a
pre-hook costs as much), and it is on the stack only while there is something to guard.

Invariants: aliases count as reads (views, ``.data``, anything on the same storage); asking for a shape or a flag doesn't; the
mode stands at the bottom of the stack, so that a user's own modes, entered before or after, nest as they did.

Source: the only complete hook on eager reads that PyTorch offers is ``torch.overrides.TorchFunctionMode``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode

# What tells or sets something about a tensor without touching its elements; names that this torch hasn't are skipped.
_ATTRIBUTE_NAMES = """
    shape dtype device requires_grad is_leaf layout names ndim is_cuda is_cpu is_sparse is_quantized is_meta is_mkldnn is_mps
    is_xla is_xpu is_ipu is_maia is_mtia is_nested is_sparse_csr is_vulkan grad_fn grad _grad grad_dtype output_nr _version
    _backward_hooks _post_accumulate_grad_hooks retains_grad itemsize nbytes name volatile
"""
_METHOD_NAMES = """
    dim size stride numel nelement element_size is_contiguous is_floating_point is_complex is_signed is_inference
    storage_offset register_hook register_post_accumulate_grad_hook requires_grad_ get_device has_names is_same_size
    is_shared is_pinned __hash__ __len__ ndimension retain_grad new_empty new_zeros new_ones new_full new_tensor
    is_neg is_conj is_coalesced
"""
_FUNCTION_NAMES = """
    is_tensor is_floating_point is_complex is_nonzero_static numel empty_like zeros_like ones_like full_like rand_like
    randn_like randint_like is_same_size result_type
"""


def _harmless() -> frozenset[Any]:
    found: list[Any] = []
    for name in _ATTRIBUTE_NAMES.split():
        descriptor = getattr(torch.Tensor, name, None)
        found += [
            getattr(descriptor, way)
            for way in ("__get__", "__set__", "__delete__")
            if hasattr(descriptor, way)
        ]
    found += [getattr(torch.Tensor, name) for name in _METHOD_NAMES.split() if hasattr(torch.Tensor, name)]
    found += [getattr(torch, name) for name in _FUNCTION_NAMES.split() if hasattr(torch, name)]
    return frozenset(found)


_HARMLESS = _harmless()
_GRADIENT: Any = getattr(torch.Tensor.grad, "__get__")  # noqa: B009 (a descriptor, which the stubs call a tensor)
_BACKWARD = torch.Tensor.backward


class ReadWatch(TorchFunctionMode):
    """Calls back before a watched parameter, or the gradient of one, is read.

    Parameters
    ----------
    on_read : called with the numbers of the parameters that are about to be read
    on_gradient_read : called when the ``grad`` of a guarded parameter is about to be read
    """

    def __init__(
        self, on_read: Callable[[Sequence[int]], None], on_gradient_read: Callable[[], None]
    ) -> None:
        super().__init__()
        self._on_read = on_read
        self._on_gradient_read = on_gradient_read
        self._by_id: dict[int, int] = {}
        self._by_storage: dict[int, list[int]] = {}
        self._gradient_owners: frozenset[int] = frozenset()
        self._gradients: frozenset[int] = frozenset()
        #: Our own code is running: what it reads is no user's read.
        self.paused = False
        #: ``Tensor.backward`` is running below this mode, which PyTorch has taken off the stack and will put back.
        self.in_backward = False

    def watch(self, parameters: Sequence[torch.Tensor]) -> None:
        """From now on report reads of these, by their place in the sequence."""
        by_storage: dict[int, list[int]] = {}
        with (
            torch._C.DisableTorchFunction()
        ):  # or finding out where a parameter lies would count as reading it
            for number, parameter in enumerate(parameters):
                if parameter.numel():
                    by_storage.setdefault(parameter.untyped_storage().data_ptr(), []).append(number)
        self._by_id = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._by_storage = by_storage

    def unwatch(self) -> None:
        """Report no more reads."""
        self._by_id = {}
        self._by_storage = {}

    def guard_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """From now on report reads of these parameters' gradients."""
        guarded = list(parameters)
        self._gradient_owners = frozenset(id(parameter) for parameter in guarded)
        self._gradients = frozenset(id(p.grad) for p in guarded if p.grad is not None)

    def release_gradients(self) -> None:
        """Report no more reads of gradients."""
        self._gradient_owners = self._gradients = frozenset()

    @property
    def idle(self) -> bool:
        """Whether there is nothing to report."""
        return not self._by_id and not self._gradient_owners

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Look at the arguments, then call what was called."""
        if self.paused:
            return func(*args, **(kwargs or {}))
        if func is _BACKWARD:
            self.in_backward = True
            try:
                return func(*args, **(kwargs or {}))
            finally:
                self.in_backward = False
        if self._gradient_owners and self._reads_gradient(func, args):
            self._on_gradient_read()
        if self._by_id and func not in _HARMLESS:
            found = self._reads(func, args, kwargs)
            if found:
                self._on_read(found)
        return func(*args, **kwargs) if kwargs else func(*args)

    def _reads(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> list[int]:
        if isinstance(func, HigherOrderOperator):
            return list(self._by_id.values())  # its functions may read anything, with no mode to see them
        found: list[int] = []
        self._collect(args, found)
        if kwargs:
            self._collect(kwargs.values(), found)
        return found

    def _collect(self, values: Iterable[Any], found: list[int]) -> None:
        # Runs for every torch call while gates are closed: the order of the tests is for speed.
        by_id, by_storage = self._by_id, self._by_storage
        for value in values:
            if isinstance(value, torch.Tensor):
                number = by_id.get(id(value))
                if number is not None:
                    found.append(number)
                    continue
                try:
                    storage = value.untyped_storage().data_ptr()
                except (RuntimeError, NotImplementedError):  # sparse, fake: no memory of its own
                    continue
                if storage in by_storage:
                    found.extend(by_storage[storage])
            elif isinstance(value, (list, tuple)):
                self._collect(value, found)
            elif isinstance(value, dict):
                self._collect(value.values(), found)

    def _reads_gradient(self, func: Any, args: Sequence[Any]) -> bool:
        if func == _GRADIENT:
            return id(args[0]) in self._gradient_owners
        return any(id(tensor) in self._gradients for tensor in _tensors(args))


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


# --- the stack of modes ---------------------------------------------------------------------------------------------------

# PyTorch has no public way to put a mode anywhere but on top; these are the functions its own DeviceContext uses.
_pop = torch._C._pop_torch_function_stack
_push = torch._C._push_on_torch_function_stack
_depth = torch._C._len_torch_function_stack
_at = torch._C._get_function_stack_at


def installed(mode: TorchFunctionMode) -> bool:
    """Whether `mode` is on this thread's stack."""
    return any(_at(place) is mode for place in range(_depth()))


def install(mode: ReadWatch) -> None:
    """Put `mode` at the bottom of this thread's stack; twice is harmless.

    Only the context of ``torch.set_default_device`` may be, and must be, below it: PyTorch asserts that it is the lowest.
    While that context handles a call it is off the stack and nothing can be put above it: then this does nothing.
    """
    if mode.in_backward or installed(mode):
        return
    lowest = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    if lowest is not None and not installed(lowest):
        return
    above = [_pop() for _ in range(_depth())]
    if above and above[-1] is lowest:
        _push(above.pop())
    _push(mode)
    _restore(above)


def remove(mode: TorchFunctionMode) -> None:
    """Take `mode` off this thread's stack, wherever in it it stands; harmless when it isn't there."""
    if installed(mode):
        _restore([other for other in [_pop() for _ in range(_depth())] if other is not mode])


def _restore(above: Collection[Any]) -> None:
    for other in reversed(list(above)):
        _push(other)
