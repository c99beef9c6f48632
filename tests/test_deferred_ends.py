"""How training with deferred steps ends: in the middle, by a dead peer, or with the interpreter; never by a hang."""

from __future__ import annotations

import os
from typing import Any

import harness
import pytest

_PATIENCE_S = 30.0  # the machine may be busy; every limit of ours is far below


def _train(steps: int, **settings: Any) -> tuple[Any, Any, Any]:
    """A model registered with its optimizer, after some steps, the last of which is still under way."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import commhooks

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    handle = commhooks.register(ddp, optimizer, overlap="forward", links="tcp", slice_numel=500, **settings)
    for _ in range(steps):
        _step(ddp, optimizer)
    return ddp, optimizer, handle


def _step(ddp: Any, optimizer: Any) -> None:
    import torch

    optimizer.zero_grad()
    ddp(torch.ones(4, 64)).square().mean().backward()
    optimizer.step()


def leave_with_a_step_under_way(schedule: str) -> float:
    ddp, _, _ = _train(4, schedule=schedule)
    # Nothing is flushed or finished here: the exit handlers must cope.
    return float(sum(p.shape[0] for p in ddp.parameters()))


@pytest.mark.parametrize("schedule", ["trees", "native"])
def test_a_script_that_just_ends_does_not_hang(schedule):
    with harness.Ranks(2, leave_with_a_step_under_way, schedule, whole_end=True) as ranks:
        outcomes = ranks.wait()
    assert [outcome.code for outcome in outcomes] == [0, 0], harness.describe(outcomes)
    assert all(outcome.exit_s < _PATIENCE_S for outcome in outcomes)


def lose_a_peer() -> str:
    import torch.distributed as dist

    from commhooks.errors import CommError

    ddp, optimizer, _ = _train(4, timeout_s=20.0, heartbeat_s=5.0)
    if dist.get_rank() == 1:
        os._exit(7)
    try:
        for _ in range(50):
            _step(ddp, optimizer)
    except CommError as error:
        first = type(error).__name__
    else:
        return "no error"
    try:
        ddp(next(ddp.parameters()).new_ones(4, 64))
    except CommError as error:
        return f"{first} then {type(error).__name__}: {error}"
    return f"{first}, then nothing"


def test_a_dead_peer_is_a_named_error_that_stays():
    with harness.Ranks(2, lose_a_peer) as ranks:
        outcomes = ranks.wait([0])
    told = outcomes[0].value
    assert told is not None and told.startswith("PeerLost then PeerLost"), harness.describe(outcomes)
    assert "rank 1" in told


def break_off() -> list[float]:
    """An exception between backward and step, inside the handle's context; then the model trains on without us."""
    import torch

    ddp, optimizer, handle = _train(3)
    try:
        with handle:
            optimizer.zero_grad()
            ddp(torch.ones(4, 64)).square().mean().backward()
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    handle.finish()
    _step(ddp, optimizer)
    return [float(p.detach().double().sum()) for p in ddp.parameters()]


def test_an_exception_in_the_context_leaves_equal_ranks():
    one, other = harness.run(2, break_off)
    assert one == other
