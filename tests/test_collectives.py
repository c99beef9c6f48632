"""`commhooks.all_reduce` and its kin on real ranks: every type, shapes down to nothing, what is refused, threads."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist

import commhooks
from commhooks.errors import ConfigError, UnsupportedModelError

Settings = dict[str, Any]
CASES: dict[str, Callable[[Settings], None]] = {}

SUMMABLE = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
)


def case(function: Callable[[Settings], None]) -> Callable[[Settings], None]:
    CASES[function.__name__] = function
    return function


def whole(dtype: torch.dtype, *shape: int, seed: int | None = None) -> torch.Tensor:
    """Small whole numbers, other ones on every rank: sums are exact in every type."""
    generator = torch.Generator().manual_seed(dist.get_rank() if seed is None else seed)
    return torch.randint(0, 8, shape, generator=generator).to(dtype)


def total(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    every = [whole(dtype, *shape, seed=rank) for rank in range(dist.get_world_size())]
    return torch.stack(every).sum(0).to(dtype)


@case
def sums_of_every_type_and_size(settings: Settings) -> None:
    for dtype in SUMMABLE:
        for shape in ((), (1,), (7,), (0,), (3, 0), (1001,), (13, 77, 5)):
            tensor = whole(dtype, *shape)
            assert commhooks.all_reduce(tensor, **settings) is tensor
            assert torch.equal(tensor, total(dtype, *shape)), (dtype, shape)


@case
def averages(settings: Settings) -> None:
    for dtype in SUMMABLE:
        tensor = whole(dtype, 101)
        if not (dtype.is_floating_point or dtype.is_complex):
            with pytest.raises(UnsupportedModelError, match="average"):
                commhooks.all_reduce(tensor, average=True, **settings)
            continue
        commhooks.all_reduce(tensor, average=True, **settings)
        wanted = total(torch.complex128, 101) / dist.get_world_size()
        torch.testing.assert_close(tensor.to(torch.complex128), wanted, rtol=8e-3, atol=1e-6)


@case
def what_is_refused(settings: Settings) -> None:
    for tensor, words in (
        (torch.ones(4, 4).t()[1:], "contiguous"),
        (torch.ones(4, dtype=torch.bool), "bool"),
        (torch.ones(4).to(torch.float8_e4m3fn), "float8"),
        (torch.ones(4).to_sparse(), "sparse"),
        (torch.ones(4, device="meta"), "meta"),
    ):
        with pytest.raises(UnsupportedModelError, match=words):
            commhooks.all_reduce(tensor, **settings)
    tensor = torch.ones(3)
    assert commhooks.all_reduce(tensor, **settings)[0] == dist.get_world_size(), "refusals cost no turn"


@case
def conjugates_and_gradients(settings: Settings) -> None:
    """Lazily conjugated memory isn't what it says; a leaf that requires a gradient is changed in place all the same."""
    conjugate = torch.tensor([1 + 2j, 3 - 1j]).conj()
    with pytest.raises(UnsupportedModelError, match="conjugate"):
        commhooks.all_reduce(conjugate, **settings)
    leaf = torch.ones(3, requires_grad=True)
    commhooks.all_reduce(leaf, **settings)
    assert leaf.tolist() == [float(dist.get_world_size())] * 3


@case
def views_into_larger_memory(settings: Settings) -> None:
    memory = torch.zeros(100)
    memory[10:50] = 1.0
    commhooks.all_reduce(memory[10:50].view(4, 10), **settings)
    assert memory.sum() == 40 * dist.get_world_size() and memory[9] == memory[50] == 0


@case
def values_that_are_no_numbers(settings: Settings) -> None:
    tensor = torch.tensor([float("inf"), float("nan"), -0.0, 1.0])
    commhooks.all_reduce(tensor, **settings)
    assert tensor[0] == float("inf") and tensor[1].isnan() and tensor[3] == dist.get_world_size()


@case
def large(settings: Settings) -> None:
    """Many slices, larger than any buffer on the way (and than the memory file)."""
    size = (20 << 20) + 3
    tensor = torch.full((size,), float(dist.get_rank() + 1))
    commhooks.all_reduce(tensor, **settings)
    wanted = dist.get_world_size() * (dist.get_world_size() + 1) / 2
    assert float(tensor.min()) == float(tensor.max()) == wanted


@case
def the_rest_of_the_family(settings: Settings) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.int64, torch.bfloat16):
        for numel in (1, 5, 1003):
            for root in range(size):
                given = commhooks.broadcast(whole(dtype, numel), root, **settings)
                assert torch.equal(given, whole(dtype, numel, seed=root))
                reduced = commhooks.reduce(whole(dtype, numel), root, **settings)
                assert torch.equal(reduced, total(dtype, numel) if rank == root else whole(dtype, numel))
                rows = commhooks.gather(whole(dtype, numel), root, **settings)
                assert (rows is None) == (rank != root)
            rows = commhooks.all_gather(whole(dtype, numel), **settings)
            for other in range(size):
                assert torch.equal(rows[other], whole(dtype, numel, seed=other))
            own = commhooks.reduce_scatter(whole(dtype, size, numel), **settings)
            assert torch.equal(own, total(dtype, size, numel)[rank])
    with pytest.raises(ConfigError, match="root"):
        commhooks.broadcast(torch.ones(2), size, **settings)


@case
def two_threads_with_a_group_each(settings: Settings) -> None:
    groups = [dist.new_group(list(range(dist.get_world_size()))) for _ in range(2)]
    for group in groups:  # starting an engine is collective: in one order
        commhooks.all_reduce(torch.ones(1), group, **settings)
    wrong: list[object] = []

    def work(group: Any, factor: float) -> None:
        for step in range(50):
            got = commhooks.all_reduce(torch.full((301,), factor * (step + 1)), group, **settings)
            if got.min() != got.max() or got[0] != factor * (step + 1) * dist.get_world_size():
                wrong.append((factor, step, got[0]))

    threads = [threading.Thread(target=work, args=(group, i + 1.0)) for i, group in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[:3]


@case
def threads_on_one_group(settings: Settings) -> None:
    """Equal calls from several threads: which answers which is open, but nothing gets lost or stuck."""
    got: list[float] = []

    def work() -> None:
        for _ in range(30):
            got.append(float(commhooks.all_reduce(torch.ones(50), **settings).sum()))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [50.0 * dist.get_world_size()] * 90


SETUPS: dict[str, tuple[int, Settings]] = {
    "2 ranks, memory": (2, {"links": "shm"}),
    "3 ranks, memory file": (3, {"links": "shm"}),
    "3 ranks, checked ring": (3, {"links": "tcp", "schedule": "ring", "slice_numel": 333, "checksum": True}),
}


def run_case(name: str, settings: Settings, memory_file: bool) -> None:
    """In a rank."""
    if memory_file:
        from commhooks import hosts

        hosts._can_read = lambda other: False
    if name == "large":
        settings = {**settings, "slice_numel": None}
    CASES[name]({"schedule": "trees", "timeout_s": 60, "heartbeat_s": 30, **settings})


@functools.cache
def _failures(setup: str) -> dict[str, str]:
    world_size, settings = SETUPS[setup]
    return harness.run_cases(world_size, run_case, list(CASES), settings, "memory file" in setup)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("setup", SETUPS)
def test_collective(setup: str, name: str) -> None:
    if failure := _failures(setup)[name]:
        pytest.fail(failure, pytrace=False)
