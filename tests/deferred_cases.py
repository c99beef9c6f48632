"""Cases for deferred steps, run inside two Gloo ranks.

Each trains a registered model beside plain DDP and compares bit for bit.  `test_deferred` launches the ranks once and asks for
each case's outcome.  Most cases use an exchange that tells of a slice only when it is waited for, so that every gate is
still closed when a parameter is read.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commhooks import groups
from commhooks.bootstrap import group_rendezvous
from commhooks.config import Config
from commhooks.deferred import attach
from commhooks.deferred_steps import DeferredSteps
from commhooks.errors import UnsupportedModelError
from commhooks.native import NativeExchange

CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


# --- two models side by side -----------------------------------------------------------------------------------------


class Reluctant:
    """A `SliceExchange` that tells of a finished slice only when someone waits for it."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._hidden: set[Any] = set()
        self._told: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def poll(self) -> list[Any]:
        told, self._told = self._told, []
        return told

    def wait(self, slices: Any) -> None:
        self._inner.wait(slices)
        self._hidden.update(self._inner.poll())
        told = [key for key in slices if key in self._hidden]
        self._hidden.difference_update(told)
        self._told.extend(told)


def native(slice_numel: int = 64) -> NativeExchange:
    return NativeExchange(dist.group.WORLD, group_rendezvous(None, 30), slice_numel, "layer", 30)


class Side:
    """One of the two models that are trained alike."""

    def __init__(self, model: nn.Module, optimizers: list[Any], ddp_options: dict[str, Any]) -> None:
        self.model = model
        self.ddp = DistributedDataParallel(model, **{"bucket_cap_mb": 0.002, **ddp_options})
        self.optimizers = optimizers
        self.scheduler: Any = None
        self.keep: Any = None

    @property
    def optimizer(self) -> Any:
        return self.optimizers[0]


