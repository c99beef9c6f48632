"""Flat tensors as bytes: regions to send, and adding, copying and scaling runs of elements.

Where in the flow: the engine's hands; between jobs (tensors) and links (bytes).

Invariants: works in the tensor's own memory; no allocation per call; every large operation releases the interpreter lock.
numpy adds where it knows the type (one thread, vectorised); torch adds the half types, in runs short enough that
torch doesn't wake its thread pool, which belongs to the user's training.
"""

from __future__ import annotations

import numpy as np
import torch

from commhooks.errors import UnsupportedModelError
from commhooks.links.base import Payload, Region

# Payloads in another process's memory pass through scratch of this size: small enough for the caches, few calls.
SCRATCH_BYTES = 1 << 20
# Below torch's grain size of 32,768 elements an operation stays on the calling thread.
_TORCH_RUN_NUMEL = 32_000

_NUMPY: dict[torch.dtype, type[np.generic]] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.complex64: np.complex64,
    torch.complex128: np.complex128,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.uint8: np.uint8,
}
_HALF = frozenset((torch.float16, torch.bfloat16))


class FlatBuffer:
    """A contiguous one-dimensional CPU tensor, seen as elements and as bytes.

    Raises
    ------
    UnsupportedModelError
        The tensor is not on the CPU, not contiguous, sparse, or of a type that can't be added exactly (fp8, bool, …).
    """

    __slots__ = ("_array", "address", "bytes", "dtype", "itemsize", "nbytes", "numel", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        check_tensor(tensor)
        self.tensor = tensor = tensor.detach()
        self.dtype = tensor.dtype
        self.itemsize = tensor.element_size()
        self.numel = tensor.numel()
        self.nbytes = self.numel * self.itemsize
        self.address = tensor.data_ptr()
        flat = tensor.view(-1)
        raw: np.ndarray = flat.view(torch.uint8).numpy() if self.numel else np.empty(0, np.uint8)
        self.bytes = memoryview(raw)
        self._array = raw.view(_NUMPY[self.dtype]) if self.dtype in _NUMPY else None

    def region(self, start: int, stop: int) -> Region:
        """The bytes of elements ``start:stop``."""
        low = start * self.itemsize
        return Region(self.bytes[low : stop * self.itemsize], self.address + low)

    def add(self, start: int, stop: int, payload: Payload, scratch: memoryview) -> None:
        """Add a payload of the same type to elements ``start:stop``."""
        view = payload.view()
        if view is not None:
            self._add_bytes(start, stop, view)
            return
        size = self.itemsize
        step = len(scratch) // size
        for low in range(start, stop, step):
            high = min(low + step, stop)
            chunk = scratch[: (high - low) * size]
            payload.read_into((low - start) * size, chunk)
            self._add_bytes(low, high, chunk)

    def _add_bytes(self, start: int, stop: int, view: memoryview) -> None:
        if self._array is not None:
            own = self._array[start:stop]
            np.add(own, np.frombuffer(view, dtype=own.dtype), out=own)
            return
        other = torch.frombuffer(view, dtype=self.dtype)
        flat = self.tensor.view(-1)
        for low in range(start, stop, _TORCH_RUN_NUMEL):
            high = min(low + _TORCH_RUN_NUMEL, stop)
            flat[low:high].add_(other[low - start : high - start])

    def take(self, start: int, stop: int, payload: Payload) -> None:
        """Overwrite elements ``start:stop`` by a payload."""
        payload.read_into(0, self.bytes[start * self.itemsize : stop * self.itemsize])

    def divide(self, start: int, stop: int, divisor: int) -> None:
        """Divide elements ``start:stop`` (what an average is; the same rounding as torch's ``div_``)."""
        if self._array is not None:
            own = self._array[start:stop]
            np.divide(own, own.dtype.type(divisor), out=own)
            return
        flat = self.tensor.view(-1)
        for low in range(start, stop, _TORCH_RUN_NUMEL):
            flat[low : min(low + _TORCH_RUN_NUMEL, stop)].div_(divisor)


def check_tensor(tensor: torch.Tensor) -> None:
    """Refuse what can't be reduced in place, by name."""
    if tensor.layout is not torch.strided:
        raise UnsupportedModelError(
            f"a {tensor.layout} tensor can't be sliced; keep sparse gradients on the native path"
        )
    if tensor.device.type != "cpu":
        raise UnsupportedModelError(
            f"a tensor on {tensor.device} can't be sent by trees; set COMMHOOKS_SCHEDULE=native for this group"
        )
    if tensor.dtype not in _NUMPY and tensor.dtype not in _HALF:
        known = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in (*_NUMPY, *_HALF)))
        raise UnsupportedModelError(f"{tensor.dtype} can't be summed; use one of {known}")
    if not tensor.is_contiguous():
        raise UnsupportedModelError("the tensor isn't contiguous; pass tensor.contiguous()")
    if tensor.is_conj() or tensor.is_neg():
        raise UnsupportedModelError(
            "the tensor is a lazy conjugate or negative of its memory; pass tensor.resolve_conj().resolve_neg()"
        )


def prescales(dtype: torch.dtype) -> bool:
    """Whether averages must be scaled before the sum: fp16 sums of legal gradients overflow (40,000 + 40,000)."""
    return dtype == torch.float16


def scratch_memory() -> memoryview:
    """Scratch for `FlatBuffer.add`; one per engine thread."""
    return memoryview(np.empty(SCRATCH_BYTES, dtype=np.uint8))
