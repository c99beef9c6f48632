"""What the user's ``.grad`` held when ``backward()`` ended, to tell whether it was touched since.

Where in the flow: deferred asks before it overwrites a local gradient by an average, or ignores it.

Gradients can share one memory and with it one version counter (``gradient_as_bucket_view``; the pieces of a stack), so our own
write to one is counted in for all that were unchanged until then.

Invariants: a gradient counts as unchanged only if it is the same object with the version we know.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


class LocalGradients:
    """The gradients of one backward pass."""

    def __init__(self) -> None:
        self._gradients: dict[int, torch.Tensor] = {}
        self._versions: dict[int, int] = {}
        self._sharing: dict[int, list[torch.Tensor]] = {}

    def remember(self, parameters: Iterable[torch.Tensor]) -> None:
        """Take note of what ``.grad`` holds now."""
        self._gradients, self._versions, self._sharing = {}, {}, {}
        with torch._C.DisableTorchFunction():
            for parameter in parameters:
                gradient = parameter.grad
                if gradient is not None:
                    self._gradients[id(parameter)] = gradient
                    self._versions[id(gradient)] = gradient._version
                    self._sharing.setdefault(_memory(gradient), []).append(gradient)

    def knows(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter had a gradient when the last complete backward pass ended."""
        return id(parameter) in self._gradients

    def changed(self, parameter: torch.Tensor) -> bool:
        """Whether ``.grad`` is another tensor than then, or was written to by someone else."""
        known = self._gradients.get(id(parameter))
        return known is None or parameter.grad is not known or not self._untouched(known)

    def _untouched(self, gradient: torch.Tensor) -> bool:
        return self._versions[id(gradient)] == gradient._version

    def replace(self, parameter: torch.Tensor, average: torch.Tensor) -> None:
        """Write the average into an unchanged ``.grad``; it stays unchanged in the sense of `changed`."""
        gradient = self._gradients[id(parameter)]
        untouched = [other for other in self._sharing[_memory(gradient)] if self._untouched(other)]
        gradient.copy_(average)
        self._versions.update((id(other), other._version) for other in untouched)

    def hand_back(self, parameters: Sequence[torch.Tensor], averages: Sequence[torch.Tensor]) -> None:
        """After a step: where the user kept the gradients, let them hold what plain DDP would have left there."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for parameter, average in zip(parameters, averages, strict=True):
                if parameter.grad is not None and not self.changed(parameter):
                    self.replace(parameter, average)


def _memory(gradient: torch.Tensor) -> int:
    """Names the memory that a gradient lies in."""
    return gradient.untyped_storage().data_ptr()