class Twins:
    """The same model twice: with deferred steps, and under plain DDP."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        make: Callable[[Any], Any] = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        reluctant: bool = True,
        trial: Any = None,
        **ddp_options: Any,
    ) -> None:
        torch.manual_seed(7)
        first = build()
        second = copy.deepcopy(first)
        self.sides = []
        for model in (first, second):
            made = make(model if _wants_model(make) else model.parameters())
            self.sides.append(Side(model, made if isinstance(made, list) else [made], ddp_options))
        self.ours, self.plain = self.sides
        exchange: Any = native()
        self.steps: DeferredSteps = attach(
            self.ours.ddp,
            self.ours.optimizers,
            Reluctant(exchange) if reluctant else exchange,
            Config(),
            trial,
        )

    def each(self, what: Callable[[Side], Any]) -> list[Any]:
        """Do the same to both, with the same random numbers."""
        results = []
        state = torch.get_rng_state()
        for side in self.sides:
            torch.set_rng_state(state)
            results.append(what(side))
        return results

    def same(self) -> None:
        """Both models and all ranks hold the same parameters and optimizer states, bit for bit."""
        for (name, ours), (_, plain) in zip(
            self.ours.model.named_parameters(), self.plain.model.named_parameters(), strict=True
        ):
            assert torch.equal(ours, plain), f"{name} differs by up to {(ours - plain).abs().max():.3g}"
        for one, other in zip(self.ours.optimizers, self.plain.optimizers, strict=True):
            _same_tree(one.state_dict(), other.state_dict())
        sums = torch.tensor([float(p.detach().abs().double().sum()) for p in self.ours.model.parameters()])
        gathered = [torch.empty_like(sums) for _ in range(2)]
        dist.all_gather(gathered, sums)
        assert torch.equal(*gathered), "ranks hold different parameters"

    def done(self) -> None:
        self.same()
        self.steps.finish()
        self.same()


def _wants_model(make: Any) -> bool:
    return bool(getattr(make, "wants_model", False))


def with_model(make: Any) -> Any:
    make.wants_model = True
    return make


def _same_tree(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), (one.keys(), other.keys())
        for key in one:
            _same_tree(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        for left, right in zip(one, other, strict=True):
            _same_tree(left, right)
    else:
        assert one == other, (one, other)


_step_seed = itertools.count()


def batch(*shape: int) -> torch.Tensor:
    """Input that differs between ranks."""
    generator = torch.Generator().manual_seed(1000 * next(_step_seed) + dist.get_rank())
    return torch.randn(*(shape or (8, 12)), generator=generator)


def mlp(width: int = 12) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, width))


def step(side: Side, x: torch.Tensor, between: Callable[[Side], Any] | None = None) -> float:
    """The usual training step."""
    for optimizer in side.optimizers:
        optimizer.zero_grad()
    loss = side.ddp(x).square().mean()
    loss.backward()
    if between is not None:
        between(side)
    for optimizer in side.optimizers:
        optimizer.step()
    return float(loss.detach())


def train(twins: Twins, count: int = 5, shape: tuple[int, ...] = (8, 12), **options: Any) -> None:
    for _ in range(count):
        x = batch(*shape)
        losses = twins.each(lambda side, x=x: step(side, x, **options))
        assert losses[0] == losses[1], f"the forward saw other values: loss {losses[0]!r} and {losses[1]!r}"


@contextlib.contextmanager
def refused(error: type[Exception], words: str) -> Iterator[None]:
    try:
        yield
    except error as raised:
        assert words in str(raised), f"{raised} does not say {words!r}"
        return
    raise AssertionError(f"no {error.__name__} with {words!r}")


# --- trajectories of fifty steps -------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "sgd_nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adam_foreach": lambda p: torch.optim.Adam(p, lr=1e-3, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-3),
    "adamax_tensor_lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-3)),
}


def warm_up_then_steps(optimizer: torch.optim.Optimizer) -> Any:
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=8)
    drop = torch.optim.lr_scheduler.StepLR(optimizer, 9, 0.5)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, drop], [8])


def trajectory(make: Callable[[Any], torch.optim.Optimizer], clip: bool, accumulate: bool) -> None:
    twins = Twins(mlp, make, reluctant=False)
    for side in twins.sides:
        side.scheduler = warm_up_then_steps(side.optimizer)
    for number in range(50):
        inputs = [batch(), batch()]

        def one(side: Side, inputs: list[torch.Tensor] = inputs) -> float:
            side.optimizer.zero_grad()
            if accumulate:
                with side.ddp.no_sync():
                    side.ddp(inputs[1]).square().mean().backward()
            loss = side.ddp(inputs[0]).square().mean()
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(side.ddp.parameters(), 0.05)
            side.optimizer.step()
            side.scheduler.step()
            return float(loss.detach())

        losses = twins.each(one)
        assert losses[0] == losses[1], f"step {number}: {losses}"
    stats = twins.steps.stats()
    assert stats["steps"] == 50
    assert stats["whole"] == (50 if clip else 1), stats
    twins.done()


for _name, _make in OPTIMIZERS.items():
    CASES[f"trajectory_{_name}"] = lambda make=_make: trajectory(make, clip=False, accumulate=False)
CASES["trajectory_clipped"] = lambda: trajectory(OPTIMIZERS["adamw"], clip=True, accumulate=False)
CASES["trajectory_accumulated"] = lambda: trajectory(OPTIMIZERS["sgd_momentum"], clip=False, accumulate=True)
CASES["trajectory_clipped_accumulated"] = lambda: trajectory(OPTIMIZERS["adam"], clip=True, accumulate=True)


@case
def over_trees_equal_to_overlap_backward() -> None:
    """Same sums, same steps, other order in time: both modes over the engine, with slices of 100 elements."""
    import commhooks

    torch.manual_seed(7)
    models = [mlp()]
    models.append(copy.deepcopy(models[0]))
    ddps = [DistributedDataParallel(model, bucket_cap_mb=0.002) for model in models]
    optimizers = [torch.optim.AdamW(ddp.parameters(), lr=1e-3) for ddp in ddps]
    settings = {"slice_numel": 100, "links": "tcp"}
    handles = [
        commhooks.register(ddps[0], optimizers[0], overlap="forward", **settings),
        commhooks.register(ddps[1], overlap="backward", **settings),
    ]
    for _ in range(50):
        x = batch()
        losses = []
        for ddp, optimizer in zip(ddps, optimizers, strict=True):
            optimizer.zero_grad()
            loss = ddp(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[0] == losses[1]
    assert handles[0].stats()["overlap"] == "forward"
    for handle in handles:
        handle.finish()
    for ours, plain in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(ours, plain)


@case
def a_layer_waits_for_its_own_gradients_only() -> None:
    closed: list[int] = []

    class Peek(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            closed.append(twins.steps.closed_gates if self is peek else -1)
            return x

    peek = Peek()
    twins = Twins(lambda: nn.Sequential(nn.Linear(200, 200), nn.ReLU(), Peek(), nn.Linear(200, 200)))
    peek = twins.ours.model[2]
    train(twins, 4, (8, 200))
    # The first forward has no gates, the second none yet (the first step is whole); then the first layer has opened.
    assert [count for count in closed if count >= 0] == [0, 0, 2, 2], closed
    twins.done()


@case
def gradients_leave_before_their_bucket_is_full() -> None:
    left: list[int] = []

    class Recording(Reluctant):
        def start(self, step_number: int, bucket: int, *rest: Any) -> None:
            left.append(step_number)
            self._inner.start(step_number, bucket, *rest)

    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 200))
    exchange = native()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp = DistributedDataParallel(model, bucket_cap_mb=25)
    steps = attach(ddp, optimizer, Recording(exchange), Config())
    seen = []
    for _ in range(5):
        handle = model[1].register_full_backward_hook(lambda *_: seen.append(len(left)))
        optimizer.zero_grad()
        ddp(batch(8, 200)).square().mean().backward()
        handle.remove()
        optimizer.step()
    # DDP's first buckets give three units, the rebuilt ones two; from the third step on, one has left half-way.
    assert seen == [0, 3, 5 + 1, 7 + 1, 9 + 1], (seen, left)
    steps.finish()


@case
def urgent_slices_overtake_on_a_slow_link() -> None:
    """The timeline of a link of 1.5 MB/s: the first layer's slices, ready last, are back before most of the last layer's."""
    import commhooks

    peer = 1 - dist.get_rank()
    os.environ["COMMHOOKS_LAB_PACING"] = json.dumps({"pacing_bytes_per_s": {peer: 1.5e6}})
    folder = Path(tempfile.mkdtemp())
    try:
        model = nn.Sequential(nn.Linear(12, 3000), nn.ReLU(), nn.Linear(3000, 60))
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        settings = {"links": "tcp", "slice_numel": 2000, "overlap": "forward", "replan": False}
        with commhooks.register(ddp, optimizer, **settings, timeline=str(folder / "trace.json")) as handle:
            for _ in range(5):
                optimizer.zero_grad()
                ddp(batch()).square().mean().backward()
                optimizer.step()
            handle.flush()
            groups.engine_for(ddp.process_group, handle_config(settings, folder)).timeline.write()
        (path,) = folder.glob("*.json")
        ends = [
            (event["id"], event["name"])
            for event in sorted(
                json.loads(path.read_text())["traceEvents"], key=lambda event: event.get("ts", 0)
            )
            if event.get("cat") == "slices" and event["ph"] == "e"
        ]
    finally:
        del os.environ["COMMHOOKS_LAB_PACING"]
        shutil.rmtree(folder)
    later = []
    for step_number in ("3", "4", "5"):
        order = [name for ident, name in ends if ident.split("-")[1] == step_number]
        urgent = [place for place, name in enumerate(order) if name == "0.weight"]
        assert len(urgent) >= 18 and len(order) - len(urgent) >= 80, order
        later.append(sum(name != "0.weight" for name in order[: urgent[-1]]))
    # Where the other rank was late (a busy machine), its urgent slices weren't there to overtake: the best step counts.
    assert min(later) < 40, f"{later} of the last layer's slices were back before the first layer was"


def handle_config(settings: dict[str, Any], folder: Path) -> Config:
    return groups.load_config({**settings, "timeline": str(folder / "trace.json")})


# --- models that read parameters in unusual ways ---------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(12, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.layer(x))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 12)
        self.inner = nn.Linear(12, 12)
        self.head_bias = nn.Parameter(torch.zeros(20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = (x[:, 0].abs() * 5).long() % 20
        return F.linear(self.inner(self.embedding(words)), self.embedding.weight, self.head_bias)


class Unusual(nn.Module):
    """A bias without its weight, an alias taken at construction, a view, a parameter list, a module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.twice = nn.Linear(12, 12)
        self.only_bias = nn.Linear(12, 12)
        self.pieces = nn.ParameterList(nn.Parameter(torch.randn(12) * 0.1) for _ in range(3))
        self.table = nn.Parameter(torch.randn(4, 12) * 0.1)
        self.aliases: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.twice(torch.tanh(self.twice(x))) + self.only_bias.bias
        x = (
            x
            + torch.stack(list(self.pieces)).sum(0)
            + self.table[1:3].sum(0)
            + torch.cat([*self.table]).sum()
        )
        with torch.no_grad():
            if not self.aliases:
                self.aliases.append(self.first.bias.data[3:])
            shift = self.aliases[0].sum()
        return self.first(x + shift)


