"""One rank of the Horovod tests: runs the cases of its command line, prints nothing, leaves a JSON file.

Every case trains the same small model on the same batches three times: with commhooks, with plain Horovod, and alone on the
whole batch; the tests compare the parameters.
"""

from __future__ import annotations

import hashlib
import json
import sys
import traceback
from pathlib import Path

import torch
from torch import nn

import commhooks.horovod as hvd
from commhooks.errors import CommhooksError

CASES = {}
STEPS = 50


def case(function):
    CASES[function.__name__] = function
    return function


# -- the small world the cases share --------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(12, 40, dtype=dtype)
        self.second = nn.Linear(40, 500, dtype=dtype)
        self.third = nn.Linear(500, 4, dtype=dtype)

    def forward(self, x):
        return self.third(torch.relu(self.second(torch.relu(self.first(x)))))


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


# -- same numbers ------------------------------------------------------------------------------------------------------


@case
def sgd_50_steps():
    return three_ways(sgd, again=True)


@case
def adam_50_steps():
    return three_ways(adam)


@case
def two_passes():
    return three_ways(sgd, passes=2, wrap={"backward_passes_per_step": 2})


@case
def groups_by_number():
    return three_ways(sgd, again=True, wrap={"groups": 2})


@case
def groups_by_list():
    groups = lambda model: [[model.first.weight, model.third.weight], [model.second.bias]]  # noqa: E731
    return three_ways(sgd, wrap={"groups": groups})


@case
def compression_fp16():
    return three_ways(sgd, wrap={"compression": hvd.Compression.fp16})


@case
def predivide():
    return three_ways(sgd, wrap={"gradient_predivide_factor": 4.0})


@case
def summed():
    return three_ways(
        lambda m: torch.optim.SGD(m.parameters(), lr=0.01), scale=hvd.size(), wrap={"op": hvd.Sum}
    )


@case
def clipping_with_ceremony():
    return three_ways(sgd, clip=0.5)


@case
def clipping_without_ceremony():
    return three_ways(sgd, clip=0.5, train_more={"ceremony": False}, plain_train={"ceremony": True})


@case
def scheduler_after():
    return three_ways(sgd, scheduler=True)


@case
def scheduler_before():
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "lr_scheduler.step() before optimizer.step()"
        return three_ways(sgd, scheduler="before", plain=False)


@case
def process_set_of_two():
    members = SETS[0]
    mine = hvd.rank()
    if mine not in members.ranks:
        model = train(sgd, wrapper(hvd.DistributedOptimizer, process_set=members), ranks=2, mine=0)
        return {"outside": far(values(model), values(alone(sgd, ranks=2))) > 0}
    return three_ways(sgd, ranks=2, wrap={"process_set": members}, train_more={"mine": members.rank()})


@case
def bf16():
    def run(wrap):
        model = Net(torch.bfloat16)
        opt = wrap(torch.optim.SGD(model.parameters(), lr=0.05), model)
        for batch in batches(10, torch.bfloat16):
            opt.zero_grad()
            loss_of(model, batch[hvd.rank()]).backward()
            opt.step()
        return model

    model = run(wrapper(hvd.DistributedOptimizer))
    return {"digest": digest(model), "again": digest(run(wrapper(hvd.DistributedOptimizer)))}


@case
def closure():
    model = Net()
    opt = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    for batch in batches(20):

        def evaluate(batch=batch):
            opt.zero_grad()
            loss = loss_of(model, batch[hvd.rank()])
            loss.backward()
            return loss

        opt.step(evaluate)
    reference = Net()
    plain = sgd(reference)
    for batch in batches(20):
        plain.zero_grad()
        for part in batch:
            (loss_of(reference, part) / len(batch)).backward()
        plain.step()
    return {"digest": digest(model), "alone": far(values(model), values(reference))}


def overlapping(optimizer, model):
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), model=model)


@case
def forward_overlap():
    """The step and the next forward overlap; the numbers are the same."""
    ours = train(sgd, overlapping)
    with torch.no_grad():
        digest_after_reads = digest(ours)
    again = digest(train(sgd, overlapping))
    return {"digest": digest_after_reads, "again": again, "alone": far(values(ours), values(alone(sgd)))}


@case
def forward_overlap_adam_clipped_scheduled():
    more = {"clip": 0.5, "scheduler": True}
    ours = train(adam, overlapping, **more)
    return {"digest": digest(ours), "alone": far(values(ours), values(alone(adam, **more)))}


