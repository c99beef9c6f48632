"""One rank of a job in which something goes wrong; what it notices is printed."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn

import commhooks.horovod as hvd


def wait_for(path, limit_s=30):
    """Until another process has made a file."""
    end = time.monotonic() + limit_s
    while not path.exists() and time.monotonic() < end:
        threading.Event().wait(0.02)


def train(mode, folder):
    """Rank 1 dies in its third step, or comes late to it."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(50, 200), nn.ReLU(), nn.Linear(200, 3))
    opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for step in range(4):
        if step == 2 and hvd.rank() == 1:
            if mode == "die":
                os._exit(3)
            wait_for(folder / "go")
        began_s = time.monotonic()
        try:
            model(torch.ones(2, 50)).sum().backward()
            opt.step()
            opt.zero_grad()
        except Exception as error:
            is_horovods = isinstance(error, hvd.HorovodInternalError)
            taken_s = time.monotonic() - began_s
            print(f"ERROR {type(error).__name__} {is_horovods} {taken_s:.1f} {error}", flush=True)
            os._exit(0)
    print("DONE", flush=True)


def plain_stall(folder):
    """Horovod's own warning: rank 1 doesn't submit the tensor until rank 0's log has named it."""
    if hvd.rank() == 1:
        wait_for(folder / "go")
    hvd.allreduce(torch.ones(4), name="late.tensor")
    print("DONE", flush=True)


def idle_wait():
    """Processor time of a rank that waits in Horovod's own synchronize()."""
    hvd.barrier()
    if hvd.rank() == 1:
        threading.Event().wait(2.0)
    before = time.thread_time()
    hvd.allreduce(torch.ones(4), name="waited")
    print(f"CPU {time.thread_time() - before:.3f}", flush=True)


def main():
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    mode, folder = sys.argv[1], Path(sys.argv[2])
    hvd.init()
    if mode == "plain":
        idle_wait()
        plain_stall(folder)
    else:
        train(mode, folder)
    hvd.shutdown()


if __name__ == "__main__":
    main()
