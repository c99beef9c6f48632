"""Horovod's variables from torchrun's; and the import of ``commhooks.horovod`` where Horovod is missing or broken."""

from __future__ import annotations

import importlib
import sys
import types

import pytest

from commhooks.errors import CommhooksError, ConfigError, MissingDependency
from commhooks.horovod_launch import (
    Place,
    Server,
    horovod_variables,
    hosts_of,
    own_place,
    started_by_torchrun,
)

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "5", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
UNEVEN = [
    Place(0, 0, 3),
    Place(1, 1, 3),
    Place(2, 2, 3),
    Place(3, 0, 2),
    Place(4, 1, 2),
]  # hosts of three and two


def test_torchrun_is_recognised_unless_another_launcher_started_the_job():
    assert started_by_torchrun(TORCHRUN)
    assert not started_by_torchrun({})
    assert not started_by_torchrun({**TORCHRUN, "HOROVOD_RANK": "3"})
    assert not started_by_torchrun({**TORCHRUN, "OMPI_COMM_WORLD_RANK": "3"})


def test_own_place():
    assert own_place({**TORCHRUN, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}) == Place(3, 1, 2)
    assert own_place(TORCHRUN) == Place(3, 0, 1)
    with pytest.raises(ConfigError, match="RANK"):
        own_place({**TORCHRUN, "RANK": "three"})


def test_hosts_follow_from_local_ranks():
    assert hosts_of(UNEVEN) == [0, 0, 0, 1, 1]
    assert hosts_of([Place(rank, 0, 1) for rank in range(3)]) == [0, 1, 2]


@pytest.mark.parametrize(
    ("rank", "local", "cross"),
    [(0, (0, 3), (0, 2)), (2, (2, 3), (0, 1)), (3, (0, 2), (1, 2)), (4, (1, 2), (1, 2))],
)
def test_each_rank_gets_its_place(rank, local, cross):
    found = horovod_variables(UNEVEN, rank, Server("10.0.0.1", 4321), "eth1")
    assert found["HOROVOD_RANK"] == str(rank) and found["HOROVOD_SIZE"] == "5"
    assert (int(found["HOROVOD_LOCAL_RANK"]), int(found["HOROVOD_LOCAL_SIZE"])) == local
    assert (int(found["HOROVOD_CROSS_RANK"]), int(found["HOROVOD_CROSS_SIZE"])) == cross
    assert found["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "10.0.0.1"
    assert found["HOROVOD_GLOO_RENDEZVOUS_PORT"] == "4321" and found["HOROVOD_GLOO_IFACE"] == "eth1"


def test_without_an_interface_gloo_chooses():
    assert "HOROVOD_GLOO_IFACE" not in horovod_variables(UNEVEN, 0, Server("h", 1), None)


def _import_anew(monkeypatch, **modules):
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name.replace("_", "."), module)
    monkeypatch.delitem(sys.modules, "commhooks.horovod", raising=False)
    return importlib.import_module("commhooks.horovod")


def test_without_horovod_the_import_says_how_to_build_it(monkeypatch):
    with pytest.raises(MissingDependency, match="commhooks doctor --build-horovod") as caught:
        _import_anew(monkeypatch, horovod=None, horovod_torch=None)
    assert isinstance(caught.value, ImportError) and isinstance(caught.value, CommhooksError)


def test_a_horovod_without_its_extension_is_named(monkeypatch):
    """Horovod itself prints a warning there and goes on, until the first call fails."""
    package, broken = types.ModuleType("horovod"), types.ModuleType("horovod.torch")
    package.torch = broken
    with pytest.raises(MissingDependency, match="its PyTorch extension doesn't load"):
        _import_anew(monkeypatch, horovod=package, horovod_torch=broken)
