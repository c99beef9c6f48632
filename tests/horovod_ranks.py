"""Starts Horovod ranks for tests: Horovod's own rendezvous server here, one process per rank, their output kept."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from commhooks.horovod_launch import Place, Server, horovod_variables

HERE = Path(__file__).resolve().parent
WORKER = HERE / "horovod_worker.py"


def need_horovod():
    """Skip, by name, where no Horovod is installed."""
    pytest.importorskip("horovod", reason="Horovod isn't installed; build it with patches/build-horovod")


@contextlib.contextmanager
def horovod_ranks(count, command, environ=None, capture=True):
    """Yield the processes of a Horovod job on this host; those that are left at the end are killed."""
    from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    port = server.start()
    server.init(get_host_assignments([HostInfo("host0", count)], count))
    places = [Place(rank, rank, count) for rank in range(count)]
    base = {
        name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD_", "COMMHOOKS"))
    }
    base |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent), "HOROVOD_GLOO_TIMEOUT_SECONDS": "150"}
    base |= environ or {}
    ranks = [
        subprocess.Popen(
            command,
            env=base | horovod_variables(places, rank, Server("127.0.0.1", port), "lo"),
            stdout=subprocess.PIPE if capture else None,
            stderr=subprocess.STDOUT if capture else None,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        yield ranks
    finally:
        for process in ranks:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.communicate()
        server.stop()


def run_cases(count, cases, folder, environ=None, timeout_s=400):
    """Run the worker's cases on `count` ranks; returns for each rank {case: result}."""
    folder = Path(folder)
    command = [sys.executable, str(WORKER), str(folder / "out"), *cases]
    said = []
    with horovod_ranks(count, command, environ) as ranks:
        for process in ranks:
            try:
                said.append(process.communicate(timeout=timeout_s)[0])
            except subprocess.TimeoutExpired:
                said.append("(still running)")
    results = []
    for rank in range(count):
        path = folder / f"out.{rank}"
        found = json.loads(path.read_text()) if path.exists() else {}
        results.append(found)
        lacking = [name for name in cases if name not in found]
        if lacking:
            results[rank] |= {
                name: {"traceback": f"rank {rank} didn't come to it:\n{said[rank][-3000:]}"}
                for name in lacking
            }
    return results
