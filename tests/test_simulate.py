"""Steps in virtual time: near the fluid limits where messages cost nothing, slower where they do, for any number of ranks."""

import json

import pytest

from commhooks.bench.models import model_spec
from commhooks.cli import main
from commhooks.core.fluid import fluid_limits
from commhooks.core.virtual_step import VirtualLayer, VirtualNetwork, VirtualSchedule, virtual_step_s
from commhooks.errors import ConfigError
from commhooks.simulate import rates_of

PRIORITY = VirtualSchedule(5_000, 0, by_layer=True, barrier=False)
SLICES = 1_000  # of a whole model: fine enough to be nearly fluid
PLAIN = VirtualSchedule(None, 0, by_layer=False, barrier=True)


def layers_of(name: str) -> list[VirtualLayer]:
    """A model whose step takes one second of computing."""
    model = model_spec(name)
    return [
        VirtualLayer(layer.numel, share.compute / 3, share.compute * 2 / 3)
        for layer, share in zip(model.layers, model.shares(), strict=True)
    ]


def network_of(name: str, ratio: float, hops: int = 1, latency_s: float = 0.0) -> VirtualNetwork:
    return VirtualNetwork(ratio / (4 * model_spec(name).numel), hops, latency_s, whole=True)


@pytest.mark.parametrize("name", ["resnet50", "vgg19", "eight", "transformer", "sockeye"])
@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
def test_without_latency_steps_are_near_the_fluid_limits(name, ratio):
    limits = fluid_limits(model_spec(name).shares(), ratio)
    layers, network = layers_of(name), network_of(name, ratio)
    assert virtual_step_s(layers, network, PLAIN) == pytest.approx(limits.plain, rel=0.01)
    fine = VirtualSchedule(model_spec(name).numel // SLICES, 0, by_layer=True, barrier=False)
    assert virtual_step_s(layers, network, fine) == pytest.approx(limits.priority, rel=0.03)


def test_first_come_first_served_slices_gain_less_than_priority():
    fifo = VirtualSchedule(5_000, 0, by_layer=False, barrier=False)
    layers, network = layers_of("resnet50"), network_of("resnet50", 1.0)
    assert virtual_step_s(layers, network, PRIORITY) < 0.9 * virtual_step_s(layers, network, fifo)


def test_latency_and_hops_cost_time_and_too_small_slices_cost_most():
    layers = layers_of("eight")
    quick = virtual_step_s(layers, network_of("eight", 1.0), PRIORITY)
    slow = virtual_step_s(layers, network_of("eight", 1.0, hops=6, latency_s=0.01), PRIORITY)
    assert slow > quick + 0.05


def test_the_fixed_call_prints_one_row_per_schedule(capsys):
    assert main(["simulate", "--model", "resnet50", "--topology", "nic:200*63,100", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["schedule"] for row in rows] == ["ddp", "trees", "priority"]
    assert all(row["ranks"] == 64 for row in rows)
    assert rows[0]["speedup"] == 1.0
    assert rows[2]["step_s"] < rows[1]["step_s"] < rows[0]["step_s"]


def test_thousands_of_ranks_are_summed_up_as_the_packing_would(capsys):
    packed, summed = rates_of("nic:200*63,100"), rates_of("nic:200*4095,100")
    assert summed.ranks == 4096
    assert summed.trees_s_per_byte == pytest.approx(packed.trees_s_per_byte, rel=0.02)
    assert main(["simulate", "--model", "vgg19", "--topology", "nic:200*4095,100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[2]["ranks"] == 4096


def test_bad_input_is_named():
    with pytest.raises(ConfigError, match="beyond 128 only NICs on one switch"):
        rates_of("sites:100+100@200/1000")
