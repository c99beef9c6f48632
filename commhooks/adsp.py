"""ADSP on a DDP model: local steps by the user's own optimizer, commits instead of a gradient all-reduce.

Where in the flow: ``commhooks.register(ddp, optimizer, commit=...)`` -> **adsp** -> commit_worker and parameter_server.

Algorithm:
(1) DDP's all-reduce is switched off, as ``no_sync()`` does it, and by a hook that returns each bucket as it is;
(2) the user's optimizer steps on local gradients, untouched (local SGD);
(3) after each step the worker's policy decides; a commit sends ``U = W_now - W_base`` to the ranks that hold the shards;
(4) ``finish()``: last commits, then all ranks take the same final parameters.

Invariants: no rank waits for another, but where the policy says so (bsp, fixed, ssp, adacomm); the optimizer's state stays
local. DDP's other barriers are off (``broadcast_buffers``) or refused (``find_unused_parameters``). Buffers (BatchNorm's
statistics) stay local while training, since sums of changes could make a variance negative; ``finish`` gives all ranks
their mean.

Source: ADSP (Hu, Wang, Wu; AAAI 2020).
"""

# No postponed annotations: DDP checks the types of a hook's arguments.

import concurrent.futures
import logging
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commhooks.bootstrap import Rendezvous, group_rendezvous
from commhooks.commit_checkpoint import ShardFile
from commhooks.commit_messages import Stop, Tags, pack_control
from commhooks.commit_worker import CommitWorker, WorkerSettings
from commhooks.config import Config
from commhooks.core.commit.catalog import CommitOptions, check_rate, make_policy
from commhooks.core.commit.placement import CommitSlice, cut, place
from commhooks.core.slicing import P3_SLICE_NUMEL
from commhooks.core.topology import Topology
from commhooks.engine import Engine
from commhooks.errors import ConfigError, UnsupportedModelError
from commhooks.flat_parameters import FlatParameters, float_buffers, trainable
from commhooks.groups import surroundings
from commhooks.handle import Handle
from commhooks.messengers import EngineMessenger, Messenger
from commhooks.parameter_server import ParameterServer, ServerLayout, control_handler
from commhooks.planning import planner_for, read_topology

log = logging.getLogger(__name__)

REPORTS_PER_PERIOD = 16
"""How often per check period a worker reports losses and counters: two for each of the search's eight points."""


def register(
    ddp: DistributedDataParallel, optimizer: Any, config: Config, options: CommitOptions | None = None
) -> "CommitHandle":
    """What ``commhooks.register(ddp, optimizer, commit=...)`` calls.  Collective.

    Raises
    ------
    ConfigError
        No optimizer, ``overlap="forward"``, or a hook is registered already.
    UnsupportedModelError
        ``find_unused_parameters``, a sharding optimizer, parameters that can't be committed.
    """
    if config.overlap == "forward":
        raise ConfigError(
            f'commit="{config.commit}" and overlap="forward" exclude each other: with commits no gradient is '
            'reduced that a forward could overlap with; leave overlap at "auto"'
        )
    group = ddp.process_group
    rendezvous = group_rendezvous(group, config.timeout_s)
    everybody = frozenset(range(rendezvous.world_size))
    planner = planner_for(config, rendezvous.world_size)
    engine = Engine.start(rendezvous, config, planner, surroundings(config), extra_peers=everybody)
    return attach(ddp, optimizer, EngineMessenger(engine), rendezvous, config, options)


