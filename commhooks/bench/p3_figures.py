"""What P3's authors measured (figure 7), to set our figures beside.

Where in the flow: data for ``bench bandwidths``; nothing here decides anything.

Read off the published figures: throughput of four machines (images or sentences a second) at a bandwidth in Gbit/s, of the
paper's baseline (MXNet's parameter server) and of P3.
"""

from __future__ import annotations

from typing import NamedTuple


class Throughput(NamedTuple):
    """One bandwidth of one model."""

    gbit_per_s: float
    baseline: float
    p3: float


_POINTS = {
    "resnet50": (
        (1, 22.1, 25.2), (2, 43.7, 50.3), (3, 61.0, 76.2), (4, 76.4, 96.5), (5, 90.6, 99.0), (6, 98.0, 101.9), (7, 98.5, 100.2),
        (8, 99.2, 100.6), (10, 99.2, 100.6),
    ),
    "inceptionv3": (
        (1, 25.0, 26.4), (2, 45.1, 52.7), (3, 61.2, 69.0), (4, 67.4, 69.8), (5, 67.5, 69.4), (6, 67.4, 70.5), (7, 68.1, 69.1),
        (10, 68.1, 70.2),
    ),
    "vgg19": (
        (3, 13.0, 13.8), (4, 16.6, 18.4), (5, 19.8, 22.8), (6, 22.4, 27.3), (7, 24.7, 31.5), (8, 26.8, 35.5), (9, 28.5, 39.3),
        (10, 30.1, 43.4), (12, 32.1, 50.3), (15, 32.9, 54.3), (20, 34.3, 54.5), (30, 34.8, 55.0),
    ),
    "sockeye": (
        (1, 15.8, 23.6), (2, 33.6, 46.3), (3, 51.0, 67.8), (4, 67.0, 88.2), (5, 82.9, 106.6), (6, 95.1, 123.5),
        (7, 104.2, 136.8), (8, 112.1, 143.6), (9, 117.8, 150.3), (10, 122.0, 154.8), (15, 134.1, 166.8), (20, 136.7, 166.0),
        (25, 137.4, 167.9), (30, 139.3, 167.8),
    ),
}  # fmt: skip

P3_FIGURE_7 = {model: tuple(Throughput(*point) for point in points) for model, points in _POINTS.items()}


def relative(points: tuple[Throughput, ...]) -> list[tuple[float, float]]:
    """A model's points as (bandwidth, speed-up of P3 over its baseline), bandwidth in units of its balance point.

    The balance point is the bandwidth at which communication takes as long as computing.  It follows from the figure alone: at
    the lowest bandwidth P3 does nothing but communicate, at the highest nothing but compute.
    """
    slowest = min(points)
    balance_gbit_per_s = max(point.p3 for point in points) / (slowest.p3 / slowest.gbit_per_s)
    return [(point.gbit_per_s / balance_gbit_per_s, point.p3 / point.baseline) for point in points]