@case
def forward_overlap_two_passes():
    def wrap(optimizer, model):
        named = model.named_parameters()
        return hvd.DistributedOptimizer(
            optimizer, named_parameters=named, model=model, backward_passes_per_step=2
        )

    ours = train(sgd, wrap, passes=2)
    return {"digest": digest(ours), "alone": far(values(ours), values(alone(sgd, passes=2)))}


@case
def forward_overlap_refusals():
    model = Branches()
    opt = overlapping(sgd(model), model)
    model(batches(1)[0][0][0], "left").square().mean().backward()
    missing = refusal(opt.step)
    model = Net()
    named = list(model.named_parameters())
    wrap = lambda **more: refusal(lambda: hvd.DistributedOptimizer(sgd(model), named, model=model, **more))  # noqa: E731
    return {
        "missing": missing,
        "sum": wrap(op=hvd.Sum),
        "compression": wrap(compression=hvd.Compression.fp16),
        "no_model": refusal(
            lambda: hvd.DistributedOptimizer(sgd(model), named, config={"overlap": "forward"})
        ),
    }


@case
def commits():
    """commit="bsp" with plain SGD is synchronous training with parameters exchanged instead of gradients."""
    model = Net()
    named = model.named_parameters()
    opt = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), named_parameters=named, model=model, commit="bsp"
    )
    for batch in batches(20):
        loss = loss_of(model, batch[hvd.rank()])
        loss.backward()
        opt.step()
        opt.zero_grad()
        opt.handle.report_loss(loss.item())
    stats = opt.handle.stats()
    opt.handle.finish()
    needs_model = refusal(lambda: hvd.DistributedOptimizer(sgd(model), commit="adsp"))
    return {
        "digest": digest(model),
        "ok": stats["commit"] == "bsp"
        and stats["worker"]["commits"] == 20
        and "needs the model" in needs_model,
    }


# -- uneven use of parameters -------------------------------------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.common = nn.Linear(12, 200)
        self.left = nn.Linear(200, 1500)
        self.right = nn.Linear(200, 1500)

    def forward(self, x, side):
        return getattr(self, side)(torch.relu(self.common(x)))


@case
def ranks_use_different_layers():
    """Every rank waits for what another computes only in step(): a wait inside backward would hang."""

    def run(wrap):
        model = Branches()
        opt = wrap(sgd(model), model)
        for step, batch in enumerate(batches(20)):
            side = "left" if (hvd.rank() + step) % 2 else "right"
            model(batch[hvd.rank()][0], side).square().mean().backward()
            opt.step()
            opt.zero_grad()
        return model

    ours, theirs = run(wrapper(hvd.DistributedOptimizer)), run(wrapper(hvd._plain_optimizer))
    return {
        "digest": digest(ours),
        "again": digest(run(wrapper(hvd.DistributedOptimizer))),
        "plain": far(values(ours), values(theirs)),
    }


@case
def frozen_and_unfrozen():
    model = Net()
    model.first.requires_grad_(False)
    opt = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    before = digest(model.first)
    for step, batch in enumerate(batches(12)):
        if step == 6:
            still = digest(model.first)
            model.first.requires_grad_(True)
            model.third.requires_grad_(False)
        loss_of(model, batch[hvd.rank()]).backward()
        opt.step()
        opt.zero_grad()
    return {"digest": digest(model), "frozen_kept": before == still, "moved": before != digest(model.first)}


@case
def sparse_embedding():
    def run(wrap):
        torch.manual_seed(2)
        model = nn.ModuleDict({"table": nn.Embedding(50, 8, sparse=True), "out": nn.Linear(8, 4)})
        opt = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for step in range(8):
            # From the third step on, rank 0 sometimes doesn't touch the table at all.
            torch.manual_seed(100 * step + hvd.rank())
            rows = torch.randint(0, 50, (6,))
            hidden = model["table"](rows) if step < 3 or (hvd.rank() + step) % 2 else torch.ones(6, 8)
            model["out"](hidden).square().mean().backward()
            opt.step()
            opt.zero_grad()
        return model

    ours = run(wrapper(hvd.DistributedOptimizer))
    dense = run(wrapper(hvd.DistributedOptimizer, sparse_as_dense=True))
    return {
        "digest": digest(ours),
        "again": digest(run(wrapper(hvd.DistributedOptimizer))),
        "alone": far(values(ours), values(dense)),
    }


