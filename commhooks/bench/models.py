"""The shapes and the operation counts of the models whose training the benches replay.

Where in the flow: `bench.replay` builds a module from a `ModelSpec`; `core.fluid` and `simulate` read its shares.

Invariants: layers stand in forward order; a model's parameter count is the published one; operations are
multiply-adds of one forward pass of one sample (only their proportions matter here).

Sources: ResNet-50 (He et al. 2016, the variant whose stride sits in the 3x3 convolution), VGG-19 (Simonyan and
Zisserman 2015), Inception v3 (Szegedy et al. 2016) with torchvision's sizes; a Sockeye-like LSTM as P3 trained it
(IWSLT15 en-vi, 512 units, two layers on each side, about 17,200 and 7,700 words); a transformer of GPT-2-small's size,
with its input and its output embedding as two matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from commhooks.core.fluid import LayerShare
from commhooks.errors import ConfigError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class LayerSpec:
    """One layer: parameters that are read together.

    Attributes
    ----------
    name : unique within its model
    shapes : the shape of each parameter
    operations : multiply-adds of its forward pass for one sample
    """

    name: str
    shapes: tuple[Shape, ...]
    operations: float

    @property
    def numel(self) -> int:
        """Number of parameter elements."""
        return sum(math.prod(shape) for shape in self.shapes)


@dataclass(frozen=True)
class ModelSpec:
    """A model: its layers in forward order."""

    name: str
    layers: tuple[LayerSpec, ...]

    @property
    def numel(self) -> int:
        """Number of parameter elements."""
        return sum(layer.numel for layer in self.layers)

    @property
    def operations(self) -> float:
        """Multiply-adds of one forward pass of one sample."""
        return sum(layer.operations for layer in self.layers)

    def shares(self) -> tuple[LayerShare, ...]:
        """Each layer's share of the computing and of the parameters (both sum to 1)."""
        operations, numel = self.operations, self.numel
        return tuple(LayerShare(layer.operations / operations, layer.numel / numel) for layer in self.layers)


def scaled(model: ModelSpec, scale: float) -> ModelSpec:
    """The model with about `scale` times the parameters and the operations, layer by layer.

    Scaled parameters are flat (only their sizes matter to the network); each keeps at least one element.
    """
    if not 0 < scale <= 1:
        raise ConfigError(f"scale is {scale:g}; it must be above 0 and at most 1")
    if scale == 1:
        return model
    return ModelSpec(model.name, tuple(_scaled_layer(layer, scale) for layer in model.layers))


def _scaled_layer(layer: LayerSpec, scale: float) -> LayerSpec:
    shapes = tuple((max(1, round(math.prod(shape) * scale)),) for shape in layer.shapes)
    return LayerSpec(layer.name, shapes, layer.operations * scale)


# --- Building blocks ----------------------------------------------------------------------------------------------------


def _conv_norm(name: str, inputs: int, outputs: int, kernel: tuple[int, int], size: int) -> LayerSpec:
    """A convolution without bias and its batch norm, on an output of `size` x `size`."""
    height, width = kernel
    weight = (outputs, inputs, height, width)
    return LayerSpec(name, (weight, (outputs,), (outputs,)), math.prod(weight) * size * size)


def _linear(name: str, inputs: int, outputs: int, times: int = 1) -> LayerSpec:
    """A fully connected layer with bias, applied to `times` positions."""
    return LayerSpec(name, ((outputs, inputs), (outputs,)), float(inputs * outputs * times))


def _embedding(name: str, words: int, width: int, times: int) -> LayerSpec:
    """A table of `words` rows; looking up a row costs about its width."""
    return LayerSpec(name, ((words, width),), float(width * times))


# --- ResNet-50 ----------------------------------------------------------------------------------------------------------


def _bottleneck(name: str, inputs: int, width: int, size: int, stride: int) -> Iterator[LayerSpec]:
    yield _conv_norm(f"{name}.conv1", inputs, width, (1, 1), size * stride)
    yield _conv_norm(f"{name}.conv2", width, width, (3, 3), size)
    yield _conv_norm(f"{name}.conv3", width, 4 * width, (1, 1), size)
    if stride != 1 or inputs != 4 * width:
        yield _conv_norm(f"{name}.downsample", inputs, 4 * width, (1, 1), size)


def _resnet50() -> Iterator[LayerSpec]:
    yield _conv_norm("conv1", 3, 64, (7, 7), 112)
    inputs = 64
    for stage, (width, blocks, size) in enumerate(
        ((64, 3, 56), (128, 4, 28), (256, 6, 14), (512, 3, 7)), start=1
    ):
        for block in range(blocks):
            stride = 2 if block == 0 and stage > 1 else 1
            yield from _bottleneck(f"layer{stage}.{block}", inputs, width, size, stride)
            inputs = 4 * width
    yield _linear("fc", 2048, 1000)


