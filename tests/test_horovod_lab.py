"""Horovod on an emulated network, started by torchrun's variables: each rank on a host of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.horovod_ranks import HERE, need_horovod
from tests.test_lab import needs_root

need_horovod()


@needs_root
@pytest.mark.parametrize("schedule", ["auto", "native"])
def test_horovod_and_our_optimizer_between_emulated_hosts(schedule):
    """Patch 0004: process sets use the chosen interface; and our shim gives each rank its place and rendezvous."""
    command = [sys.executable, "-m", "commhooks", "lab", "nic:400,800", "--", sys.executable]
    done = subprocess.run(
        [*command, str(HERE / "horovod_lab_worker.py")],
        env={
            **os.environ,
            "PYTHONPATH": str(HERE.parent),
            "COMMHOOKS_SCHEDULE": schedule,
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WORLD 2 1 2 [0, 1] True" in done.stdout