@case
def join_with_uneven_batches():
    """Rank r has 10 + 3 r batches; then all go on together."""

    def run(wrap, join):
        model = Net()
        opt = wrap(torch.optim.SGD(model.parameters(), lr=0.05), model)
        every = batches(10 + 3 * hvd.size())
        for batch in every[: 10 + 3 * hvd.rank()]:
            loss_of(model, batch[hvd.rank()]).backward()
            opt.step()
            opt.zero_grad()
        last = join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        for batch in batches(5):
            loss_of(model, batch[hvd.rank()]).backward()
            opt.step()
            opt.zero_grad()
        return model, last

    (ours, last), (theirs, _) = (
        run(wrapper(hvd.DistributedOptimizer), hvd.join),
        run(wrapper(hvd._plain_optimizer), hvd._plain_join),
    )
    (again, _) = run(wrapper(hvd.DistributedOptimizer), hvd.join)
    return {
        "digest": digest(ours),
        "again": digest(again),
        "plain": far(values(ours), values(theirs)),
        "ok": last == hvd.size() - 1,
    }


# -- state, zero_grad, scalers ---------------------------------------------------------------------------------------------


@case
def state_is_kept_and_shared():
    model = Net()
    base = adam(model)
    loss_of(model, batches(1)[0][0]).backward()
    base.step()
    base.zero_grad()
    opt = hvd.DistributedOptimizer(base, named_parameters=model.named_parameters())
    kept = all(int(state["step"]) == 1 for state in opt.state.values()) and len(opt.state) == 6
    for group in base.param_groups:
        group["lr"] = 0.5
    followed = opt.param_groups[0]["lr"] == 0.5
    opt.load_state_dict(opt.state_dict())
    base.param_groups[0]["lr"] = 0.25
    return {
        "ok": kept and followed and opt.param_groups[0]["lr"] == 0.25 and isinstance(opt, torch.optim.Adam)
    }


@case
def broadcast_optimizer_state():
    model = Net()
    opt = hvd.DistributedOptimizer(adam(model), named_parameters=model.named_parameters())
    if hvd.rank() == 0:
        opt.param_groups[0]["lr"] = 0.125
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(opt, root_rank=0)
    return {"ok": opt.param_groups[0]["lr"] == 0.125 and len(opt.state) == 6}


@case
def zero_grad_takes_set_to_none():
    model = Net()
    opt = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    loss_of(model, batches(1)[0][0]).backward()
    opt.step()
    opt.zero_grad(set_to_none=False)
    zeros = all(p.grad is not None and not p.grad.any() for p in model.parameters())
    opt.zero_grad(set_to_none=True)
    return {"ok": zeros and all(p.grad is None for p in model.parameters())}


@case
def step_hooks_fire_once():
    model = Net()
    opt = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    seen = []
    opt.register_step_pre_hook(lambda *_: seen.append("before"))
    opt.register_step_post_hook(lambda *_: seen.append("after"))
    loss_of(model, batches(1)[0][0]).backward()
    opt.step()
    return {"ok": seen == ["before", "after"], "seen": seen}


@case
def grad_scaler():
    """Rank 0 alone overflows in one step: all ranks must skip it, or they diverge."""
    model = Net()
    opt = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    for step, batch in enumerate(batches(12)):
        opt.zero_grad()
        loss = scaler.scale(loss_of(model, batch[hvd.rank()]))
        if step == 5 and hvd.rank() == 0:
            loss = loss * float("inf")
        loss.backward()
        if step % 2:
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
    finite = bool(torch.isfinite(values(model)).all())
    return {"digest": digest(model), "ok": finite and scaler.get_scale() == 4.0}


# -- refusals -----------------------------------------------------------------------------------------------------------


def refusal(function):
    try:
        function()
    except CommhooksError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@case
def too_many_passes():
    model = Net()
    opt = hvd.DistributedOptimizer(
        sgd(model), named_parameters=model.named_parameters(), backward_passes_per_step=2
    )
    batch = batches(1)[0][hvd.rank()]
    for _ in range(2):
        loss_of(model, batch).backward()
    text = refusal(lambda: loss_of(model, batch).backward())
    opt.zero_grad()
    return {"refusal": text}