class Skips(nn.Module):
    """Skips layers at random: the same on all ranks, or by rank."""

    def __init__(self, by_rank: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.by_rank = by_rank
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        generator = torch.Generator().manual_seed(self.count * 10 + (dist.get_rank() if self.by_rank else 0))
        for layer in self.layers:
            if torch.rand((), generator=generator) < 0.6:
                x = x + torch.tanh(layer(x))
        return x + self.layers[0](x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(12, 8, num_layers=2, batch_first=True)
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0])


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return gradients[0] * w, (gradients[0] * x).sum(0)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(12))
        self.inner = nn.Linear(12, 12)
        self.outer = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Times.apply(x, self.scale)
        x = torch.utils.checkpoint.checkpoint(lambda y: torch.tanh(self.inner(y)), x, use_reentrant=False)
        return self.outer(x)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.norm(self.first(x))))


class Mixed(nn.Module):
    """Several types, a frozen layer, an empty parameter, a complex one."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(12, 12)
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.wide = nn.Linear(12, 12).double()
        self.narrow = nn.Parameter(torch.ones(12, dtype=torch.bfloat16))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.spectrum = nn.Parameter(torch.ones(7, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.single(x)).double()
        x = self.wide(x).float() * self.narrow.float() + self.empty.sum()
        return torch.fft.irfft(torch.fft.rfft(x) * self.spectrum, n=12)


def adam(p: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(p, lr=1e-2)


def model_case(name: str, build: Callable[[], nn.Module], shape: tuple[int, ...], **options: Any) -> None:
    def run() -> None:
        twins = Twins(build, adam, **options)
        train(twins, 6, shape)
        twins.done()

    CASES[name] = run


model_case("attention", Attention, (4, 5, 12))
model_case("tied_embedding", Tied, (8, 12))
model_case("functional_alias_and_twice", Unusual, (8, 12), find_unused_parameters=True)
model_case("layers_skipped", lambda: Skips(False), (8, 12), find_unused_parameters=True)
model_case("layers_skipped_by_rank", lambda: Skips(True), (8, 12), find_unused_parameters=True)
model_case("recurrent_and_weight_norm", Recurrent, (4, 5, 12))
model_case("custom_function_and_checkpoint", Custom, (8, 12))
model_case("channels_last", lambda: Convolutions().to(memory_format=torch.channels_last), (2, 3, 8, 8))
model_case("mixed_types", Mixed, (8, 12))
model_case("bucket_views", mlp, (8, 12), gradient_as_bucket_view=True)
model_case("static_graph", mlp, (8, 12), static_graph=True)
model_case("compiled_inside", lambda: torch.compile(mlp(), backend="aot_eager"), (8, 12), bucket_cap_mb=25)


@case
def order_is_learned_from_the_forward() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(12, 12)
            self.first = nn.Linear(12, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.relu(self.first(x)))

    twins = Twins(Backwards)
    train(twins, 3)
    expected = ["first.weight", "first.bias", "last.weight", "last.bias"]
    assert twins.steps.stats()["forward_order"] == expected, twins.steps.stats()
    twins.done()


@case
def order_is_learned_again_when_the_graph_changes() -> None:
    from commhooks import deferred_flow

    class Turning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
            self.turned = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in reversed(self.layers) if self.turned else self.layers:
                x = torch.tanh(layer(x))
            return x

    before, deferred_flow.RELEARN_STEPS = deferred_flow.RELEARN_STEPS, 4
    try:
        twins = Twins(Turning)
        train(twins, 3)
        for side in twins.sides:
            side.model.turned = True
        train(twins, 6)
        assert twins.steps.stats()["forward_order"][0] == "layers.3.weight"
        twins.done()
    finally:
        deferred_flow.RELEARN_STEPS = before


# --- what users do between steps -------------------------------------------------------------------------------------


@case
def everything_that_reads_parameters_sees_finished_values() -> None:
    twins = Twins(mlp, adam)
    readers: list[Callable[[Side], Any]] = [
        lambda side: side.ddp.state_dict(),
        lambda side: side.model.state_dict(),
        lambda side: copy.deepcopy(side.model).state_dict(),
        lambda side: saved(side.model).state_dict(),
        lambda side: saved(side.model.state_dict()),
        lambda side: [p.detach().numpy().tolist() for p in side.model.parameters()],
        lambda side: nn.utils.parameters_to_vector(side.model.parameters()),
        lambda side: [float(p.norm()) for p in side.model.parameters()],
        lambda side: [p.data.clone() for p in reversed(list(side.model.parameters()))],
        lambda side: repr(list(side.model.parameters())),
        lambda side: evaluated(side, torch.no_grad()),
        lambda side: evaluated(side, torch.inference_mode()),
        lambda side: evaluated(side, torch.autocast("cpu", dtype=torch.bfloat16)),
        lambda side: averaged(side),
        lambda side: side.optimizer.state_dict(),
        lambda side: copy.deepcopy(side.optimizer).state_dict(),
        lambda side: saved(side.optimizer.state_dict()),
        lambda side: str(side.optimizer.state[next(side.model.parameters())].keys()),
    ]
    for reader in readers:
        train(twins, 2)
        ours, plain = twins.each(reader)
        _same_tree(ours, plain)
    twins.done()


def saved(thing: Any) -> Any:
    memory = io.BytesIO()
    torch.save(thing, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=False)


def evaluated(side: Side, context: Any) -> torch.Tensor:
    side.model.eval()
    with context:
        result = side.model(torch.ones(2, 12)).clone()
    side.model.train()
    return result


def averaged(side: Side) -> Any:
    if side.keep is None:
        side.keep = torch.optim.swa_utils.AveragedModel(side.model)
    side.keep.update_parameters(side.model)
    return side.keep.module.state_dict()


@case
def parameters_written_by_the_user_stay_written() -> None:
    twins = Twins(mlp, adam)
    train(twins, 3)

    def clamp(side: Side) -> None:
        with torch.no_grad():
            for p in side.model.parameters():
                p.clamp_(-0.05, 0.05)

    for _ in range(3):
        twins.each(clamp)
        train(twins, 1)
    before = [side.model.state_dict() for side in twins.sides]
    kept = [{k: v.clone() for k, v in state.items()} for state in before]
    train(twins, 2)
    for side, state in zip(twins.sides, kept, strict=True):
        side.model.load_state_dict(state)
    train(twins, 2)
    twins.done()


@case
def clipping_by_norm_value_and_by_hand() -> None:
    twins = Twins(mlp, adam)

    def by_hand(side: Side) -> None:
        for p in side.model.parameters():
            p.grad.mul_(0.5).add_(p.detach(), alpha=0.01)

    ways: list[Callable[[Side], Any]] = [
        lambda side: nn.utils.clip_grad_norm_(side.model.parameters(), 0.1),
        lambda side: nn.utils.clip_grad_value_(side.model.parameters(), 0.001),
        by_hand,
    ]
    for way in ways:
        train(twins, 2)
        x = batch()
        values: list[Any] = []
        twins.each(lambda side, x=x, way=way, values=values: step(side, x, lambda s: values.append(way(s))))
        if values[0] is not None:
            assert torch.equal(values[0], values[1]), "the norm that was returned differs"
        twins.same()
    assert twins.steps.stats()["whole"] == 1 + len(ways)
    twins.done()


@case
def gradients_logged_before_the_step_are_averages() -> None:
    twins = Twins(mlp, adam)
    train(twins, 3)
    x = batch()
    logged: list[Any] = []
    twins.each(
        lambda side: step(side, x, lambda s: logged.append([p.grad.norm() for p in s.model.parameters()]))
    )
    _same_tree(logged[0], logged[1])
    twins.done()


@case
def grad_scaler() -> None:
    twins = Twins(mlp, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    scalers = {
        id(side): torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3) for side in twins.sides
    }

    def one(side: Side, x: torch.Tensor, spoil: bool) -> float:
        scaler = scalers[id(side)]
        side.optimizer.zero_grad()
        loss = side.ddp(x).square().mean()
        scaler.scale(loss * (float("inf") if spoil else 1.0)).backward()
        scaler.step(side.optimizer)
        scaler.update()
        return scaler.get_scale()

    for number in range(8):
        x = batch()
        scales = twins.each(lambda side, x=x, n=number: one(side, x, spoil=n == 4 and dist.get_rank() == 1))
        assert scales[0] == scales[1], scales
    twins.done()


@case
def zero_grad_of_every_kind() -> None:
    twins = Twins(mlp, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1))

    def one(side: Side, x: torch.Tensor, kind: str) -> float:
        if kind == "none before":
            side.optimizer.zero_grad(set_to_none=True)
        elif kind == "zero before":
            side.optimizer.zero_grad(set_to_none=False)
        elif kind == "model":
            side.ddp.zero_grad()
        loss = side.ddp(x).square().mean()
        if kind == "after forward":
            side.optimizer.zero_grad()
        elif kind == "zero after forward":
            side.optimizer.zero_grad(set_to_none=False)
        loss.backward()
        side.optimizer.step()
        return float(loss.detach())

    kinds = ["none before", "zero before", "model", "after forward", "zero after forward", "never"]
    for kind in [*kinds, *reversed(kinds), "never", "never"]:
        x = batch()
        losses = twins.each(lambda side, x=x, kind=kind: one(side, x, kind))
        assert losses[0] == losses[1], (kind, losses)
    twins.done()


@case
def zero_grad_of_every_kind_with_bucket_views() -> None:
    twins = Twins(mlp, adam, gradient_as_bucket_view=True)
    for kind in (True, False, None, None, False, True, None):
        x = batch()

        def one(side: Side, x: torch.Tensor = x, kind: bool | None = kind) -> None:
            if kind is not None:
                side.optimizer.zero_grad(set_to_none=kind)
            side.ddp(x).square().mean().backward()
            side.optimizer.step()

        twins.each(one)
        twins.same()
    twins.done()


@case
def accumulation_in_every_way() -> None:
    twins = Twins(mlp, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9))

    def one(side: Side, inputs: list[torch.Tensor], no_sync: bool) -> None:
        side.optimizer.zero_grad()
        for x in inputs[:-1]:
            with side.ddp.no_sync() if no_sync else contextlib.nullcontext():
                side.ddp(x).square().mean().backward()
        side.ddp(inputs[-1]).square().mean().backward()
        side.optimizer.step()

    for no_sync, count in itertools.product((True, False), (2, 3)):
        for _ in range(2):
            inputs = [batch() for _ in range(count)]
            twins.each(lambda side, i=inputs, n=no_sync: one(side, i, n))
        twins.same()

    def one_loss(side: Side, inputs: list[torch.Tensor]) -> None:
        side.optimizer.zero_grad()
        sum(side.ddp(x).square().mean() for x in inputs).backward()  # type: ignore[union-attr]
        side.optimizer.step()

    plain_inputs = [batch(), batch()]
    # One DDP forward per backward is DDP's own rule when buffers must be found; a plain MLP is fine with two.
    twins.each(lambda side: one_loss(side, plain_inputs))
    twins.done()


@case
def steps_that_are_skipped_and_batches_that_fail() -> None:
    twins = Twins(mlp, adam)

    def skip(side: Side, x: torch.Tensor) -> None:
        side.optimizer.zero_grad()
        side.ddp(x).square().mean().backward()

    def fail(side: Side, x: torch.Tensor) -> None:
        with contextlib.suppress(ZeroDivisionError):
            side.optimizer.zero_grad()
            side.ddp(x).square().mean().backward()
            raise ZeroDivisionError

    train(twins, 2)
    for what in (skip, fail, skip, skip, fail):
        x = batch()
        twins.each(lambda side, x=x, what=what: what(side, x))
        train(twins, 2)
    twins.done()


@case
def two_steps_after_one_backward() -> None:
    twins = Twins(mlp, adam)
    train(twins, 2)
    x = batch()
    twins.each(lambda side: step(side, x))
    twins.each(lambda side: side.optimizer.step())
    train(twins, 2)
    twins.done()


@case
def gradients_set_to_none_by_hand_are_not_stepped() -> None:
    twins = Twins(mlp, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1))

    def drop_first(side: Side) -> None:
        next(side.model.parameters()).grad = None

    train(twins, 3)
    train(twins, 2, between=drop_first)
    train(twins, 2)
    twins.done()


@case
def schedulers_before_and_after_registering_with_momentum_cycles() -> None:
    def one_cycle(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)

    torch.manual_seed(7)
    twins = Twins(mlp, lambda p: _scheduled(torch.optim.SGD(p, lr=0.1, momentum=0.9), one_cycle))
    for _ in range(15):
        x = batch()

        def one(side: Side, x: torch.Tensor = x) -> None:
            step(side, x)
            side.optimizer.kept_scheduler.step()

        twins.each(one)
    twins.same()
    for side in twins.sides:
        side.scheduler = torch.optim.lr_scheduler.ExponentialLR(side.optimizer, 0.9)
    for _ in range(4):
        x = batch()

        def other(side: Side, x: torch.Tensor = x) -> None:
            step(side, x)
            side.scheduler.step()

        twins.each(other)
    twins.done()


def _scheduled(optimizer: Any, make: Callable[[Any], Any]) -> Any:
    optimizer.kept_scheduler = make(optimizer)
    return optimizer


@case
def groups_and_several_optimizers() -> None:
    @with_model
    def make(model: Any) -> list[Any]:
        layers = list(model)
        return [
            torch.optim.SGD(
                [
                    {"params": layers[0].parameters(), "lr": 0.1, "momentum": 0.9},
                    {"params": [layers[2].weight], "weight_decay": 0.1},
                ],
                lr=0.05,
            ),
            torch.optim.AdamW([layers[2].bias, *layers[4].parameters()], lr=0.01),
        ]

    twins = Twins(mlp, make)
    train(twins, 4)

    def only_first(side: Side, x: torch.Tensor) -> None:
        for optimizer in side.optimizers:
            optimizer.zero_grad()
        side.ddp(x).square().mean().backward()
        side.optimizers[0].step()

    for _ in range(3):
        x = batch()
        twins.each(lambda side, x=x: only_first(side, x))
        train(twins, 1)
    twins.done()


@case
def parameters_without_an_optimizer_are_averaged() -> None:
    @with_model
    def make(model: Any) -> Any:
        return torch.optim.SGD(next(iter(model)).parameters(), lr=0.1, momentum=0.9)

    twins = Twins(mlp, make)
    for side in twins.sides:
        side.keep = torch.optim.SGD([p for m in list(side.model)[1:] for p in m.parameters()], lr=0.1)

    def one(side: Side, x: torch.Tensor) -> None:
        step(side, x)
        side.keep.step()
        side.keep.zero_grad()

    for _ in range(4):
        x = batch()
        twins.each(lambda side, x=x: one(side, x))
    twins.done()


@case
def two_models_in_turn() -> None:
    twins = [Twins(mlp, adam), Twins(mlp, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9))]

    def adversarial(generator: Side, critic: Side, x: torch.Tensor) -> None:
        critic.optimizer.zero_grad()
        fake = generator.ddp(x)
        (critic.ddp(fake.detach()).mean() - critic.model(x).mean()).backward()
        critic.optimizer.step()
        generator.optimizer.zero_grad()
        critic.model(generator.model(x)).square().mean().backward()
        generator.ddp(x).square().mean().backward()
        generator.optimizer.step()

    for _ in range(5):
        x = batch()
        for generator, critic in zip(twins[0].sides, twins[1].sides, strict=True):
            adversarial(generator, critic, x)
    for one in twins:
        one.done()


@case
def step_hooks_see_whole_steps() -> None:
    twins = Twins(mlp, adam)
    seen: dict[int, list[float]] = {}

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        norms = [float(p.detach().norm()) for group in optimizer.param_groups for p in group["params"]]
        seen.setdefault(id(optimizer), []).extend(norms)

    train(twins, 2)
    for side in twins.sides:
        side.optimizer.register_step_post_hook(hook)
    train(twins, 3)
    ours, plain = (seen[id(side.optimizer)] for side in twins.sides)
    assert ours == plain and len(ours) == 18
    twins.done()


@case
def modes_of_the_user_around_and_across_steps() -> None:
    class Counting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    twins = Twins(mlp, adam)
    train(twins, 2)
    depth = torch._C._len_torch_function_stack()
    with torch.device("cpu"), Counting():
        train(twins, 1)
    train(twins, 1)
    mode = Counting()
    mode.__enter__()
    train(twins, 2)
    mode.__exit__(None, None, None)
    train(twins, 1)
    torch.set_default_device("cpu")
    train(twins, 2)
    torch.set_default_device(None)
    train(twins, 1)
    twins.done()
    assert torch._C._len_torch_function_stack() == 0, depth


@case
def uneven_inputs_with_join() -> None:
    twins = Twins(mlp, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), reluctant=False)
    train(twins, 2)
    inputs = [batch() for _ in range(6)][: 3 + 3 * dist.get_rank()]

    def one(side: Side) -> None:
        with side.ddp.join():
            for x in inputs:
                step(side, x)

    twins.each(one)
    twins.steps.flush()
    for ours, plain in zip(twins.ours.model.parameters(), twins.plain.model.parameters(), strict=True):
        assert torch.equal(ours, plain)
    twins.steps.finish()


@case
def sparse_gradients_take_the_stock_path() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(20, 12, sparse=True)
            self.head = nn.Linear(12, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding((x[:, 0].abs() * 5).long() % 20))

    twins = Twins(Words, lambda p: torch.optim.SGD(p, lr=0.1))
    train(twins, 4)
    twins.done()


@case
def a_trial_goes_both_ways_and_keeps_the_faster() -> None:
    from commhooks import deferred_steps
    from commhooks.core.overlap_trial import WARM_UP_STEPS, OverlapTrial, Verdict

    measured = deferred_steps.verdict
    try:
        for overlap in (True, False):
            deferred_steps.verdict = lambda *_, overlap=overlap: Verdict(overlap, "so it was decided")
            twins = Twins(mlp, adam, trial=OverlapTrial())
            trial = twins.steps._trial
            trial.wish = lambda: 3
            train(twins, WARM_UP_STEPS + 12 + 4)
            stats = twins.steps.stats()
            assert stats["overlap"] == ("forward" if overlap else "none"), stats
            assert stats["overlap_reason"] == "so it was decided"
            # Of the first four steps one is whole; then two windows of three overlap, and what follows the verdict.
            assert stats["overlapped"] == 3 + 6 + (4 if overlap else 0), stats
            twins.done()
    finally:
        deferred_steps.verdict = measured


@case
def finish_then_train_on() -> None:
    twins = Twins(mlp, adam)
    train(twins, 3)
    twins.steps.finish()
    twins.steps.finish()
    train(twins, 3)
    twins.same()
    assert torch._C._len_torch_function_stack() == 0


@case
def a_copied_model_trains_as_plain_ddp() -> None:
    twins = Twins(mlp, adam)
    train(twins, 3)
    copies = [copy.deepcopy(side.ddp) for side in twins.sides]
    x = batch()
    for one in copies:
        one(x).square().mean().backward()
    for ours, plain in zip(copies[0].parameters(), copies[1].parameters(), strict=True):
        assert torch.equal(ours.grad, plain.grad)
    train(twins, 2)
    twins.done()


@case
def forward_on_another_thread() -> None:
    import threading

    twins = Twins(mlp, adam)
    train(twins, 3)
    results: list[torch.Tensor] = []
    for side in twins.sides:
        thread = threading.Thread(
            target=lambda side=side: results.append(side.ddp(torch.ones(2, 12)).detach())
        )
        thread.start()
        thread.join()
    assert torch.equal(*results)
    train(twins, 2)
    twins.done()


@case
def an_unknown_elementwise_optimizer_is_tested_and_served() -> None:
    class Signs(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.01})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        state = self.state[p]
                        state["mean"] = state.get("mean", 0) * 0.9 + p.grad
                        p.sub_(state["mean"].sign(), alpha=group["lr"])

    twins = Twins(mlp, Signs)
    train(twins, 6)
    assert twins.steps.stats()["overlapped"] == 5
    twins.done()


# --- refusals --------------------------------------------------------------------------------------------------------


def _fresh(make: Callable[[Any], Any]) -> DeferredSteps:
    model = mlp()
    return attach(DistributedDataParallel(model), make(model.parameters()), native(), Config())


class Normed(torch.optim.SGD):
    """Scales by the norm over all parameters: what stepping one by one would break."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = torch.stack([g.norm() for g in gradients]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / total, alpha=group["lr"])


