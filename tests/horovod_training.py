"""What the cases of the Horovod tests share: a small model, its batches, and three ways to train it.

With commhooks, with plain Horovod, and alone on the whole batch; the tests compare the parameters.
"""

from __future__ import annotations

import hashlib

import torch
from torch import nn

import commhooks.horovod as hvd
from commhooks.errors import CommhooksError

CASES = {}
STEPS = 50
SETS = []  # the process set of two that the worker made


def case(function):
    """A case by its name; run on every rank at the same time."""
    CASES[function.__name__] = function
    return function


def refusal(function):
    """The error of ours that a call raises, in words."""
    try:
        function()
    except CommhooksError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


class Net(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(12, 40, dtype=dtype)
        self.second = nn.Linear(40, 500, dtype=dtype)
        self.third = nn.Linear(500, 4, dtype=dtype)

    def forward(self, x):
        return self.third(torch.relu(self.second(torch.relu(self.first(x)))))


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.common = nn.Linear(12, 200)
        self.left = nn.Linear(200, 1500)
        self.right = nn.Linear(200, 1500)

    def forward(self, x, side):
        return getattr(self, side)(torch.relu(self.common(x)))


def batches(steps=STEPS, dtype=torch.float32, ranks=None):
    """For each step, each rank's (inputs, targets)."""
    torch.manual_seed(17)
    ranks = ranks or hvd.size()
    x = torch.randn(steps, ranks, 6, 12).to(dtype)
    y = torch.randint(0, 4, (steps, ranks, 6))
    return [[(x[s, r], y[s, r]) for r in range(ranks)] for s in range(steps)]


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def sgd(model, **more):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, **more)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def values(model):
    return torch.cat([p.detach().double().view(-1) for p in model.parameters()])


def digest(model):
    text = b"".join(
        bytes(p.detach().reshape(-1).contiguous().view(torch.uint8).numpy()) for p in model.parameters()
    )
    return hashlib.sha256(text).hexdigest()[:16]


def far(a, b):
    return float((a - b).abs().max())


def train(make, wrap, passes=1, clip=None, scheduler=False, model=None, ceremony=True, ranks=None, mine=None):
    """50 steps of a distributed optimizer on this rank's batches."""
    model = model or Net()
    base = make(model)
    opt = wrap(base, model)
    assert isinstance(opt, type(base))
    schedule = (
        torch.optim.lr_scheduler.StepLR(base if scheduler == "before" else opt, 7, 0.7) if scheduler else None
    )
    rank = hvd.rank() if mine is None else mine
    accumulated = 0
    for batch in batches(ranks=ranks):
        loss_of(model, batch[rank]).backward()
        accumulated += 1
        if accumulated < passes:
            continue
        accumulated = 0
        if clip and ceremony:
            opt.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            with opt.skip_synchronize():
                opt.step()
        else:
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.step()
        opt.zero_grad()
        if schedule:
            schedule.step()
    return model


def alone(make, passes=1, clip=None, scheduler=False, model=None, scale=1.0, ranks=None):
    """The same on the whole batch, in one process."""
    model = model or Net()
    opt = make(model)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 7, 0.7) if scheduler else None
    accumulated = 0
    for batch in batches(ranks=ranks):
        for part in batch:
            (loss_of(model, part) * scale / len(batch)).backward()
        accumulated += 1
        if accumulated < passes:
            continue
        accumulated = 0
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
        opt.zero_grad()
        if schedule:
            schedule.step()
    return model


def wrapper(function, **more):
    def wrap(optimizer, model):
        keywords = {
            key: value(model) if callable(value) and key == "groups" else value for key, value in more.items()
        }
        return function(optimizer, named_parameters=model.named_parameters(), **keywords)

    return wrap


def three_ways(
    make, plain=True, again=False, plain_train=None, scale=1.0, wrap=None, train_more=None, **more
):
    wrap = wrap or {}
    both = dict(train_more or {})
    ours = train(make, wrapper(hvd.DistributedOptimizer, **wrap), **more, **both)
    result = {"digest": digest(ours), "alone": far(values(ours), values(alone(make, scale=scale, **more)))}
    if again:
        result["again"] = digest(train(make, wrapper(hvd.DistributedOptimizer, **wrap), **more, **both))
    if plain:
        theirs = train(make, wrapper(hvd._plain_optimizer, **wrap), **more, **{**both, **(plain_train or {})})
        result["plain"] = far(values(ours), values(theirs))
    return result