@case
def odd_passes_over_two_epochs():
    """An epoch of 3 batches with 2 passes per step: the third counts into the next epoch, unless zero_grad() drops it."""
    batch = batches(1)[0][hvd.rank()]
    model = Net()
    opt = hvd.DistributedOptimizer(
        sgd(model), named_parameters=model.named_parameters(), backward_passes_per_step=2
    )

    def two_epochs(zero):
        for _ in range(2):
            for number in range(3):
                if zero and number % 2 == 0:
                    opt.zero_grad()
                loss_of(model, batch).backward()
                if number % 2:
                    opt.step()

    text = refusal(lambda: two_epochs(zero=False))
    opt.synchronize()
    opt.step()
    opt.zero_grad()
    two_epochs(zero=True)
    return {"refusal": text, "digest": digest(model)}


@case
def step_after_odd_passes():
    """step() after one of two passes sends what is there, as Horovod does."""

    def run(wrap):
        model = Net()
        opt = wrap(sgd(model), model)
        for number, batch in enumerate(batches(9)):
            loss_of(model, batch[hvd.rank()]).backward()
            if number % 3 != 1:  # one pass, then two, then one …
                opt.step()
                opt.zero_grad()
        return model

    ours = run(wrapper(hvd.DistributedOptimizer, backward_passes_per_step=2))
    theirs = run(wrapper(hvd._plain_optimizer, backward_passes_per_step=2))
    return {"digest": digest(ours), "plain": far(values(ours), values(theirs))}


@case
def changed_gradient():
    """One rank's branch is unused, so backward() doesn't wait; an edit before synchronize() must not be lost silently."""
    model = Branches()
    opt = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    model(batches(1)[0][0][0], "left").square().mean().backward()

    def edit():
        model.left.weight.grad.mul_(0.5)
        opt.step()

    text = refusal(edit)
    return {"refusal": text}


@case
def two_optimizers_same_names():
    """Horovod: duplicate tensor name; here each optimizer has its own."""
    models, opts = [Net(), Net()], []
    for model in models:
        opts.append(hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters()))
    telling = [opt.handle.stats() for opt in opts]
    for batch in batches(5):
        for model in models:
            loss_of(model, batch[hvd.rank()]).backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
    return {
        "digest": digest(models[0]),
        "ok": digest(models[0]) == digest(models[1]) and all(t["parcels"] and t["schedule"] for t in telling),
    }


@case
def bad_arguments():
    model = Net()
    named = list(model.named_parameters())
    wrap = lambda **more: refusal(lambda: hvd.DistributedOptimizer(sgd(model), **more))  # noqa: E731
    return {
        "incomplete": wrap(named_parameters=named[1:]),
        "duplicate": wrap(named_parameters=[*named, ("first.weight", named[1][1])]),
        "not_pairs": wrap(named_parameters=[p for _, p in named]),
        "adasum": wrap(named_parameters=named, op=hvd.Adasum),
        "predivide": wrap(named_parameters=named, gradient_predivide_factor=2.0, op=hvd.Sum),
        "passes": wrap(named_parameters=named, backward_passes_per_step=0),
        "group_twice": wrap(named_parameters=named, groups=[[named[0][1]], [named[0][1]]]),
        "group_names": wrap(named_parameters=named, groups=[["first.weight"]]),
        "lbfgs": refusal(lambda: hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters()))),
        "twice": refusal(lambda: hvd.DistributedOptimizer(hvd.DistributedOptimizer(sgd(model)))),
        "config": wrap(named_parameters=named, config={"shedule": "trees"}),
    }


@case
def other_model_on_a_rank():
    width = 5 if hvd.rank() == 1 else 4
    model = nn.Sequential(nn.Linear(12, 8), nn.Linear(8, width))
    return {
        "refusal": refusal(
            lambda: hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
        )
    }


SETS = []


def main():
    out, wanted = Path(sys.argv[1]), sys.argv[2:]
    pair = hvd.ProcessSet([0, 1])
    # The pair is the world when there are two ranks; Horovod refuses a second set of the same ranks.
    import os

    SETS.append(hvd.global_process_set if os.environ["HOROVOD_SIZE"] == "2" else pair)
    hvd.init(process_sets=[pair] if SETS[0] is pair else None)
    results = {}
    for name in wanted or CASES:
        try:
            results[name] = CASES[name]()
        except Exception:
            results[name] = {"traceback": traceback.format_exc()}
            break  # the other ranks are elsewhere now; they end when Horovod tells them that this one has
        out.with_suffix(f".{hvd.rank()}").write_text(json.dumps(results))
    else:
        hvd.barrier()
    out.with_suffix(f".{hvd.rank()}").write_text(json.dumps(results))
    hvd.shutdown()


if __name__ == "__main__":
    main()
