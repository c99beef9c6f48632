"""How a commit changes the server's parameters: plain addition, server momentum, delayed Nesterov.

Where in the flow: ``server`` calls ``apply`` once per slice of a commit, in order of arrival.

Invariants: arrays are changed in place and keep shape and dtype; with momentum 0 every rule is plain addition.

Source: ADSP (AAAI 2020): W += U/M, and its explicit momentum; delayed Nesterov: Async Local-SGD (arXiv 2401.09135).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from commhooks.errors import ConfigError

Array = NDArray[np.float32]


@dataclass
class Accumulators:
    """What a rule keeps per slice: its momentum, the sum of buffered commits, and how many those are."""

    momentum: Array | None = None
    buffered: Array | None = None
    count: int = 0


class UpdateRule(Protocol):
    """Adds one commit (``delta`` = U, ``members`` = M) to ``value`` in place."""

    def apply(self, value: Array, delta: Array, members: int, kept: Accumulators) -> None: ...


@dataclass(frozen=True)
class PlainAddition:
    """``W += U/M``."""

    def apply(self, value: Array, delta: Array, members: int, kept: Accumulators) -> None:
        value += delta / np.float32(members)


@dataclass(frozen=True)
class ServerMomentum:
    """``v = mu v + U/M;  W += v``: explicit momentum on top of what asynchrony already causes."""

    mu: float

    def __post_init__(self) -> None:
        _check_momentum(self.mu)

    def apply(self, value: Array, delta: Array, members: int, kept: Accumulators) -> None:
        if kept.momentum is None:
            kept.momentum = np.zeros_like(value)
        kept.momentum *= np.float32(self.mu)
        kept.momentum += delta / np.float32(members)
        value += kept.momentum


@dataclass(frozen=True)
class DelayedNesterov:
    """``W += U/M`` at once; momentum only on every ``every``-th commit, from the mean of those buffered.

    Momentum applied on each arrival would multiply with the momentum of asynchrony; delayed, it acts once per
    round. ``every`` 0: as many as there are members.
    """

    mu: float
    every: int = 0

    def __post_init__(self) -> None:
        _check_momentum(self.mu)
        if self.every < 0:
            raise ConfigError(f"delayed Nesterov: every must be >= 0 commits, got {self.every}")

    def apply(self, value: Array, delta: Array, members: int, kept: Accumulators) -> None:
        if kept.momentum is None or kept.buffered is None:
            kept.momentum, kept.buffered = np.zeros_like(value), np.zeros_like(value)
        share = delta / np.float32(members)
        value += share
        kept.buffered += share
        kept.count += 1
        if kept.count >= (self.every or members):
            kept.momentum *= np.float32(self.mu)
            kept.momentum += kept.buffered
            value += np.float32(self.mu) * kept.momentum
            kept.buffered[:] = 0.0
            kept.count = 0


def _check_momentum(mu: float) -> None:
    if not 0.0 <= mu < 1.0:
        raise ConfigError(f"server momentum must be in [0, 1), got {mu!r}")
