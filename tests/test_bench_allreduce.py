"""``commhooks bench allreduce``: its own ranks and a launcher's, the fields, and that wrong sums are never timed."""

import json
import os
import sys

import pytest
import torch
from test_lab import needs_root

from commhooks import shell
from commhooks.bench import allreduce
from commhooks.errors import CommhooksError

FIELDS = {"case", "ranks", "bytes", "peer", "peer_s", "commhooks_s", "bound_s", "speedup", "of_bound"}


def bench(*words, prefix=()):
    command = [sys.executable, "-m", "commhooks", *prefix]
    return shell.run([*command, *words], timeout_s=120, check=False)


def test_it_starts_its_own_ranks_and_prints_one_array():
    done = bench("bench", "allreduce", "--ranks", "3", "--mb", "0.1", "--rounds", "2", "--json")
    assert done.exit_code == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert set(row) >= FIELDS
    assert (row["ranks"], row["bytes"], row["peer"], row["bound_s"], row["of_bound"]) == (
        3,
        100_000,
        "gloo",
        None,
        None,
    )
    assert row["peer_min_s"] <= row["peer_s"] <= row["peer_max_s"] and row["rounds"] == 2


@needs_root
def test_in_the_lab_it_joins_the_ranks_and_knows_the_bound():
    lab = ("lab", "nic:50,100,100", "--", sys.executable, "-m", "commhooks")
    done = bench("bench", "allreduce", "--mb", "0.5", "--rounds", "2", "--json", prefix=lab)
    assert done.exit_code == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert row["case"] == "nic:50,100,100" and row["ranks"] == 3
    assert row["bound_s"] == pytest.approx(500_000 / (50e6 / 8 * 1448 / 1514), rel=1e-4)
    assert row["of_bound"] == pytest.approx(row["bound_s"] / row["commhooks_s"], rel=1e-2)
    assert row["of_bound"] < 1.05, "faster than the network"


def test_it_says_what_is_wrong_with_its_arguments():
    assert "--mb -1" in bench("bench", "allreduce", "--mb", "-1").stderr
    assert "0 ranks" in bench("bench", "allreduce", "--ranks", "0").stderr


def test_the_exit_code_of_a_rank_that_fails_is_kept():
    environ_topology = {**os.environ, "COMMHOOKS_TOPOLOGY": "nic:100*5"}
    child = shell.start(
        [sys.executable, "-m", "commhooks", "bench", "allreduce", "--ranks", "2", "--mb", "0.1", "--json"],
        environ=environ_topology,
        stdout=shell.PIPE,
        stderr=shell.PIPE,
    )
    out, err = child.communicate(timeout=120)
    assert child.returncode == 2 and out == b"" and b"5 ranks" in err


def test_one_wrong_element_is_found():
    def broken(tensor):
        tensor.mul_(2).add_(1)
        tensor[7] += 1

    tensor = torch.empty(100)
    with pytest.raises(
        CommhooksError, match=r"1 of 100 elements are wrong; element 7 is 16.0, expected 15.0"
    ):
        allreduce._check(broken, tensor, rank=0, ranks=2)
