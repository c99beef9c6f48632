"""An elastic Horovod job: the world grows, then loses a rank; engine and plan are made anew, state goes on."""

from __future__ import annotations

import collections
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.horovod_ranks import HERE, need_horovod

need_horovod()


def _lines(folder):
    """(size, rank, batch, digest) of every step that any process has logged, per process."""
    return {
        path.name: [line.split() for line in path.read_text().splitlines() if line.count(" ") == 3]
        for path in folder.glob("log.*")
    }


def _wait_for(condition, said, limit_s=300):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"not within {limit_s} s; the job said:\n{said.read_text()[-3000:]}"
        threading.Event().wait(0.1)


@pytest.mark.parametrize("schedule", ["trees"])
def test_the_world_grows_and_loses_a_rank(tmp_path, schedule):
    hosts, said = tmp_path / "hosts", tmp_path / "said"
    hosts.write_text("localhost:2\n")
    script = tmp_path / "discover.sh"
    script.write_text(f"#!/bin/sh\ncat {hosts}\n")
    script.chmod(0o755)
    # `--network-interface`: without it horovodrun waits for a second host, to find common interfaces.
    command = [
        str(Path(sys.executable).with_name("horovodrun")), "--gloo", "-np", "2", "--min-np", "2", "--max-np", "3",
        "--network-interface", "lo", "--host-discovery-script", str(script),
        sys.executable, str(HERE / "horovod_elastic_worker.py"), str(tmp_path),
    ]  # fmt: skip
    environ = {
        **os.environ,
        "PYTHONPATH": str(HERE.parent),
        "OMP_NUM_THREADS": "1",
        "COMMHOOKS_SCHEDULE": schedule,
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "150",  # Horovod's 30 s are short for a new rank on a busy machine
    }
    sizes = lambda: [size for lines in _lines(tmp_path).values() for size, *_ in lines[-1:]]  # noqa: E731
    with open(said, "w") as output:
        job = subprocess.Popen(command, env=environ, stdout=output, stderr=output, start_new_session=True)
        try:
            _wait_for(lambda: sizes() == ["2", "2"], said)
            hosts.write_text(
                "localhost:2\n127.0.0.1:1\n"
            )  # a second name of this host: losing it doesn't ban the first
            _wait_for(lambda: sizes() == ["3", "3", "3"], said)
            (tmp_path / "die2of3").touch()
            _wait_for(lambda: sorted(sizes()) == ["2", "2", "3"], said)
            (tmp_path / "stop").touch()
            assert job.wait(120) in (0, 1), said.read_text()[
                -3000:
            ]  # 1: horovodrun reports the rank that died
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
    _check(_lines(tmp_path))


def _check(logs):
    """Ranks of one world hold the same parameters after every step, and a new world goes on where the old one stood."""
    digests = collections.defaultdict(set)
    for lines in logs.values():
        worlds = [size for i, (size, *_) in enumerate(lines) if i == 0 or lines[i - 1][0] != size]
        assert worlds in (["2", "3", "2"], ["3"])
        visit = 0
        for i, (size, _, batch, digest) in enumerate(lines):
            visit += i > 0 and lines[i - 1][0] != size
            digests[size, visit if len(worlds) > 1 else 1, batch].add(digest)
            if i > 0 and lines[i - 1][0] != size:
                assert 0 <= int(lines[i - 1][2]) - int(batch) + 1 <= 3, "at most back to the last commit"
    assert sum(lines[0][0] == "2" for lines in logs.values()) == 2
    assert all(len(found) == 1 for found in digests.values())
