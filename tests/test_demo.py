"""The demo, short: both runs end with the same parameters, and it leaves a picture and a trace."""

import json
import re
import sys
from pathlib import Path

from test_lab import needs_root

from commhooks import shell

DEMO = Path(__file__).parent.parent / "examples" / "demo.py"


@needs_root
def test_the_demo_compares_and_leaves_a_picture_and_a_trace(tmp_path):
    own = [sys.executable, str(DEMO), "--steps", "4", "--batch", "4", "--out", str(tmp_path)]
    done = shell.run([sys.executable, "-m", "commhooks", "lab", "nic:200,800", "--", *own], timeout_s=120)
    assert "plain DDP" in done.stdout and "speed-up per step" in done.stdout
    difference = float(re.search(r"final parameters: (\S+)", done.stdout)[1])
    assert difference < 1e-5
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "demo-trace.json").read_text())["traceEvents"]
    steps = [event for event in events if event.get("cat") == "step"]
    assert len(steps) == 2 * 2 * 4  # runs, ranks, steps
    assert any(event.get("cat") not in (None, "step") for event in events), "nothing from the engine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo-trace.json", "demo.png"]
    assert "100 %" in done.stderr
