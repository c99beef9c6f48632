"""``commhooks bench bandwidths``: the paper's points on our axis, the fluid limit, the picture, and bad input.

The labs that it runs are those of ``bench train``, which has tests of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from commhooks.bench import bandwidths
from commhooks.bench.p3_figures import P3_FIGURE_7, relative
from commhooks.cli import main


@pytest.mark.parametrize(("model", "gain"), [("resnet50", 1.26), ("vgg19", 1.65), ("sockeye", 1.49)])
def test_the_papers_gain_is_largest_below_or_near_the_balance_point(model: str, gain: float) -> None:
    points = relative(P3_FIGURE_7[model])
    at, best = max(points, key=lambda point: point[1])
    assert best == pytest.approx(gain, abs=0.02)
    assert at < 1.5
    assert [x for x, _ in points] == sorted(x for x, _ in points)


def test_the_fluid_limit_is_a_third_at_balance_and_nothing_with_bandwidth_to_spare() -> None:
    assert bandwidths.fluid_speedup("resnet50", 1.0) == pytest.approx(4 / 3, rel=0.01)
    assert bandwidths.fluid_speedup("vgg19", 4.0) == pytest.approx(1.0, rel=0.01)


def test_rows_become_a_table_and_a_picture(tmp_path: Path) -> None:
    row = {
        "model": "vgg19",
        "peer": "p3-baseline",
        "peer_s": 2.0,
        "commhooks_s": 1.0,
        "speedup": 2.0,
        "fluid_limit": 1.3,
    }
    rows = [{**row, "bandwidth": x, "paper": p} for x, p in ((0.5, 1.2), (1.0, None))]
    text = bandwidths.table(rows)
    assert "| vgg19 | 0.5 | 2.000 | 1.000 | 2.00 | 1.30 | 1.20 |" in text and "| – |" in text
    bandwidths.draw(rows, str(tmp_path / "picture.png"))
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("words", [["--models", "resnet51"], ["--bandwidths", "1,-2"], ["--bandwidths", "x"]])
def test_bad_input_is_refused_before_anything_runs(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "bandwidths", *words]) == 2
    assert words[1].split(",")[-1] in capsys.readouterr().err
