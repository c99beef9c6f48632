"""``commhooks bench replan``: a real network that changes under training, and what it refuses."""

from __future__ import annotations

import json
import sys

import pytest
from test_lab import needs_root

from commhooks.cli import main
from commhooks.lab import Lab


@needs_root
def test_steps_before_then_and_by_the_new_plan() -> None:
    words = [
        "--to",
        "rank2.up=80",
        "--to",
        "rank2.down=80",
        "--mb",
        "4",
        "--steps",
        "2",
        "--most",
        "60",
        "--json",
    ]
    with Lab("nic:400*4") as lab:
        outcome = lab.run([sys.executable, "-m", "commhooks", "bench", "replan", *words], timeout_s=240)
    assert outcome.exit_code == 0, outcome.stderr
    (row,) = json.loads(outcome.stdout)
    assert row["ranks"] == 4 and row["bytes"] == 4_000_000
    assert row["switch"].startswith("switched:") and 0 < row["steps_until_switch"] <= 60
    assert row["before_min_s"] <= row["before_s"] <= row["before_max_s"]
    assert 0 < row["of_bound"] < 1.05


@pytest.mark.parametrize(
    ("words", "told"),
    [([], "commhooks lab TOPOLOGY"), (["--to", "wan"], "commhooks lab TOPOLOGY")],
)
def test_outside_of_a_lab_it_says_how_to_run_it(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["bench", "replan", *words]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("text", ["wan", "wan=", "wan=-1", "=100", "wan=x"])
def test_a_bad_change_names_the_form(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("COMMHOOKS_TOPOLOGY", "nic:100*2")
    assert main(["bench", "replan", "--to", text]) == 2
    assert "RESOURCE=MBIT" in capsys.readouterr().err
