"""A network that changes while ranks train: they switch to another plan at the same step, and no gradient is lost or wrong.

How soon and how well the plan fits is a matter of measuring (``commhooks bench``); here only what must hold on any machine.
"""

import json
import sys
from pathlib import Path

from test_lab import needs_root

from commhooks.lab import Lab

WORKER = Path(__file__).parent / "lab_replan.py"
RANKS = 4
CHANGE_AT = 3
MOST_STEPS = 60


@needs_root
def test_all_ranks_switch_at_the_same_step_and_gradients_stay_those_of_plain_ddp():
    with Lab(f"nic:400*{RANKS}") as lab:
        command = [sys.executable, str(WORKER), str(CHANGE_AT), "rank2.*=100", str(MOST_STEPS)]
        outcome = lab.run(command, timeout_s=240)  # each step's gradients are compared inside
    assert outcome.exit_code == 0, outcome.stderr
    reports = [
        json.loads(line.split("] ", 1)[1]) for line in outcome.stderr.splitlines() if '{"rank"' in line
    ]
    assert sorted(report.pop("rank") for report in reports) == list(range(RANKS)), outcome.stderr
    first = reports[0]
    assert all(report == first for report in reports), reports
    assert any(step >= CHANGE_AT for step, _ in first["switches"]), first
    assert first["plan_after"] != first["plan_before"]
    assert first["counted_steps"] == first["steps"]
