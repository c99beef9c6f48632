"""Ranks that die, stop, leave, raise, skip or disagree: every other rank gets the same named error, soon, and keeps it.

In each scenario four ranks train; in step 2 one of them, the culprit, does something.  The survivors report which error their
backward raised, how long after the deed, and what they get when they try again.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from ddp_oracle import SMALL, batch, mlp
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.errors import CommError, CommTimeout, Mismatch, PeerLost

CULPRIT_STEP = 2
NATIVE_STEP = 4  # which schedule=auto sends by the group's own collective
SOON_S = 30.0  # of a busy machine; where a limit is awaited it is a few seconds, and no other limit is below a minute

Settings = dict[str, Any]
PATIENT: Settings = {"timeout_s": 60, "heartbeat_s": 60}
QUICK: Settings = {"timeout_s": 4, "heartbeat_s": 60}
WATCHFUL: Settings = {"timeout_s": 60, "heartbeat_s": 3}


class Model(torch.nn.Module):
    """An MLP with something to skip and a place to act in the middle of the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = mlp((13, 20, 13)), torch.nn.Linear(13, 13), mlp((13, 20, 5))
        self.skip = False
        self.act: Callable[[], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if not self.skip:
            x = self.middle(x)
        if self.act is not None:
            act, self.act = self.act, None
            x.register_hook(lambda grad: act())
        return self.last(x)


# --- the deeds: each runs in the culprit, with its model, in CULPRIT_STEP before the forward pass -----------


def _deed() -> None:
    harness.note("deed", time.monotonic())


def kill(model: Model) -> None:
    _deed()
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_backward(model: Model) -> None:
    model.act = lambda: kill(model)


def stop(model: Model) -> None:
    _deed()
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_in_backward(model: Model) -> None:
    model.act = lambda: stop(model)


def leave_in_order(model: Model) -> None:
    _deed()
    sys.exit(0)


def raise_and_end(model: Model) -> None:
    def act() -> None:
        _deed()
        raise ValueError("the user's own mistake")

    model.act = act


class LivesOn(Exception):
    """Caught by the culprit's loop."""


def raise_and_live_on(model: Model) -> None:
    def act() -> None:
        _deed()
        raise LivesOn

    model.act = act


def skip_layer(model: Model) -> None:
    _deed()
    model.skip = True


def skip_backward(model: Model) -> None:
    _deed()
    raise LivesOn


# --- what the ranks do --------------------------------------------------------------------------------------


def train(deed: str, culprit: int, settings: Settings, at: int = CULPRIT_STEP) -> dict[str, Any]:
    """In a rank: train until an error comes."""
    settings = {"schedule": "trees", **settings}
    torch.manual_seed(7)
    model = Model()
    ddp = DistributedDataParallel(model, **SMALL)
    handle = commhooks.register(ddp, **settings)
    error: CommError | None = None
    try:
        for step in range(6):
            ddp.zero_grad()
            with contextlib.suppress(LivesOn):
                if step == at and dist.get_rank() == culprit:
                    globals()[deed](model)
                ddp(batch(step, 4, 13)).square().sum().backward()
                if not model.skip:
                    continue
            _live_on(handle)
    except CommError as caught:
        error = caught
    assert error is not None, "trained to the end"
    seen_s = time.monotonic()
    again = []
    for retry in (
        lambda: ddp(batch(9, 4, 13)),
        lambda: commhooks.all_reduce(torch.ones(3), **settings),
    ):
        try:
            retry()
        except CommError as caught:
            again.append(type(caught).__name__)
    return {
        "kind": type(error).__name__,
        "message": str(error),
        "after_s": seen_s - harness.await_note("deed"),
        "again": again,
    }


def _live_on(handle: Any) -> None:
    """Compute on without ever coming back to communicate, until the engine has an error; then meet it."""
    engine = handle._backend.engine
    with engine._links_up:
        engine._links_up.wait_for(lambda: engine.error, timeout=harness.LIMIT_S)
    engine.raise_if_failed()


def _check(outcomes: list[harness.Outcome], kind: str, culprit: int, limit_s: float = SOON_S) -> None:
    told = harness.describe(outcomes)
    for outcome in outcomes:
        assert outcome.code == 0, told
        value = outcome.value
        assert value["kind"] == kind, (
            f"rank {outcome.rank} raised {value['kind']}: {value['message']}\n{told}"
        )
        assert f"rank {culprit} " in value["message"], f"rank {outcome.rank}: {value['message']}\n{told}"
        assert value["after_s"] < limit_s, f"rank {outcome.rank}: after {value['after_s']:.1f} s\n{told}"
        assert value["again"] == [kind, kind], f"rank {outcome.rank} then got {value['again']}\n{told}"


STAR: Settings = {"links": "tcp"}  # every rank next to every other
RING: Settings = {"links": "tcp", "schedule": "ring"}
MEMORY: Settings = {"links": "shm"}


@pytest.mark.parametrize(
    ("deed", "network"),
    [
        ("kill", STAR),
        ("kill_in_backward", RING),
        ("kill_in_backward", MEMORY),
        ("leave_in_order", RING),
        ("leave_in_order", MEMORY),
        ("raise_and_end", STAR),
    ],
)
def test_dead_rank_is_peer_lost(deed: str, network: Settings) -> None:
    with harness.Ranks(4, train, deed, 1, {**PATIENT, **network}) as ranks:
        _check(ranks.wait([0, 2, 3]), "PeerLost", 1)
        (culprit,) = ranks.wait([1])
    if deed == "raise_and_end":
        assert culprit.error[0] == "ValueError", culprit.told


@pytest.mark.parametrize("deed", ["kill_in_backward", "leave_in_order", "stop_in_backward"])
def test_rank_lost_in_a_native_step_is_peer_lost(deed: str) -> None:
    """While schedule=auto tries the group's own collective, which would not name anybody, or hang."""
    settings = {**WATCHFUL, "links": "tcp", "schedule": "auto"}
    with harness.Ranks(4, train, deed, 1, settings, NATIVE_STEP) as ranks:
        _check(ranks.wait([0, 2, 3]), "PeerLost", 1)


@pytest.mark.parametrize(
    ("deed", "network"), [("stop", MEMORY), ("stop_in_backward", STAR), ("stop_in_backward", RING)]
)
def test_stopped_rank_is_peer_lost(deed: str, network: Settings) -> None:
    with harness.Ranks(4, train, deed, 1, {**WATCHFUL, **network}) as ranks:
        _check(ranks.wait([0, 2, 3]), "PeerLost", 1)
        ranks.signal(1, signal.SIGCONT)
        (awake,) = ranks.wait([1])
    assert awake.code == 0 and awake.value["kind"] == "PeerLost", awake.told


@pytest.mark.parametrize(
    ("deed", "network"),
    [
        ("raise_and_live_on", STAR),
        ("skip_layer", RING),
        ("skip_layer", MEMORY),
        ("skip_backward", RING),
    ],
)
def test_rank_that_keeps_the_others_waiting_is_named(deed: str, network: Settings) -> None:
    with harness.Ranks(4, train, deed, 3, {**QUICK, **network}) as ranks:
        _check(ranks.wait(), "CommTimeout", 3)


# --- disagreement -------------------------------------------------------------------------------------------


def disagree(what: str, settings: Settings) -> None:
    """In a rank: rank 1 does it differently.  Each case has an engine of its own, by a limit of its own."""
    odd = dist.get_rank() == 1
    settings = {**settings, "timeout_s": 60 + 0.01 * list(DISAGREEMENTS).index(what)}
    if what == "nothing":  # noticed when somebody asks
        settings["timeout_s"] = 4
    with pytest.raises(Mismatch) as caught:
        if what == "config":
            commhooks.all_reduce(torch.ones(3), **{**settings, "slice_numel": 10 if odd else 20})
        elif what == "width":
            model = mlp((13, 20 if odd else 21, 5))
            ddp = DistributedDataParallel(model, init_sync=False)
            commhooks.register(ddp, **settings)
            for step in range(2):
                ddp(batch(step, 4, 13)).sum().backward()
        else:
            _odd_call(what, odd, settings)
    assert "rank 1 " in str(caught.value) or "ranks 1 " in str(caught.value), str(caught.value)


DISAGREEMENTS = (
    "config",
    "width",
    "numel",
    "nothing",
    "itemsize",
    "dtype",
    "half types",
    "average",
    "collective",
)


def _odd_call(what: str, odd: bool, settings: Settings) -> None:
    commhooks.all_reduce(torch.ones(100), **settings)
    tensor, average = torch.ones(100), False
    if what == "numel":
        tensor = torch.ones(99 if odd else 100)
    elif what == "nothing":
        tensor = torch.ones(0 if odd else 100)
    elif what == "itemsize":
        tensor = tensor.double() if odd else tensor
    elif what == "dtype":
        tensor = tensor.int() if odd else tensor
    elif what == "half types":
        tensor = tensor.half() if odd else tensor.bfloat16()
    elif what == "average":
        average = odd
    elif what == "collective":
        commhooks.broadcast(torch.ones(100), **settings)
        commhooks.reduce(torch.ones(100), **settings)
        if odd:  # a leaf's part ends with its send; the next call tells it
            commhooks.reduce(tensor, **settings)
    commhooks.all_reduce(tensor, average=average, **settings)
    if what == "nothing":
        commhooks.all_reduce(torch.ones(5), **settings)


@functools.cache
def _disagreements(links: str) -> dict[str, str]:
    settings = {**PATIENT, "links": links, "schedule": "trees"}
    return harness.run_cases(3, disagree, DISAGREEMENTS, settings)


@pytest.mark.parametrize("links", ["tcp", "shm"])
@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_disagreement_is_a_mismatch_everywhere(what: str, links: str) -> None:
    if failure := _disagreements(links)[what]:
        pytest.fail(failure, pytrace=False)


# --- ends ---------------------------------------------------------------------------------------------------


def reduce_and_leave(settings: Settings, stay: bool) -> float:
    """In a rank: the last call is a large all-reduce; rank 0 leaves at once, the others perhaps later."""
    tensor = torch.full((1 << 20,), float(dist.get_rank() + 1))
    commhooks.all_reduce(tensor, **settings)
    total = float(tensor.min()) + float(tensor.max())
    if stay and dist.get_rank() != 0:
        harness.await_note("go")
        tensor.fill_(1.0)
    return total


@pytest.mark.parametrize("links", ["tcp", "shm"])
@pytest.mark.parametrize("stay", [False, True])
def test_end_is_prompt_and_breaks_no_peer(links: str, stay: bool) -> None:
    """A rank may leave right after its last send, and needn't wait for those who go on computing."""
    settings = {**PATIENT, "links": links, "schedule": "trees"}
    whole_end = links == "shm" and not stay
    with harness.Ranks(3, reduce_and_leave, settings, stay, whole_end=whole_end) as ranks:
        first = ranks.wait([0])
        ranks.note("go")
        outcomes = first + ranks.wait([1, 2])
    for outcome in outcomes:
        assert outcome.code == 0 and outcome.value == 12.0, harness.describe(outcomes)
        assert "ERROR" not in outcome.told and "goodbye" not in outcome.told, harness.describe(outcomes)
        assert stay or outcome.exit_s < SOON_S


def forked_child_outlives(settings: Settings) -> dict[str, Any] | None:
    """In a rank: rank 1 has a child process when it is killed."""
    commhooks.all_reduce(torch.ones(3), **settings)
    if dist.get_rank() == 1:
        if os.fork() == 0:
            signal.alarm(60)
            harness.note("child", os.getpid())
            signal.pause()
        harness.await_note("child")
        kill(Model())
    try:
        commhooks.all_reduce(torch.ones(3), **settings)
    except CommError as error:
        return {"kind": type(error).__name__, "after_s": time.monotonic() - harness.await_note("deed")}
    return None


@pytest.mark.parametrize("links", ["tcp", "shm"])
def test_forked_child_keeps_no_socket_alive(links: str) -> None:
    """As a data loader's worker may outlive its rank for a while."""
    settings = {**PATIENT, "links": links, "schedule": "trees"}
    with harness.Ranks(3, forked_child_outlives, settings) as ranks:
        outcomes = ranks.wait([0, 2])
        ranks.wait([1])
        os.kill(ranks.noted("child"), signal.SIGKILL)
    for outcome in outcomes:
        assert outcome.code == 0 and outcome.value["kind"] == "PeerLost", harness.describe(outcomes)
        assert outcome.value["after_s"] < SOON_S


class OpenSockets(torch.utils.data.Dataset[int]):
    """Each item: how many of the given sockets its process has open."""

    def __init__(self, inodes: set[int]) -> None:
        self._inodes = inodes

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        mine = 0
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                mine += os.fstat(int(fd)).st_ino in self._inodes
        return mine


def load_data_while_training(settings: Settings) -> int:
    """In a rank: workers are forked while the engine runs, and hold none of its sockets."""
    ddp = DistributedDataParallel(mlp())
    state = commhooks.register(ddp, **settings)._backend
    sockets = {os.fstat(link.fileno()).st_ino for link in state.engine.links}
    assert sockets
    held = 0
    for epoch in range(2):
        loader = torch.utils.data.DataLoader(
            OpenSockets(sockets), num_workers=2, multiprocessing_context="fork"
        )
        for step, count in enumerate(loader):
            held += int(count)
            ddp(batch(8 * epoch + step, 4, 13)).sum().backward()
    return held


def test_data_loader_workers_hold_no_sockets() -> None:
    settings = {**PATIENT, "links": "tcp", "schedule": "trees"}
    assert harness.run(2, load_data_while_training, settings) == [0, 0]


def one_never_comes(settings: Settings) -> str:
    """In a rank: rank 1 dies before the others have met it."""
    if dist.get_rank() == 1:
        kill(Model())
    with pytest.raises(CommTimeout) as caught:
        commhooks.all_reduce(torch.ones(3), **settings)
    return str(caught.value)


def test_rank_that_dies_before_the_first_collective_is_named() -> None:
    with harness.Ranks(3, one_never_comes, {**QUICK, "schedule": "trees"}) as ranks:
        outcomes = ranks.wait([0, 2])
    for outcome in outcomes:
        assert outcome.code == 0 and "ranks [1]" in outcome.value, harness.describe(outcomes)


def train_through_a_pause(settings: Settings) -> int:
    """In a rank: train until the test has paused and continued all ranks."""
    ddp = DistributedDataParallel(mlp())
    commhooks.register(ddp, **settings)
    done = torch.zeros(1)
    step = 0
    while done[0] == 0:
        ddp(batch(step, 4, 13)).sum().backward()
        if step == CULPRIT_STEP:
            harness.note(f"trains {dist.get_rank()}")
        done.fill_(float(harness.noted("continued")))
        commhooks.all_reduce(done, **settings)
        step += 1
    return step


def test_job_that_is_paused_as_a_whole_goes_on() -> None:
    """As a scheduler does that takes the machine away for a while: longer than every limit."""
    settings = {"timeout_s": 3, "heartbeat_s": 3, "links": "tcp", "schedule": "trees"}
    with harness.Ranks(2, train_through_a_pause, settings) as ranks:
        for rank in range(2):
            ranks.noted(f"trains {rank}")
        for rank in range(2):
            ranks.signal(rank, signal.SIGSTOP)
        threading.Event().wait(6)  # time that passes is what this is about
        for rank in range(2):
            ranks.signal(rank, signal.SIGCONT)
        ranks.note("continued")
        outcomes = ranks.wait()
    assert [outcome.code for outcome in outcomes] == [0, 0], harness.describe(outcomes)


def fail_between_forward_and_backward(settings: Settings) -> list[str]:
    """In a rank: the engine has failed by the time the first bucket is ready."""
    ddp = DistributedDataParallel(mlp())
    engine = commhooks.register(ddp, **settings)._backend.engine
    ddp(batch(0, 4, 13)).sum().backward()
    dist.barrier()
    loss = ddp(batch(1, 4, 13)).sum()
    engine.fail(PeerLost("rank 7 was never there"))
    with engine._links_up:
        engine._links_up.wait_for(lambda: engine.error)
    kinds = []
    for attempt in (loss.backward, lambda: ddp(batch(2, 4, 13)), lambda: commhooks.register(ddp).flush()):
        try:
            attempt()
            kinds.append("")
        except CommError as error:
            assert "rank 7 was never there" in str(error)
            kinds.append(type(error).__name__)
    return kinds


def test_error_in_the_hook_itself_keeps_its_type() -> None:
    settings = {**PATIENT, "links": "tcp", "schedule": "trees"}
    kinds = harness.run(2, fail_between_forward_and_backward, settings)
    assert kinds == [["PeerLost", "PeerLost", ""]] * 2
