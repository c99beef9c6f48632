"""One rank of a Horovod job on an emulated network, where every rank has a host of its own."""

from __future__ import annotations

import torch
from torch import nn

import commhooks.horovod as hvd


def main():
    hvd.init()
    gathered = hvd.allgather(torch.tensor([hvd.rank()]), name="ranks").tolist()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 400), nn.ReLU(), nn.Linear(400, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), model=model)
    for step in range(4):
        torch.manual_seed(100 * step + hvd.rank())
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.handle.flush()
    sums = hvd.allgather(sum(p.detach().double().sum() for p in model.parameters()).view(1), name="sums")
    if hvd.rank() == 0:
        print(
            "WORLD", hvd.size(), hvd.local_size(), hvd.cross_size(), gathered, bool((sums == sums[0]).all())
        )
    hvd.shutdown()


if __name__ == "__main__":
    main()