# --- VGG-19 -------------------------------------------------------------------------------------------------------------


def _vgg19() -> Iterator[LayerSpec]:
    inputs = 3
    for stage, (width, count, size) in enumerate(
        ((64, 2, 224), (128, 2, 112), (256, 4, 56), (512, 4, 28), (512, 4, 14)), start=1
    ):
        for index in range(1, count + 1):
            weight = (width, inputs, 3, 3)
            yield LayerSpec(f"conv{stage}_{index}", (weight, (width,)), math.prod(weight) * size * size)
            inputs = width
    yield _linear("fc6", 512 * 7 * 7, 4096)
    yield _linear("fc7", 4096, 4096)
    yield _linear("fc8", 4096, 1000)


# --- Inception v3 -------------------------------------------------------------------------------------------------------

_Branch = tuple[str, int, int, tuple[int, int], int]  # name, inputs, outputs, kernel, output size


def _branches(block: str, rows: Iterable[_Branch]) -> Iterator[LayerSpec]:
    for name, inputs, outputs, kernel, size in rows:
        yield _conv_norm(f"{block}.{name}", inputs, outputs, kernel, size)


def _inception_a(block: str, inputs: int, pool: int) -> Iterator[LayerSpec]:
    yield from _branches(
        block,
        (
            ("branch1x1", inputs, 64, (1, 1), 35),
            ("branch5x5_1", inputs, 48, (1, 1), 35),
            ("branch5x5_2", 48, 64, (5, 5), 35),
            ("branch3x3dbl_1", inputs, 64, (1, 1), 35),
            ("branch3x3dbl_2", 64, 96, (3, 3), 35),
            ("branch3x3dbl_3", 96, 96, (3, 3), 35),
            ("branch_pool", inputs, pool, (1, 1), 35),
        ),
    )


def _inception_b(block: str, inputs: int) -> Iterator[LayerSpec]:
    yield from _branches(
        block,
        (
            ("branch3x3", inputs, 384, (3, 3), 17),
            ("branch3x3dbl_1", inputs, 64, (1, 1), 35),
            ("branch3x3dbl_2", 64, 96, (3, 3), 35),
            ("branch3x3dbl_3", 96, 96, (3, 3), 17),
        ),
    )


def _inception_c(block: str, inputs: int, width: int) -> Iterator[LayerSpec]:
    yield from _branches(
        block,
        (
            ("branch1x1", inputs, 192, (1, 1), 17),
            ("branch7x7_1", inputs, width, (1, 1), 17),
            ("branch7x7_2", width, width, (1, 7), 17),
            ("branch7x7_3", width, 192, (7, 1), 17),
            ("branch7x7dbl_1", inputs, width, (1, 1), 17),
            ("branch7x7dbl_2", width, width, (7, 1), 17),
            ("branch7x7dbl_3", width, width, (1, 7), 17),
            ("branch7x7dbl_4", width, width, (7, 1), 17),
            ("branch7x7dbl_5", width, 192, (1, 7), 17),
            ("branch_pool", inputs, 192, (1, 1), 17),
        ),
    )


def _inception_d(block: str, inputs: int) -> Iterator[LayerSpec]:
    yield from _branches(
        block,
        (
            ("branch3x3_1", inputs, 192, (1, 1), 17),
            ("branch3x3_2", 192, 320, (3, 3), 8),
            ("branch7x7x3_1", inputs, 192, (1, 1), 17),
            ("branch7x7x3_2", 192, 192, (1, 7), 17),
            ("branch7x7x3_3", 192, 192, (7, 1), 17),
            ("branch7x7x3_4", 192, 192, (3, 3), 8),
        ),
    )


def _inception_e(block: str, inputs: int) -> Iterator[LayerSpec]:
    yield from _branches(
        block,
        (
            ("branch1x1", inputs, 320, (1, 1), 8),
            ("branch3x3_1", inputs, 384, (1, 1), 8),
            ("branch3x3_2a", 384, 384, (1, 3), 8),
            ("branch3x3_2b", 384, 384, (3, 1), 8),
            ("branch3x3dbl_1", inputs, 448, (1, 1), 8),
            ("branch3x3dbl_2", 448, 384, (3, 3), 8),
            ("branch3x3dbl_3a", 384, 384, (1, 3), 8),
            ("branch3x3dbl_3b", 384, 384, (3, 1), 8),
            ("branch_pool", inputs, 192, (1, 1), 8),
        ),
    )


