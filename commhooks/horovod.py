"""``import commhooks.horovod as hvd``: everything of ``horovod.torch``, with our ``DistributedOptimizer``.

Where in the flow: the user's script -> **here** -> distributed optimizer -> reducer -> engine or Horovod's all-reduce.

The only module that imports Horovod.  Whatever isn't defined here is Horovod's own, looked up when it is asked for.

Invariants: ``COMMHOOKS=0`` gives plain Horovod; importing this module imports Horovod and does nothing else.
"""

from __future__ import annotations

import logging
import os
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from commhooks.bootstrap import StoreRendezvous
from commhooks.config import Config
from commhooks.distributed_optimizer import checked_passes, distribute, named_in_order, refuse_unsupported
from commhooks.engine import Surroundings
from commhooks.errors import ConfigError, MissingDependency
from commhooks.groups import lab_pacing
from commhooks.horovod_forward import ForwardMethods, ForwardReducer, forward_step
from commhooks.horovod_join import join as join_with_zeros
from commhooks.horovod_launch import (
    Place,
    Server,
    horovod_variables,
    hosts_of,
    own_place,
    started_by_torchrun,
)
from commhooks.horovod_world import HorovodRendezvous, HorovodWorld, close_engines
from commhooks.hosts import route_address
from commhooks.reducer import GradientReducer, NoReducer
from commhooks.reduction import Options, agree_on_order
from commhooks.stall_watch import LauncherStore

_BUILD = (
    "build it with `commhooks doctor --build-horovod` (or patches/build-horovod of the source tree); its last release, "
    "0.28.1, doesn't compile against current PyTorch without the patches there"
)


def _import_horovod() -> ModuleType:
    try:
        import horovod.torch as module
    except ImportError as error:
        raise MissingDependency(
            f"horovod isn't installed, or not for this PyTorch ({error}); {_BUILD}"
        ) from error
    if not hasattr(module, "allreduce_async_"):  # Horovod prints a warning and goes on without its extension
        raise MissingDependency(f"horovod is installed, but its PyTorch extension doesn't load; {_BUILD}")
    return module


_hvd = _import_horovod()
_ops = _hvd.mpi_ops
# Taken now: `install_for_run` puts ours into Horovod's module.
_plain_optimizer = _hvd.optimizer.DistributedOptimizer
_plain_init, _plain_shutdown, _plain_join = _ops.init, _ops.shutdown, _ops.join

log = logging.getLogger(__name__)


def __getattr__(name: str) -> Any:
    return getattr(_hvd, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_hvd)})


# --- Starting and ending -----------------------------------------------------------------------------------------------


def init(*args: Any, **kwargs: Any) -> None:
    """Horovod's ``init``; under torchrun it takes its place from torchrun's variables.

    Blocks until all ranks have come.  Must run in the thread that trains.
    """
    if started_by_torchrun(os.environ):
        _take_place_from_torchrun()
    # Fused sums depend on timing; our parcels are fused already, always in the same way.
    os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")
    _plain_init(*args, **kwargs)


def shutdown(*args: Any, **kwargs: Any) -> None:
    """Horovod's ``shutdown``, after our engines have said goodbye."""
    close_engines()
    _plain_shutdown(*args, **kwargs)


def join(device: int = -1) -> int:
    """Horovod's ``join``: this rank has no more data; blocks until all ranks have come.  Returns the last that came.

    Raises
    ------
    ConfigError
        Gradients are under way, are sparse, or belong to a process set (Horovod's join knows the whole world only).
    """
    fed = [_reducers[number] for number in sorted(_reducers) if _reducers[number].needs_zeros]
    for reducer in fed:
        if why_not := reducer.why_not_zeros():
            raise ConfigError(f"join(): {why_not}; give every rank the same number of batches instead")
    rendezvous = HorovodRendezvous(_hvd, _hvd.global_process_set)
    return join_with_zeros(fed, lambda: _plain_join(device), rendezvous.exchange)


_server: Any = None  # rank 0's, kept to the process's end
_store: Any = None  # likewise: a launcher without an agent leaves serving it to rank 0, and others still read


def _take_place_from_torchrun() -> None:
    """Set Horovod's variables from torchrun's; rank 0 serves Horovod's rendezvous."""
    global _server, _store
    from torch.distributed.rendezvous import rendezvous

    store, rank, world_size = next(iter(rendezvous("env://")))
    _store = store
    place = own_place(os.environ)
    address = route_address(os.environ["MASTER_ADDR"])
    meeting = StoreRendezvous(store, rank, world_size, "commhooks/horovod", timeout_s=300.0)
    places = [Place(**fields) for fields in meeting.exchange("places", vars(place))]
    port = 0
    if rank == 0:
        _server, port = _serve_rendezvous(places)
    host, port = meeting.exchange("server", [address, port])[0]
    interface = os.environ.get("HOROVOD_GLOO_IFACE") or os.environ.get("GLOO_SOCKET_IFNAME")
    interface = interface or _interface_of(address)
    os.environ.update(horovod_variables(places, rank, Server(host, port), interface))
    if rank == 0:
        log.info("Horovod under torchrun: %d ranks, rendezvous at %s:%d", world_size, host, port)