def attach(
    model: torch.nn.Module,
    optimizer: Any,
    messenger: Messenger,
    rendezvous: Rendezvous,
    config: Config,
    options: CommitOptions | None = None,
) -> "CommitHandle":
    """Train ``model`` by commits over ``messenger``.  Collective.

    Parameters
    ----------
    model : a DDP model without a hook, or a plain module (a late joiner can't build a DDP model alone)
    optimizer : its ``step`` is what counts as a step
    messenger, rendezvous : this rank's network and launcher
    config : ``commit``, ``check_period_s``, ``commit_rate``, ``commit_server``, ``commit_checkpoint``, ``topology`` …
    options : all settings of the policies, over those in ``config``
    """
    if optimizer is None:
        raise ConfigError(
            f'commit="{config.commit}" needs the optimizer: commhooks.register(ddp, optimizer, commit=…)'
        )
    _refuse(model, optimizer)
    module = model.module if isinstance(model, DistributedDataParallel) else model
    committer = Committer(module, messenger, rendezvous, config, options or options_of(config))
    if isinstance(model, DistributedDataParallel):
        _silence(model)
    committer.wire(optimizer)
    return CommitHandle(committer)


def rejoin(
    model: torch.nn.Module,
    optimizer: Any,
    messenger: Messenger,
    world_size: int,
    config: Config,
    incarnation: int,
    options: CommitOptions | None = None,
) -> "CommitHandle":
    """Take a lost worker's place while the others train on; not collective.

    The worker pulls the current model and goes on from there. Only for a rank that holds no shard
    (``commit_server="rank0"``), and for a plain module: building a DDP model needs all ranks.

    Parameters
    ----------
    incarnation : larger than in every earlier life of this rank; what an earlier life still sends is dropped
    """
    _refuse(model, optimizer)
    committer = Committer(
        model,
        messenger,
        _Late(messenger.rank, world_size),
        config,
        options or options_of(config),
        incarnation,
    )
    if messenger.rank in committer.layout.servers:
        raise ConfigError(
            f"rank {messenger.rank} held a part of the parameters, which died with it: restart the whole job "
            '(COMMHOOKS_COMMIT_CHECKPOINT), or train with commit_server="rank0"'
        )
    committer.wire(optimizer)
    return CommitHandle(committer)


