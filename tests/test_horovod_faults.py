"""Horovod ranks that die or come late: who and what is named, by us and (patched) by Horovod; waiting is cheap."""

from __future__ import annotations

import queue
import re
import sys
import threading
import time

import pytest

from tests.horovod_ranks import HERE, horovod_ranks, need_horovod

need_horovod()


class Reader:
    """Lines of one rank, as they come."""

    def __init__(self, process):
        self.lines = []
        self._queue = queue.Queue()
        threading.Thread(target=self._read, args=(process.stdout,), daemon=True).start()

    def _read(self, stream):
        for line in stream:
            self._queue.put(line.rstrip())
        self._queue.put(None)

    def until(self, pattern, limit_s=180):
        """The first line that matches."""
        end = time.monotonic() + limit_s
        while True:
            line = self._queue.get(timeout=max(0.1, end - time.monotonic()))
            assert line is not None, "the rank ended; it said:\n" + "\n".join(self.lines)
            self.lines.append(line)
            if re.search(pattern, line):
                return line


def _job(mode, folder, environ=None, count=2):
    command = [sys.executable, str(HERE / "horovod_fault_worker.py"), mode, str(folder)]
    return horovod_ranks(count, command, environ)


@pytest.mark.parametrize("schedule", ["trees", "native"])
def test_a_late_rank_and_its_parameters_are_named_and_an_error_at_the_time_limit(tmp_path, schedule):
    environ = {"COMMHOOKS_SCHEDULE": schedule, "COMMHOOKS_HEARTBEAT_S": "2", "COMMHOOKS_TIMEOUT_S": "6"}
    with _job("late", tmp_path, environ) as ranks:
        reader = Reader(ranks[0])
        report = reader.until("waiting for")
        error = reader.until("^ERROR")
        (tmp_path / "go").touch()
    assert "rank 0, optimizer SGD #0, step 2: waiting for 0.weight" in report
    assert "rank 1 is in step 2 and has no gradient yet for 0.weight" in report
    kind, taken_s = error.split()[1], float(error.split()[3])
    assert kind == "CommTimeout" and 5 < taken_s < 20
    assert "rank 1" in error and "0.weight" in error and "COMMHOOKS_TIMEOUT_S" in error


@pytest.mark.parametrize("schedule", ["trees", "native"])
def test_a_dead_rank_is_an_error_at_once_also_horovods(tmp_path, schedule):
    with _job("die", tmp_path, {"COMMHOOKS_SCHEDULE": schedule}) as ranks:
        error = Reader(ranks[0]).until("^ERROR")
    _, kind, is_horovods, taken_s, *_ = error.split()
    assert kind == ("PeerLost" if schedule == "trees" else "HorovodInternalError")
    assert is_horovods == "True", "an elastic job restores its state on Horovod's own error only"
    assert float(taken_s) < 5


def test_horovods_own_waits_are_cheap_and_stalls_named(tmp_path):
    """Patches 0002 (spinning took the whole two seconds) and 0003 (the check went over an empty list of ranks)."""
    with _job("plain", tmp_path, {"HOROVOD_STALL_CHECK_TIME_SECONDS": "2"}) as ranks:
        reader = Reader(ranks[0])
        assert float(reader.until("^CPU").split()[1]) < 0.6
        reader.until(r"^1: \[allreduce\.late\.tensor\]")
        (tmp_path / "go").touch()
        reader.until("^DONE")