def _serve_rendezvous(places: Sequence[Place]) -> tuple[Any, int]:
    from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
    from horovod.runner.http.http_server import RendezvousServer

    hosts = hosts_of(places)
    slots = [HostInfo(f"host{host}", hosts.count(host)) for host in sorted(set(hosts))]
    server = RendezvousServer()
    port = server.start()
    server.init(get_host_assignments(slots, len(places)))
    return server, port


def _interface_of(address: str) -> str | None:
    import psutil  # one of Horovod's own requirements

    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return name
    return None


# --- The optimizer -----------------------------------------------------------------------------------------------------

_optimizers = 0
_reducers: weakref.WeakValueDictionary[int, GradientReducer] = weakref.WeakValueDictionary()


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = _hvd.Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = _hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: Any = _hvd.global_process_set,
    *,
    model: torch.nn.Module | None = None,
    commit: str | None = None,
    config: Config | Mapping[str, object] | None = None,
) -> Any:
    """Horovod's function of that name, with gradients sent by priority over packed trees (or by Horovod, if faster).

    Parameters
    ----------
    optimizer, named_parameters, compression, backward_passes_per_step, op, gradient_predivide_factor, num_groups, groups, \
sparse_as_dense, process_set
        As Horovod's.  The order of `named_parameters` is taken as forward order: the first is the most urgent.
    model : overlap with the optimizer step and the next forward too
    commit : a commit policy (ADSP)
    config : settings by field name, or a `Config`

    Returns
    -------
    torch.optim.Optimizer
        An instance of the optimizer's own class that shares its groups and state.

    Raises
    ------
    ConfigError
        An argument is wrong; the message names it.
    UnsupportedModelError
        The optimizer can't be served (LBFGS).
    Mismatch
        Parameters differ between ranks.
    """
    global _optimizers
    settings = (
        config
        if isinstance(config, Config)
        else Config.load({**(config or {}), "commit": commit}, os.environ)
    )
    if not settings.enabled:
        return _plain_optimizer(
            optimizer, named_parameters, compression, backward_passes_per_step, op, gradient_predivide_factor,
            num_groups, groups, sparse_as_dense, process_set,
        )  # fmt: skip
    if not _hvd.is_initialized():
        raise ConfigError("Horovod isn't initialised; call hvd.init() before DistributedOptimizer")
    refuse_unsupported(optimizer)
    label = f"{type(optimizer).__name__} #{_optimizers}"
    _refuse_operation(op, gradient_predivide_factor, process_set, label)
    passes = checked_passes(backward_passes_per_step)
    named = named_in_order(optimizer, None if named_parameters is None else list(named_parameters), label)
    options = Options(
        compression=None if compression is _hvd.Compression.none else compression,
        elementwise=compression in (_hvd.Compression.none, _hvd.Compression.fp16),
        sparse_as_dense=sparse_as_dense,
        groups=_groups(groups, num_groups, [p for _, p in named if p.requires_grad], label),
    )
    number, _optimizers = _optimizers, _optimizers + 1
    if not process_set.included() or (_hvd.size() == 1 and not _elastic()):
        return distribute(optimizer, NoReducer(label, passes), _plain_optimizer.__module__)
    scale = float(gradient_predivide_factor)
    reduction = {"op": op, "prescale_factor": 1.0 / scale, "postscale_factor": scale}
    world = HorovodWorld(
        _hvd, process_set, settings, reduction, _surroundings(settings), _launcher_store(), _world_token
    )
    if settings.commit != "none":
        model = _model_for_commits(label, settings, model, passes)
        handle = world.train_by_commits(model, optimizer)
        return distribute(optimizer, NoReducer(label, passes, handle), _plain_optimizer.__module__)
    if settings.overlap == "forward" and model is None:
        raise ConfigError(
            f"optimizer {label}: overlap=forward needs the model; pass model= to DistributedOptimizer"
        )
    if model is not None and settings.overlap != "backward":
        _refuse_forward(label, op, options)
        order = agree_on_order(world, named, label)
        # Horovod's all-reduce can't be preempted: there the plain way is at least as fast, unless the user wants it.
        if (
            settings.overlap == "forward"
            or settings.schedule != "auto"
            or world.choose_trees(order.entries, label)
        ):
            exchange = world.open_exchange(order.entries, label)
            forward = ForwardReducer(
                label, order, model, optimizer, exchange, settings, passes, options.groups
            )
            step = forward_step(forward, optimizer)
            return distribute(optimizer, forward, _plain_optimizer.__module__, ForwardMethods, step)
    reducer = _reducers[number] = GradientReducer(label, named, world, passes, options)
    if not _elastic():  # there, other ranks may be in the midst of a step
        reducer.plan()
    return distribute(optimizer, reducer, _plain_optimizer.__module__)


