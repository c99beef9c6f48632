"""Our trace and Horovod's as one file: on one clock, with processes that don't collide."""

from __future__ import annotations

import json

import pytest

from commhooks.cli import main
from commhooks.errors import ConfigError
from commhooks.timeline_merge import merge

OURS = json.dumps(
    {"traceEvents": [{"ph": "X", "cat": "link", "name": "layer 0", "pid": 0, "ts": 1_000_050.0, "dur": 5.0}]}
)
HOROVODS = """[
{"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros":1000000}},
{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "fc.weight"}},
{"ph": "X", "name": "ALLREDUCE", "ts": 40, "pid": 1, "dur": 20}"""


@pytest.mark.parametrize("end", ["]", ",", ",\n{}\n]", ""])
def test_horovods_times_become_wall_clock_times(end):
    ours, *theirs = merge([OURS, HOROVODS + end])
    assert ours["ts"] == 1_000_050.0
    (allreduce,) = [event for event in theirs if event["name"] == "ALLREDUCE"]
    assert allreduce["ts"] == 1_000_040 and allreduce["pid"] != ours["pid"]
    names = {event["pid"]: event["args"]["name"] for event in theirs if event["ph"] == "M"}
    assert names[allreduce["pid"]] == "fc.weight" and "Horovod" in names.values()


def test_something_else_is_refused():
    with pytest.raises(ConfigError, match="HOROVOD_TIMELINE"):
        merge(["no trace"])


def test_the_command_writes_one_file(tmp_path, capsys):
    first, second, out = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "out.json"
    first.write_text(OURS)
    second.write_text(HOROVODS + "]")
    assert main(["timeline", str(first), str(second), "--merge", str(out), "--json"]) == 0
    assert {row["name"] for row in json.loads(capsys.readouterr().out)} >= {"layer 0", "ALLREDUCE"}
    assert len(json.loads(out.read_text())["traceEvents"]) == 4
