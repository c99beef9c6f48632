"""An elastic job: trains until a file says stop, and writes a line for every step: world size, rank, step, digest."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from pathlib import Path

import torch
from torch import nn

import commhooks.horovod as hvd


def digest(model):
    text = b"".join(bytes(p.detach().reshape(-1).view(torch.uint8).numpy()) for p in model.parameters())
    return hashlib.sha256(text).hexdigest()[:16]


def main():
    logging.basicConfig(level=logging.INFO)
    folder = Path(sys.argv[1])
    hvd.init()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0)

    @hvd.elastic.run
    def train(state):
        while True:
            stop = torch.tensor([float((folder / "stop").exists())])
            if hvd.allreduce(stop, op=hvd.Max, name="stop").item():
                return
            if (folder / f"die{hvd.rank()}of{hvd.size()}").exists():
                os._exit(3)
            generator = torch.Generator().manual_seed(100 * state.batch + hvd.rank())
            loss = model(torch.randn(16, 8, generator=generator)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state.batch += 1
            with open(folder / f"log.{os.getpid()}", "a") as log:
                print(hvd.size(), hvd.rank(), state.batch, digest(model), flush=True, file=log)
            if state.batch % 3 == 0:
                state.commit()

    train(state)


if __name__ == "__main__":
    main()
