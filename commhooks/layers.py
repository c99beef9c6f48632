"""Which layer a parameter belongs to, and how soon the next forward needs it.

Where in the flow: DDP bucket -> **layers** -> slicing.

Invariants: the order is by forward use (first layer first), never by bucket index (mixed dtypes and rebuilt buckets
scramble that); a parameter seen without a model gets a place of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commhooks.core.slicing import Segment

_UNSEEN = 1 << 30


class LayerOrder:
    """Priority and layer of every parameter.

    The first order is the order of declaration, which for most models is the order of the forward pass; `learn` replaces
    it by an observed one.

    Parameters
    ----------
    model : its modules own the parameters; None: parameters are ranked as they are seen (DDP shows the last layer first)
    """

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._places: dict[int, tuple[int, int]] = {}
        self._unseen = 0
        # Ids are only unique among living objects.
        self._alive: list[torch.nn.Parameter] = []
        self.names: dict[int, str] = {}
        if model is not None:
            for layer, (prefix, module) in enumerate(model.named_modules()):
                for name, parameter in module.named_parameters(recurse=False):
                    self._places.setdefault(id(parameter), (layer, layer))
                    self.names.setdefault(id(parameter), f"{prefix}.{name}" if prefix else name)
                    self._alive.append(parameter)

    def place(self, parameter: torch.Tensor) -> tuple[int, int]:
        """(priority, layer); smaller priority is needed sooner."""
        place = self._places.get(id(parameter))
        if place is None:
            self._unseen += 1
            place = self._places[id(parameter)] = (_UNSEEN - self._unseen, _UNSEEN - self._unseen)
            self._alive.append(parameter)  # type: ignore[arg-type]
        return place

    def learn(self, order: Sequence[torch.Tensor]) -> None:
        """Take over an observed order of first use; layers stay as they are."""
        for priority, parameter in enumerate(order):
            _, layer = self.place(parameter)
            self._places[id(parameter)] = (priority, layer)

    def segments(self, parameters: Sequence[torch.Tensor], by_layer: bool = True) -> list[Segment]:
        """The parameters of a flat buffer as segments; ``by_layer=False`` gives all the same priority (FIFO)."""
        segments = []
        for parameter in parameters:
            priority, layer = self.place(parameter)
            # DDP's bucket of complex gradients is their real view: two elements each.
            numel = parameter.numel() * (2 if parameter.is_complex() else 1)
            segments.append(Segment(numel, priority if by_layer else 0, layer))
        return segments
