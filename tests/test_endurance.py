"""A thousand steps: nothing grows."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from ddp_oracle import SMALL, batch, mlp
from torch.nn.parallel import DistributedDataParallel

import commhooks

STEPS = 1000
WARM_UP = 100
SETTINGS: dict[str, Any] = {"schedule": "trees", "timeout_s": 60, "heartbeat_s": 30}


def _resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def endure(links: str) -> dict[str, list[int]]:
    """In a rank: train and reduce; memory, threads and descriptors after the warm-up and at the end."""
    ddp = DistributedDataParallel(mlp(), **SMALL)
    commhooks.register(ddp, **SETTINGS, links=links)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.001)
    sizes: dict[str, list[int]] = {"bytes": [], "threads": [], "descriptors": []}
    inputs = [batch(step, 5, 13) for step in range(10)]
    for step in range(STEPS):
        optimizer.zero_grad()
        ddp(inputs[step % 10]).square().sum().backward()
        optimizer.step()
        if step % 10 == 0:
            commhooks.all_reduce(torch.ones(100), **SETTINGS, links=links)
        if step in (WARM_UP, STEPS - 1):
            sizes["bytes"].append(_resident_bytes())
            sizes["threads"].append(threading.active_count())
            sizes["descriptors"].append(len(os.listdir("/proc/self/fd")))
    return sizes


@pytest.mark.parametrize("links", ["shm", "tcp"])
def test_thousand_steps_grow_nothing(links: str) -> None:
    for sizes in harness.run(4, endure, links, limit_s=150):
        warm, last = sizes["bytes"]
        assert last - warm < 4 << 20, f"grew by {(last - warm) / 1024:.0f} KiB in {STEPS - WARM_UP} steps"
        assert sizes["threads"][1] <= sizes["threads"][0], sizes
        # One or two come and go (a store's file, a peer that has ended already).
        assert sizes["descriptors"][1] <= sizes["descriptors"][0] + 2, sizes


def come_and_go() -> list[int]:
    """In a rank: process groups and their engines are made and destroyed."""
    counts = []
    for _ in range(4):
        group = dist.new_group(list(range(dist.get_world_size())))
        commhooks.all_reduce(torch.ones(10), group, **SETTINGS)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        dist.barrier()
        for thread in threading.enumerate():
            if thread.name.startswith("commhooks-rank"):
                thread.join(timeout=30)
                assert not thread.is_alive()
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts


def test_engine_ends_with_its_group() -> None:
    """As a service that trains one model after another, or an elastic job, would do."""
    for counts in harness.run(2, come_and_go):
        assert counts[-1] <= counts[0], counts
