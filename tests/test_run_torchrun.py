"""Zero-code runs under real launchers: torchrun and horovodrun, scripts and modules, and ranks that the script spawns."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

TRAIN = """
import json, sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

def hook_name(ddp):
    return ddp._comm_hooks[0][0].__qualname__ if ddp._comm_hooks else None

def own_hook(state, bucket):
    return dist.all_reduce(bucket.buffer() / 2, async_op=True).get_future().then(lambda f: f.value()[0])

def train(prepare):
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5)))
    prepare(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(4):
        optimizer.zero_grad()
        ddp(torch.randn(8, 20)).square().mean().backward()
        optimizer.step()
    return hook_name(ddp), [p.detach().flatten().tolist()[:5] for p in ddp.parameters()]

def by_hand(ddp):
    import commhooks
    commhooks.register(ddp)

def main(rank=-1, size=-1, store=None):
    if store is None:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", rank=rank, world_size=size, init_method=f"file://{store}")
    nothing = lambda ddp: None
    cases = {"plain": nothing, "own": lambda ddp: ddp.register_comm_hook(None, own_hook), "by hand": by_hand}
    results = {name: train(prepare) for name, prepare in cases.items()}
    print(json.dumps([dist.get_rank(), sys.argv[1:], results]) + "\\n", end="", flush=True)
    if sys.argv[1:2] == ["fail"] and dist.get_rank() == 1:
        raise LookupError("the script's own error")
    dist.destroy_process_group()

if __name__ == "__main__":
    if sys.argv[1:2] == ["spawn"]:
        torch.multiprocessing.spawn(main, (2, sys.argv[2]), nprocs=2)
    else:
        main()
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def launch(folder, arguments, switch="1"):
    """Run to the end; exit code, one report per rank in rank order, standard error."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "COMMHOOKS": switch, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environ, capture_output=True, text=True, timeout=240
    )
    reports = [
        json.loads(line)
        for line in re.findall(r"^(?:\[\d\]<stdout>:)?(\[\d, .*\])$", done.stdout, flags=re.M)
    ]
    return done.returncode, sorted(reports), done.stderr


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize("switch", ["0", "1"])
def test_torchrun_registers_what_the_script_builds(folder, switch):
    code, reports, err = launch(folder, [*TORCHRUN, "-m", "commhooks.run", "train.py", "a", "-m"], switch)
    assert code == 0, err
    assert [rank for rank, _, _ in reports] == [0, 1]
    for _, arguments, results in reports:
        assert arguments == ["a", "-m"]
        names = {case: name for case, (name, _) in results.items()}
        expected = "allreduce_hook" if switch == "1" else None
        assert names["plain"] == expected and names["own"] == "own_hook"
        # The same numbers whoever reduces: two summands have only one rounding.
        assert results["plain"][1] == results["own"][1] == results["by hand"][1]
    assert reports[0][2] == reports[1][2]
    assert ("has a communication hook of its own, __main__.own_hook: left alone" in err) == (switch == "1")
    assert ("is registered by the script, commhooks.ddp.allreduce_hook: left alone" in err) == (switch == "1")


def test_torchrun_with_a_module_and_an_error_of_its_own(folder):
    code, reports, err = launch(folder, [*TORCHRUN, "-m", "commhooks.run", "-m", "train", "fail"])
    assert code == 1 and len(reports) == 2
    assert all(results["plain"][0] == "allreduce_hook" for _, _, results in reports)
    trace = err[err.index("Traceback") : err.index("LookupError: the script's own error")]
    assert "train.py" in trace and "commhooks" not in trace


def test_ranks_that_the_script_spawns_are_registered_too(folder):
    code, reports, err = launch(folder, ["-m", "commhooks.run", "train.py", "spawn", str(folder / "store")])
    assert code == 0, err
    assert [results["plain"][0] for _, _, results in reports] == ["allreduce_hook"] * 2


HOROVOD = """
import json, sys
import torch
import horovod.torch as hvd
from horovod.torch import DistributedOptimizer
hvd.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
torch.manual_seed(1 + hvd.rank())
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(8, 20)).square().mean().backward()
    optimizer.step()
parameters = [p.detach().flatten().tolist()[:5] for p in model.parameters()]
print(json.dumps([hvd.rank(), sys.argv[1:], [hvd.size(), DistributedOptimizer.__module__, parameters]]) + "\\n", end="")
"""
HOROVODRUN = [
    "-c",
    "from horovod.runner.launch import run_commandline as run; run()",
    "-np",
    "2",
    "--gloo",
    sys.executable,
]


@pytest.mark.parametrize("start", [TORCHRUN, HOROVODRUN], ids=["torchrun", "horovodrun"])
def test_a_horovod_script_runs_unchanged(folder, start):
    pytest.importorskip("horovod", reason="Horovod isn't installed; build it with patches/build-horovod")
    (folder / "train.py").write_text(HOROVOD)
    code, reports, err = launch(folder, [*start, "-m", "commhooks.run", "train.py", "a"])
    assert code == 0, err
    assert [(rank, arguments) for rank, arguments, _ in reports] == [(0, ["a"]), (1, ["a"])]
    assert [result[:2] for _, _, result in reports] == [[2, "commhooks.horovod"]] * 2
    assert reports[0][2] == reports[1][2]


def test_a_horovod_script_with_the_switch_off_has_horovods_own_optimizer(folder):
    pytest.importorskip("horovod", reason="Horovod isn't installed; build it with patches/build-horovod")
    (folder / "train.py").write_text(HOROVOD)
    code, reports, err = launch(folder, [*HOROVODRUN, "-m", "commhooks.run", "train.py"], "0")
    assert code == 0, err
    assert [result[:2] for _, _, result in reports] == [[2, "horovod.torch.optimizer"]] * 2