def _inceptionv3(auxiliary: bool) -> Iterator[LayerSpec]:
    yield from _branches(
        "stem",
        (
            ("conv1a", 3, 32, (3, 3), 149),
            ("conv2a", 32, 32, (3, 3), 147),
            ("conv2b", 32, 64, (3, 3), 147),
            ("conv3b", 64, 80, (1, 1), 73),
            ("conv4a", 80, 192, (3, 3), 71),
        ),
    )
    yield from _inception_a("mixed5b", 192, 32)
    yield from _inception_a("mixed5c", 256, 64)
    yield from _inception_a("mixed5d", 288, 64)
    yield from _inception_b("mixed6a", 288)
    for block, width in (("mixed6b", 128), ("mixed6c", 160), ("mixed6d", 160), ("mixed6e", 192)):
        yield from _inception_c(block, 768, width)
    if auxiliary:
        yield _conv_norm("aux.conv0", 768, 128, (1, 1), 5)
        yield _conv_norm("aux.conv1", 128, 768, (5, 5), 1)
        yield _linear("aux.fc", 768, 1000)
    yield from _inception_d("mixed7a", 768)
    yield from _inception_e("mixed7b", 1280)
    yield from _inception_e("mixed7c", 2048)
    yield _linear("fc", 2048, 1000)


# --- Sequences ----------------------------------------------------------------------------------------------------------

_SOURCE_WORDS, _TARGET_WORDS, _WIDTH, _POSITIONS = 17_191, 7_709, 512, 24


def _lstm(name: str, inputs: int, width: int) -> LayerSpec:
    weights = ((4 * width, inputs), (4 * width, width))
    shapes = (*weights, (4 * width,), (4 * width,))
    return LayerSpec(name, shapes, float(sum(map(math.prod, weights)) * _POSITIONS))


def _sockeye() -> Iterator[LayerSpec]:
    half = _WIDTH // 2
    yield _embedding("source.embedding", _SOURCE_WORDS, _WIDTH, _POSITIONS)
    yield _lstm("encoder.0.forward", _WIDTH, half)
    yield _lstm("encoder.0.backward", _WIDTH, half)
    yield _lstm("encoder.1", _WIDTH, _WIDTH)
    yield _embedding("target.embedding", _TARGET_WORDS, _WIDTH, _POSITIONS)
    yield _lstm("decoder.0", 2 * _WIDTH, _WIDTH)
    yield _lstm("decoder.1", _WIDTH, _WIDTH)
    yield _linear("attention", 2 * _WIDTH, _WIDTH, _POSITIONS)
    yield _linear("output", _WIDTH, _TARGET_WORDS, _POSITIONS)


def _transformer_block(name: str, width: int, positions: int) -> Iterator[LayerSpec]:
    norm = ((width,), (width,))
    attention = ((3 * width, width), (3 * width,), (width, width), (width,))
    inner = ((4 * width, width), (4 * width,), (width, 4 * width), (width,))
    scores = 2 * positions * positions * width
    yield LayerSpec(f"{name}.attention", (*norm, *attention), float(4 * width * width * positions + scores))
    yield LayerSpec(f"{name}.mlp", (*norm, *inner), float(8 * width * width * positions))


def _transformer(
    blocks: int = 12, width: int = 768, words: int = 37_000, positions: int = 1024
) -> Iterator[LayerSpec]:
    yield LayerSpec("embedding", ((words, width), (positions, width)), float(2 * width * positions))
    for block in range(blocks):
        yield from _transformer_block(f"block{block}", width, positions)
    yield LayerSpec("norm", ((width,), (width,)), float(width * positions))
    yield LayerSpec("output", ((words, width),), float(words * width * positions))


def _equal_layers(count: int, width: int) -> Iterator[LayerSpec]:
    for index in range(count):
        yield _linear(f"layer{index}", width, width)


_MODELS: dict[str, Callable[[], Iterator[LayerSpec]]] = {
    "resnet50": _resnet50,
    "vgg19": _vgg19,
    "inceptionv3": lambda: _inceptionv3(auxiliary=True),
    "inceptionv3-noaux": lambda: _inceptionv3(auxiliary=False),
    "sockeye": _sockeye,
    "transformer": _transformer,
    "eight": lambda: _equal_layers(8, 512),
    "tiny": lambda: _equal_layers(4, 64),
}

MODEL_NAMES = tuple(_MODELS)


def model_spec(name: str) -> ModelSpec:
    """The model called `name`.

    Raises
    ------
    ConfigError
        There is none of that name.
    """
    if name not in _MODELS:
        raise ConfigError(f"no model is called {name!r}; choose one of {', '.join(MODEL_NAMES)}")
    return ModelSpec(name, tuple(_MODELS[name]()))