def _model_for_commits(
    label: str, settings: Config, model: torch.nn.Module | None, passes: int
) -> torch.nn.Module:
    """The model; refuses what ``commit=`` can't do, by name."""
    if model is None:
        raise ConfigError(
            f"optimizer {label}: commit={settings.commit} needs the model; pass model= to DistributedOptimizer"
        )
    if passes != 1 or _elastic():
        what = (
            "an elastic job"
            if _elastic()
            else "backward_passes_per_step > 1 (accumulate gradients before step() yourself)"
        )
        raise ConfigError(f"optimizer {label}: commit={settings.commit} doesn't go with {what}")
    return model


def _refuse_forward(label: str, op: Any, options: Options) -> None:
    """What ``model=`` can't do, by name."""
    wrong = [
        (op != _hvd.Average, "op= other than hvd.Average"),
        (options.compression is not None, "compression="),
        (options.sparse_as_dense, "sparse_as_dense="),
        (_elastic(), "an elastic job"),
    ]
    for is_wrong, what in wrong:
        if is_wrong:
            raise ConfigError(
                f"optimizer {label}: model= (overlap with the next forward) doesn't go with {what}; leave one out"
            )


def _elastic() -> bool:
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def _world_token() -> object:
    """Another object after each ``init``: Horovod makes this table anew there, in elastic resets too."""
    return _ops._handle_map


def _launcher_store() -> LauncherStore | None:
    host = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    port = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT", "")
    return LauncherStore(host, int(port)) if host and port.isdigit() else None


def _surroundings(settings: Config) -> Surroundings:
    named = (
        settings.interface or os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("HOROVOD_GLOO_IFACE", "")
    )
    interfaces = tuple(name.strip() for name in named.split(",") if name.strip())
    host = os.environ.get("MASTER_ADDR") or os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    return Surroundings(interfaces, host, lab_pacing(os.environ))


def _refuse_operation(op: Any, predivide: float, process_set: Any, label: str) -> None:
    if op == _hvd.Adasum and _hvd.size() > 1:
        raise ConfigError(
            f"optimizer {label}: op=hvd.Adasum needs a Horovod with MPI and its own wrapper; use op=hvd.Average, or run with "
            "COMMHOOKS=0 and a Horovod built with MPI"
        )
    if not predivide > 0:
        raise ConfigError(
            f"optimizer {label}: gradient_predivide_factor={predivide!r}: expected a number above 0"
        )
    if predivide != 1.0 and op != _hvd.Average:
        raise ConfigError(
            f"optimizer {label}: gradient_predivide_factor={predivide!r} goes with op=hvd.Average only"
        )
    if process_set.process_set_id is None:
        raise ConfigError(
            f"optimizer {label}: the process set {process_set.ranks} isn't known to Horovod; "
            "pass it to hvd.init(process_sets=[…])"
        )


def _groups(
    groups: Any, num_groups: int, trainable: Sequence[torch.Tensor], label: str
) -> tuple[tuple[torch.Tensor, ...], ...]:
    """The parameters that travel together: as listed, or that many runs of nearly equal length."""
    if num_groups:
        warnings.warn("num_groups has been replaced by groups", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    if groups is None or (isinstance(groups, int) and groups == 0):
        return ()
    if isinstance(groups, int) and not isinstance(groups, bool) and groups > 0:
        size, longer = divmod(len(trainable), groups)
        starts = [i * size + min(i, longer) for i in range(groups + 1)]
        return tuple(tuple(trainable[a:b]) for a, b in zip(starts, starts[1:], strict=False) if a < b)
    if not isinstance(groups, (list, tuple)):
        raise ConfigError(
            f"optimizer {label}: groups={groups!r}: expected a number of groups, or a list of lists of tensors"
        )
    members = [p for group in groups for p in group]
    if any(not isinstance(p, torch.Tensor) for p in members):
        raise ConfigError(
            f"optimizer {label}: groups must consist of parameters (torch.Tensor), not names or modules"
        )
    if len({id(p) for p in members}) < len(members):
        raise ConfigError(
            f"optimizer {label}: a parameter is in more than one of groups; it can travel only once"
        )
    return tuple(tuple(group) for group in groups)


# --- Zero-code ---------------------------------------------------------------------------------------------------------


def install_for_run() -> None:
    """Put ours into ``horovod.torch``, for a script that doesn't know of us; harmless when called twice."""
    for function in (DistributedOptimizer, init, join, shutdown):
        setattr(_hvd, function.__name__, function)


__all__ = ["DistributedOptimizer", "init", "install_for_run", "join", "shutdown"]
