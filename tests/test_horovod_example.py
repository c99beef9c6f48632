"""The example differs from a plain Horovod script by its import, is short, and learns the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.horovod_ranks import HERE, need_horovod

need_horovod()
pytest.importorskip("sklearn")

EXAMPLE = HERE.parent / "examples" / "horovod_digits.py"


def _run(script):
    launcher = Path(sys.executable).with_name("horovodrun")
    command = [str(launcher), "--gloo", "-np", "2", sys.executable, str(script), "--epochs", "2"]
    environ = {**os.environ, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "% right" in line]
    return line.rpartition(", ")[0].partition(">:")[2]


def test_the_example_is_a_horovod_script_but_for_its_import(tmp_path):
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) < 80
    code = text[text.index("import argparse") :]
    assert code.count("commhooks") == 1 and "import commhooks.horovod as hvd\n" in code
    plain = tmp_path / "plain.py"
    plain.write_text(code.replace("import commhooks.horovod as hvd", "import horovod.torch as hvd"))
    ours = _run(EXAMPLE)
    assert ours == _run(plain)
    assert ours.startswith("2 ranks, 2 epochs:")
