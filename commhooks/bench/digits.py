"""A real training problem small enough for virtual time: scikit-learn's handwritten digits and a CNN in numpy.

Where in the flow: ``simulate_commit`` and ``bench converge`` train it; the network is the same in both (``converge`` builds it
in torch).

Invariants: everything follows from the seeds given as arguments; parameters are one flat float32 vector.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from commhooks.errors import MissingDependency

Array = NDArray[np.float32]
Labels = NDArray[np.int64]

TEST_EVERY = 5
"""Every fifth sample is held out for the loss and accuracy that runs are compared by."""

CHANNELS = (8, 16)
CLASSES = 10


@dataclass(frozen=True)
class Digits:
    """Images as (samples, 8, 8) in [0, 1] and labels, split into training and test."""

    train_x: Array
    train_y: Labels
    test_x: Array
    test_y: Labels


def load_digits() -> Digits:
    """The 1,797 digits that scikit-learn ships, every fifth held out.

    Raises
    ------
    MissingDependency
        scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits as load
    except ImportError as error:
        raise MissingDependency("the digits data set needs scikit-learn: pip install scikit-learn") from error
    raw = load()
    x = (raw.images / 16.0).astype(np.float32)
    y = raw.target.astype(np.int64)
    held_out = np.arange(len(y)) % TEST_EVERY == 0
    return Digits(x[~held_out], y[~held_out], x[held_out], y[held_out])


SHAPES: tuple[tuple[int, ...], ...] = (
    (9, CHANNELS[0]),
    (CHANNELS[0],),
    (9 * CHANNELS[0], CHANNELS[1]),
    (CHANNELS[1],),
    (4 * CHANNELS[1], CLASSES),
    (CLASSES,),
)
"""Weights and biases in forward order: two 3x3 convolutions, each with ReLU and 2x2 mean pooling, and a linear layer."""

SIZES = tuple(int(np.prod(s)) for s in SHAPES)


class DigitsCnn:
    """Loss and gradient of the CNN on mini-batches of the digits.

    Parameters
    ----------
    batch : int
        Samples per mini-batch.
    digits : Digits or None
        Loaded if None.
    """

    size = sum(SIZES)

    def __init__(self, batch: int = 16, digits: Digits | None = None) -> None:
        self._batch = batch
        self._digits = digits if digits is not None else load_digits()

    def initial(self, seed: int) -> Array:
        """He-scaled random weights, zero biases."""
        rng = np.random.default_rng(seed)
        parts = [rng.standard_normal(s) * np.sqrt(2.0 / s[0]) if len(s) == 2 else np.zeros(s) for s in SHAPES]
        return np.concatenate([p.ravel() for p in parts]).astype(np.float32)

    def gradient(self, w: Array, rng: np.random.Generator) -> tuple[float, Array]:
        """Mean cross-entropy of a random mini-batch and its gradient."""
        picks = rng.integers(0, len(self._digits.train_y), self._batch)
        return _loss_and_gradient(w, self._digits.train_x[picks], self._digits.train_y[picks])

    def evaluate(self, w: Array) -> tuple[float, float]:
        """Mean cross-entropy and accuracy on the held-out samples."""
        logits = _forward(_split(w), self._digits.test_x)[-1]
        logp = _log_softmax(logits)
        labels = self._digits.test_y
        loss = float(-logp[np.arange(len(labels)), labels].mean())
        return loss, float((logits.argmax(axis=1) == labels).mean())


def _split(w: Array) -> list[Array]:
    ends = np.cumsum(SIZES)
    return [w[e - n : e].reshape(s) for e, n, s in zip(ends, SIZES, SHAPES)]


def _patches(x: Array) -> Array:
    """(n, h, w, c) -> (n, h, w, 9c): the zero-padded 3x3 neighbourhood of each place."""
    n, h, w, c = x.shape
    padded = np.zeros((n, h + 2, w + 2, c), np.float32)
    padded[:, 1:-1, 1:-1] = x
    shifts = [padded[:, i : i + h, j : j + w] for i in range(3) for j in range(3)]
    return np.concatenate(shifts, axis=3)


def _unpatch(g: Array, channels: int) -> Array:
    """Transpose of ``_patches``."""
    n, h, w, _ = g.shape
    padded = np.zeros((n, h + 2, w + 2, channels), np.float32)
    for k in range(9):
        i, j = divmod(k, 3)
        padded[:, i : i + h, j : j + w] += g[..., k * channels : (k + 1) * channels]
    return padded[:, 1:-1, 1:-1]


def _pool(x: Array) -> Array:
    n, h, w, c = x.shape
    return np.asarray(x.reshape(n, h // 2, 2, w // 2, 2, c).mean(axis=(2, 4)), np.float32)


def _unpool(g: Array) -> Array:
    return np.asarray(g.repeat(2, axis=1).repeat(2, axis=2) / 4.0, np.float32)


def _forward(parts: list[Array], x: Array) -> tuple[Array, Array, Array, Array, Array, Array]:
    w1, b1, w2, b2, w3, b3 = parts
    p1 = _patches(x[..., None])
    a1 = np.maximum(p1 @ w1 + b1, 0.0)
    p2 = _patches(_pool(a1))
    a2 = np.maximum(p2 @ w2 + b2, 0.0)
    features = _pool(a2).reshape(len(x), -1)
    return p1, a1, p2, a2, features, features @ w3 + b3


def _log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)), np.float32)


def _loss_and_gradient(w: Array, x: Array, y: Labels) -> tuple[float, Array]:
    parts = _split(w)
    p1, a1, p2, a2, features, logits = _forward(parts, x)
    logp = _log_softmax(logits)
    rows = np.arange(len(y))
    loss = float(-logp[rows, y].mean())
    d = np.exp(logp)
    d[rows, y] -= 1.0
    d /= len(y)
    d_features = (d @ parts[4].T).reshape(len(y), 2, 2, CHANNELS[1])
    d2 = _unpool(d_features) * (a2 > 0)
    d_pool = _unpatch(d2 @ parts[2].T, CHANNELS[0])
    d1 = _unpool(d_pool) * (a1 > 0)
    grads = (
        p1.reshape(-1, p1.shape[-1]).T @ d1.reshape(-1, CHANNELS[0]),
        d1.sum(axis=(0, 1, 2)),
        p2.reshape(-1, p2.shape[-1]).T @ d2.reshape(-1, CHANNELS[1]),
        d2.sum(axis=(0, 1, 2)),
        features.T @ d,
        d.sum(axis=0),
    )
    return loss, np.concatenate([g.ravel() for g in grads]).astype(np.float32)
