"""Handwritten digits with Horovod: an ordinary Horovod script, but for one import.

    horovodrun -np 4 python examples/horovod_digits.py
    torchrun --nproc-per-node 4 examples/horovod_digits.py          # commhooks' init understands torchrun too

Change the import to ``import horovod.torch as hvd`` and it is plain Horovod (or leave it and set COMMHOOKS=0).
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import commhooks.horovod as hvd


def digits():
    """1,437 images to learn from and 360 to be tested on."""
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target)
    mixed = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[mixed], labels[mixed]
    return TensorDataset(images[:1437], labels[:1437]), (images[1437:], labels[1437:])


def network():
    """A small convolutional network."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64 * 16, 128), nn.ReLU(),
        nn.Linear(128, 10),
    )  # fmt: skip


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32, help="images per rank and step")
    arguments = parser.parse_args()

    hvd.init()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    training, (images, labels) = digits()
    sampler = DistributedSampler(training, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(training, batch_size=arguments.batch, sampler=sampler)

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * hvd.size(), momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    began = time.perf_counter()
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        for batch, target in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(batch), target).backward()
            optimizer.step()
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).float().mean()
    right = hvd.allreduce(right, name="right")
    if hvd.rank() == 0:
        seconds = time.perf_counter() - began
        print(f"{hvd.size()} ranks, {arguments.epochs} epochs: {100 * right:.1f} % right, {seconds:.1f} s")
    hvd.shutdown()


if __name__ == "__main__":
    main()
