"""What the user's ``.grad`` held when ``backward()`` ended, to tell whether it was touched since.

Where in the flow: deferred asks before it overwrites a local gradient by an average, or ignores it.

With ``gradient_as_bucket_view`` all gradients of a bucket share one memory and one version counter, so our own writes are
counted in for all of them.

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

    def remember(self, parameters: Iterable[torch.Tensor]) -> None:
        """Take note of what ``.grad`` holds now."""
        with torch._C.DisableTorchFunction():
            found = [(p, p.grad) for p in parameters]
            self._gradients = {id(p): gradient for p, gradient in found if gradient is not None}
            self._versions = {_memory(gradient): gradient._version for gradient in self._gradients.values()}

    def knows(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter had a gradient when the last complete backward pass ended."""
        return id(parameter) in self._gradients

    def changed(self, parameter: torch.Tensor) -> bool:
        """Whether ``.grad`` is another tensor than then, or was written to by someone else."""
        known = self._gradients.get(id(parameter))
        return (
            known is None or parameter.grad is not known or self._versions[_memory(known)] != known._version
        )

    def replace(self, parameter: torch.Tensor, average: torch.Tensor) -> None:
        """Write the average into an unchanged ``.grad``; it stays unchanged in the sense of `changed`."""
        gradient = self._gradients[id(parameter)]
        gradient.copy_(average)
        self._versions[_memory(gradient)] = gradient._version

    def hand_back(self, parameters: Sequence[torch.Tensor], averages: Sequence[torch.Tensor]) -> None:
        """After a step: where the user kept the gradients, let them hold what plain DDP would have left there."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for parameter, average in zip(parameters, averages, strict=True):
                if parameter.grad is not None and not self.changed(parameter):
                    self.replace(parameter, average)


def _memory(gradient: torch.Tensor) -> int:
    """Names what shares a version counter."""
    base = gradient._base
    return id(gradient if base is None else base)