class Counted(torch.optim.SGD):
    """Counts its steps in the group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


@case
def optimizers_that_cannot_step_by_layer_are_refused() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with refused(UnsupportedModelError, "LBFGS searches along"):
        _fresh(lambda p: torch.optim.LBFGS(p))
    with refused(UnsupportedModelError, "ZeroRedundancyOptimizer keeps each rank's share"):
        _fresh(lambda p: ZeroRedundancyOptimizer(p, torch.optim.SGD, lr=0.1))
    with refused(UnsupportedModelError, "differentiable=True"):
        _fresh(lambda p: torch.optim.SGD(p, lr=0.1, differentiable=True))
    with refused(UnsupportedModelError, "doesn't reduce"):
        _fresh(lambda p: torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1))
    with refused(UnsupportedModelError, "float is not a torch.optim.Optimizer"):
        _fresh(lambda p: 0.1)
    for kind, words in (
        (Normed, "couples parameters"),
        (Counted, "keeps running state in param_groups ('k'"),
    ):
        torch.manual_seed(1)
        model = mlp()
        ddp = DistributedDataParallel(model)
        optimizer = kind(model.parameters(), lr=0.1)
        attach(ddp, optimizer, native(), Config())
        ddp(batch()).square().mean().backward()
        with refused(UnsupportedModelError, words):
            optimizer.step()


@case
def calls_that_cannot_be_honoured_are_named() -> None:
    twins = Twins(mlp, adam)
    with refused(UnsupportedModelError, "none of its parameters has a gradient"):
        twins.ours.optimizer.step()
    train(twins, 3)
    with refused(UnsupportedModelError, "step(closure)"):
        twins.ours.optimizer.step(lambda: 0.0)
    twins.done()


@case
def edits_that_cannot_be_seen_are_refused_not_lost() -> None:
    twins = Twins(mlp, adam)
    train(twins, 3)
    side = twins.ours
    side.optimizer.zero_grad()
    side.ddp(batch()).square().mean().backward()
    with torch._C.DisableTorchFunction():  # as an extension would
        next(side.model.parameters()).grad.add_(1.0)
    with refused(UnsupportedModelError, "0.weight was changed between backward() and step()"):
        side.optimizer.step()
    side.optimizer.zero_grad()
    twins.steps.finish()


@case
def a_second_hook_is_refused_by_name() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    from commhooks.errors import ConfigError

    model = mlp()
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, allreduce_hook)
    with refused(ConfigError, "already has the communication hook allreduce_hook"):
        attach(ddp, torch.optim.SGD(model.parameters(), lr=0.1), native(), Config())


def run_case(name: str) -> None:
    """In a rank: run one case."""
    CASES[name]()
