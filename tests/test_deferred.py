"""Deferred steps against plain DDP, bit for bit, on two real ranks (the cases are in `deferred_cases`)."""

from __future__ import annotations

import datetime
import json
import traceback
from pathlib import Path

import deferred_cases
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

_LIMIT_S = 150


def _rank(rank: int, folder: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    outcomes: dict[str, str] = {}
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=30)
    )
    for name in names:
        try:
            deferred_cases.CASES[name]()
            outcomes[name] = ""
        except Exception:
            outcomes[name] = traceback.format_exc()
        Path(folder, f"{rank}.json").write_text(json.dumps(outcomes))
        dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """What each case ended with on each rank; one launch for all cases that were asked for."""
    names = [
        item.callspec.params["name"]
        for item in request.session.items
        if item.function.__name__ == "test_case" and item.fspath == request.node.fspath
    ]
    folder = tmp_path_factory.mktemp("ranks")
    context = multiprocessing.start_processes(
        _rank, (str(folder), names), nprocs=2, join=False, start_method="spawn"
    )
    failure = ""
    try:
        deadline = datetime.datetime.now() + datetime.timedelta(seconds=_LIMIT_S)
        while not context.join(timeout=1):
            if datetime.datetime.now() > deadline:
                failure = f"still running after {_LIMIT_S} s"
                break
    except Exception as error:
        failure = str(error)
    finally:
        for process in context.processes:
            process.kill()
    told = [
        json.loads(path.read_text()) if path.exists() else {}
        for path in (folder / "0.json", folder / "1.json")
    ]
    return told, failure


@pytest.mark.parametrize("name", deferred_cases.CASES)
def test_case(name, outcomes):
    told, failure = outcomes
    for rank, results in enumerate(told):
        assert results.get(name, f"not run: {failure}") == "", f"rank {rank}: {results.get(name, failure)}"