class _Late:
    """The rendezvous of a worker that comes when all others have long met."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def exchange(self, name: str, value: Any) -> list[Any]:
        return [value] * self.world_size


def options_of(config: Config) -> CommitOptions:
    """The settings of the policies, from the knobs."""
    return CommitOptions(check_period_s=config.check_period_s, commit_rate=config.commit_rate)


def _refuse(model: torch.nn.Module, optimizer: Any) -> None:
    name = type(optimizer).__name__
    if name == "ZeroRedundancyOptimizer":
        raise UnsupportedModelError(
            f"{name} exchanges parameters at each step, which a commit policy must not wait for"
        )
    if not hasattr(optimizer, "register_step_post_hook"):
        raise UnsupportedModelError(
            f"{name} is not a torch.optim.Optimizer; pass the optimizer itself, not a wrapper"
        )
    if not isinstance(model, DistributedDataParallel):
        return
    if model.find_unused_parameters:
        raise UnsupportedModelError(
            "find_unused_parameters=True makes all ranks meet in every backward; build the model with "
            "find_unused_parameters=False: with commits, unused parameters are no problem"
        )
    if model._comm_hooks:
        hook = getattr(model._comm_hooks[0][0], "__qualname__", str(model._comm_hooks[0][0]))
        raise ConfigError(f"this DDP model already has the communication hook {hook}; DDP takes one for good")


def _silence(ddp: DistributedDataParallel) -> None:
    """No communication by DDP itself.

    As inside ``no_sync()``, DDP neither reduces nor, after the first step, meets the other ranks to rebuild its buckets;
    the hook is for those who switch synchronisation on again (Lightning and Accelerate do when accumulating).
    """
    ddp.register_comm_hook(None, local_hook)
    if not ddp.static_graph:  # PyTorch: "first backward inside no_sync()" fails an internal assertion there
        ddp.require_backward_grad_sync = False
    if ddp.broadcast_buffers and list(ddp.module.buffers()):
        ddp.broadcast_buffers = False
        log.info(
            "commhooks: broadcast_buffers is off (all ranks would meet in every forward); buffers stay local until finish()"
        )


def local_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Every rank keeps its own gradients."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class Committer:
    """One rank's worker and server, joined; the backend behind the handle.

    Parameters: as for `attach`.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        messenger: Messenger,
        rendezvous: Rendezvous,
        config: Config,
        options: CommitOptions,
        incarnation: int = 0,
    ) -> None:
        self._module = module
        self._messenger = messenger
        self._config = config
        self._losses_seen = False
        self._hooks: list[Any] = []
        self.policy = make_policy(config.commit, options)
        parameters = FlatParameters(trainable(module))
        _agree(rendezvous, parameters)
        slices = cut(parameters.numels, config.slice_numel or P3_SLICE_NUMEL)
        layout = ServerLayout(rendezvous.world_size, place(slices, bandwidths(config, rendezvous.world_size)))
        _check_rate(config, options, slices, layout)
        tags = Tags.of(_stream(messenger))
        checkpoint = _checkpoint(config, messenger.rank, slices, layout)
        values = _initial(parameters, slices, layout.held_by(messenger.rank), checkpoint)
        self.layout = layout
        self.server = ParameterServer(
            messenger, tags, layout, values, self.policy, options.check_period_s, checkpoint
        )
        settings = WorkerSettings(
            rank=messenger.rank,
            incarnation=incarnation,
            report_every_s=options.check_period_s / REPORTS_PER_PERIOD,
            timeout_s=config.timeout_s,
        )
        self.worker = CommitWorker(messenger, tags, layout, slices, parameters, self.policy.worker, settings)
        self._tags = tags
        messenger.on_message(tags.control, control_handler(self.server, self.worker.on_control))
        # All must listen before anyone says hello, and all must be members before the first commit counts one M-th.
        rendezvous.exchange("adsp listening", True)
        self.worker.join()
        rendezvous.exchange("adsp joined", True)
        if messenger.rank == 0:
            log.info(
                "commhooks: %s; shards on ranks %s, scheduler on rank %d",
                config.commit,
                layout.servers,
                layout.scheduler,
            )

    def wire(self, optimizer: Any) -> None:
        """From now on every ``optimizer.step()`` is followed by the worker's turn."""
        self._hooks.append(optimizer.register_step_post_hook(lambda *_: self.worker.after_step()))

    def flush(self) -> None:
        """Wait until no commit is under way."""
        self.worker.flush()

    def report_loss(self, loss: float) -> None:
        """Feed the rate search."""
        self.worker.report_loss(loss)

    def finish(self) -> None:
        """Last commits; all ranks end with the same parameters and the mean of their buffers."""
        buffers = FlatParameters(float_buffers(self._module))
        mean = self.worker.finish(buffers.read())
        if mean is not None:
            for piece in cut(buffers.numels, max(buffers.size, 1)):
                start, end = buffers.span(piece)
                buffers.write(piece, mean[start:end])
        for hook in self._hooks:
            hook.remove()

    def close(self) -> None:
        """Leave the network; the others see this rank as gone."""
        self._messenger.close()

    def stop_all(self, reason: str) -> None:
        """Tell all workers that training has reached its aim; their ``should_stop`` turns true."""
        for rank in range(self.layout.world_size):
            self._messenger.send(rank, self._tags.control, pack_control(Stop(reason)), key=(0, 0, 0))

    def on_server(self, function: Callable[[], Any]) -> Any:
        """Run ``function`` in the network thread and wait for its result."""
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._messenger.run_soon(lambda: done.set_result(function()))
        while True:
            try:
                return done.result(timeout=0.5)
            except concurrent.futures.TimeoutError:
                self._messenger.raise_if_failed()

    def stats(self) -> dict[str, Any]:
        """This rank's worker and shard, and (on the scheduler's rank) all workers and the search."""
        own = self.worker.stats()
        return {
            "enabled": True,
            "commit": self._config.commit,
            "worker": own,
            **self.on_server(self.server.stats),
        }


