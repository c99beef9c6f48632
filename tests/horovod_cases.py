"""Cases whose numbers must be plain Horovod's, and those of one process on the whole batch."""

from __future__ import annotations

import torch

import commhooks.horovod as hvd
from tests.horovod_training import (
    SETS,
    Branches,
    Net,
    adam,
    alone,
    batches,
    case,
    digest,
    far,
    loss_of,
    refusal,
    sgd,
    three_ways,
    train,
    values,
    wrapper,
)

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
