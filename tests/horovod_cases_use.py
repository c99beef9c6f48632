"""Cases of use and misuse: parameters used unevenly, state, scalers, refusals."""

from __future__ import annotations

import torch
from torch import nn

import commhooks.horovod as hvd
from tests.horovod_training import (
    Branches,
    Net,
    adam,
    batches,
    case,
    digest,
    far,
    loss_of,
    refusal,
    sgd,
    values,
    wrapper,
)

# -- uneven use of parameters -------------------------------------------------------------------------------------------


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