class CommitHandle(Handle):
    """The handle of a model trained by commits."""

    def __init__(self, committer: Committer) -> None:
        super().__init__(committer)
        self.committer = committer

    @property
    def should_stop(self) -> bool:
        """Whether some rank has called ``stop_all``."""
        return self.committer.worker.stop_reason is not None

    def stop_all(self, reason: str) -> None:
        """Tell all ranks to stop training; each sees it as ``should_stop`` and calls ``finish``."""
        self.committer.stop_all(reason)


def bandwidths(config: Config, world_size: int) -> tuple[float, ...]:
    """How much of the parameters each rank shall hold, in proportion."""
    if config.commit_server == "rank0":
        return (1.0,) + (0.0,) * (world_size - 1)
    if config.topology in ("uniform", "probe"):
        return (1.0,) * world_size
    return nic_rates(read_topology(config.topology, world_size))


def nic_rates(topology: Topology) -> tuple[float, ...]:
    """For each rank the rate of its best route, in bytes/s."""
    capacity = {r.name: r.bytes_per_s for r in topology.resources}
    best = [0.0] * topology.world_size
    for route in topology.routes:
        rate = min(capacity[name] for name in route.resources)
        best[route.src] = max(best[route.src], rate)
        best[route.dst] = max(best[route.dst], rate)
    return tuple(best)


def _check_rate(
    config: Config, options: CommitOptions, slices: Sequence[CommitSlice], layout: ServerLayout
) -> None:
    """Refuse a fixed rate that a described network can't carry: what a worker sends to others, over its own card."""
    if options.commit_rate is None or config.topology in ("uniform", "probe"):
        return
    rates = nic_rates(read_topology(config.topology, layout.world_size))
    total = sum(piece.numel for piece in slices)
    for rank, bytes_per_s in enumerate(rates):
        held = sum(slices[i].numel for i in layout.held_by(rank))
        check_rate(options.commit_rate, options.check_period_s, 4 * (total - held) / bytes_per_s)


def _agree(rendezvous: Rendezvous, parameters: FlatParameters) -> None:
    """All ranks train the same parameters, from the same values: each shard starts from its holder's."""
    own = {"numels": list(parameters.numels), "sum": zlib.crc32(parameters.read().tobytes())}
    offers = rendezvous.exchange("adsp parameters", own)
    for rank, offer in enumerate(offers):
        if offer["numels"] != offers[0]["numels"]:
            raise ConfigError(
                f"rank 0 trains {len(offers[0]['numels'])} parameters of {sum(offers[0]['numels'])} elements, rank {rank} "
                f"{len(offer['numels'])} of {sum(offer['numels'])}; models must be equal on all ranks"
            )
        if offer["sum"] != offers[0]["sum"]:
            raise ConfigError(
                f"rank 0 and rank {rank} start from different parameters; wrap the model in DistributedDataParallel, or seed "
                "all ranks alike"
            )


def _checkpoint(
    config: Config, rank: int, slices: Sequence[CommitSlice], layout: ServerLayout
) -> ShardFile | None:
    if config.commit_checkpoint is None:
        return None
    words = repr((layout.world_size, layout.holders, [(s.parameter, s.start, s.end) for s in slices]))
    return ShardFile(config.commit_checkpoint, rank, f"{zlib.crc32(words.encode()):08x}")


def _initial(
    parameters: FlatParameters,
    slices: Sequence[CommitSlice],
    held: Sequence[int],
    checkpoint: ShardFile | None,
) -> dict[int, np.ndarray]:
    saved = checkpoint.load() if checkpoint is not None and held else None
    if saved is not None and checkpoint is not None:
        log.info("commhooks: parameter-server shard taken from %s", checkpoint.path)
        return saved
    now = parameters.read()
    return {i: now[slice(*parameters.span(slices[i]))] for i in held}


def _stream(messenger: Messenger) -> int:
    """Counts the models on one messenger; all ranks register them in the same order."""
    count = int(getattr(messenger, "models", 0))
    messenger.models = count + 1  # type: ignore[attr-defined]
    return count
