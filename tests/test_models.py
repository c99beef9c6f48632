"""Replayed models: published sizes, the fluid limits of the design, and a replay that computes what it says."""

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commhooks.bench.models import MODEL_NAMES, model_spec, scaled
from commhooks.bench.replay import ComputeClock, ReplayModel
from commhooks.core.fluid import LayerShare, fluid_limits, ring_s
from commhooks.core.topology_readers import parse_topology
from commhooks.errors import ConfigError

PUBLISHED_NUMEL = {
    "resnet50": 25_557_032,
    "vgg19": 143_667_240,
    "inceptionv3": 27_161_264,
    "inceptionv3-noaux": 23_834_568,
}
# model, communication / computing -> a plain step and an ideal priority step (computing = 1)
DESIGN_LIMITS = [
    *((model, 0.67, 1.00, 1.00) for model in ("resnet50", "vgg19")),
    *((model, 0.8, 1.13, 1.00) for model in ("resnet50", "vgg19")),
    *((model, 1.0, 1.33, 1.00) for model in ("resnet50", "vgg19")),
    *((model, 1.5, 1.83, 1.50) for model in ("resnet50", "vgg19")),
    *((model, 2.0, 2.33, 2.00) for model in ("resnet50", "vgg19")),
    ("eight", 1.0, 1.42, 1.13),
    ("transformer", 1.0, 1.48, 1.23),
]


@pytest.mark.parametrize(("name", "numel"), PUBLISHED_NUMEL.items())
def test_models_have_their_published_number_of_parameters(name, numel):
    assert model_spec(name).numel == numel


@pytest.mark.parametrize(
    ("name", "giga_operations"), [("resnet50", 4.09), ("vgg19", 19.63), ("inceptionv3-noaux", 5.71)]
)
def test_models_have_their_published_number_of_operations(name, giga_operations):
    assert model_spec(name).operations / 1e9 == pytest.approx(giga_operations, abs=0.01)


def test_vgg19_keeps_most_of_its_parameters_in_one_layer_and_sockeye_starts_with_its_largest():
    vgg19, sockeye = model_spec("vgg19"), model_spec("sockeye")
    assert max(layer.numel for layer in vgg19.layers) / vgg19.numel == pytest.approx(0.715, abs=0.001)
    assert max(sockeye.layers, key=lambda layer: layer.numel) is sockeye.layers[0]


@pytest.mark.parametrize(("name", "ratio", "plain", "priority"), DESIGN_LIMITS)
def test_fluid_limits_are_those_of_the_design(name, ratio, plain, priority):
    limits = fluid_limits(model_spec(name).shares(), ratio)
    assert limits.plain == pytest.approx(plain, abs=0.006)
    assert limits.priority == pytest.approx(priority, abs=0.006)


@given(
    st.lists(st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)), min_size=1, max_size=12),
    st.floats(0.05, 5),
)
def test_priority_is_never_slower_than_a_barrier_nor_faster_than_either_resource(weights, ratio):
    compute = sum(weight[0] for weight in weights)
    communication = sum(weight[1] for weight in weights)
    layers = [LayerShare(c / compute, m / communication) for c, m in weights]
    limits = fluid_limits(layers, ratio)
    assert max(1.0, ratio) - 1e-6 <= limits.priority <= limits.plain + 1e-6


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_shares_sum_to_one_and_names_are_unique(name):
    model = model_spec(name)
    assert sum(share.compute for share in model.shares()) == pytest.approx(1)
    assert sum(share.communication for share in model.shares()) == pytest.approx(1)
    assert len({layer.name for layer in model.layers}) == len(model.layers)


def test_scaling_shrinks_parameters_and_operations_alike():
    model = model_spec("resnet50")
    small = scaled(model, 1 / 16)
    assert small.numel == pytest.approx(model.numel / 16, rel=0.01)
    assert small.operations == pytest.approx(model.operations / 16)
    assert fluid_limits(small.shares(), 1).priority == pytest.approx(1.0, abs=0.006)


def test_bad_names_and_scales_are_named():
    with pytest.raises(ConfigError, match="'resnet51'.*resnet50"):
        model_spec("resnet51")
    with pytest.raises(ConfigError, match="scale is 0"):
        scaled(model_spec("tiny"), 0)


def test_replay_yields_a_gradient_for_every_parameter_and_reads_current_values():
    torch.manual_seed(0)
    replay = ReplayModel(scaled(model_spec("resnet50"), 0.001), compute_s=0)
    x = torch.ones(1)
    before = replay(x)
    before.sum().backward()
    assert all(parameter.grad is not None for parameter in replay.parameters())
    with torch.no_grad():
        for parameter in replay.parameters():
            parameter.add_(1.0)
            after = replay(x)
            assert not torch.equal(after, before)
            before = after


def test_waits_add_up_to_what_was_asked():
    clock = ComputeClock()
    start = time.perf_counter()
    for _ in range(100):
        clock.wait(0.0005)
    assert time.perf_counter() - start >= 0.045


@pytest.mark.parametrize(
    ("network", "seconds"), [("nic:200,800,800,800", 1.57), ("sites:4+4@200/1000", 7.32), ("nic:800*4", 0.39)]
)
def test_a_ring_takes_what_its_most_loaded_resource_takes(network, seconds):
    assert ring_s(parse_topology(network), 25e6) == pytest.approx(seconds, rel=0.01)
