"""``overlap="forward"``: the step and the next forward start layer by layer while other gradients are still under way.

Where in the flow: DDP hook -> deferred_flow -> **deferred** -> the user's optimizer, just before a parameter's next read.

Algorithm, per training step:
(1) DDP's hook copies each bucket, starts its slices and returns a completed Future: ``backward()`` waits for no network;
(2) ``optimizer.step()`` records the hyper-parameters, closes the gates of its parameters, and returns;
(3) a watch on every torch call sees the first read of each parameter; before it, the read waits for that parameter's
    slices, and the optimizer's own ``step`` runs on it (and on others that are complete);
(4) before the next backward, and wherever everything must be finished (``flush``, checkpoints, the end), the rest follows.
Between (1) and (2) ``.grad`` is local; whoever reads or edits a gradient there (clipping, a GradScaler, logging) first gets the
averages, and that step doesn't overlap.

Invariants: no read sees an old value; a parameter is stepped once per call of ``step``, with that call's settings and
the average over all ranks; what can't be honoured raises, and names what to do.

Source: P3 (Jayarajan et al., MLSys 2019), section 4; ByteScheduler (Peng et al., SOSP 2019) for crossing the barrier.
"""

# No postponed annotations here: DDP checks the types of a hook's arguments.

import atexit
import logging
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commhooks.bootstrap import group_rendezvous
from commhooks.config import Config
from commhooks.core.choice import Way
from commhooks.core.overlap_trial import OverlapTrial
from commhooks.deferred_optimizer import unwrapped
from commhooks.deferred_steps import EXIT_LIMIT_S, DeferredSteps, live
from commhooks.engine import Engine
from commhooks.engine_exchange import EngineExchange
from commhooks.errors import CommError, ConfigError, UnsupportedModelError
from commhooks.exchanges import SliceExchange
from commhooks.groups import engine_for
from commhooks.handle import Handle
from commhooks.native import NativeExchange

log = logging.getLogger(__name__)


def register(ddp: DistributedDataParallel, optimizer: Any, config: Config) -> Handle:
    """What `commhooks.register(ddp, optimizer)` calls: deferred steps over the engine, or over the group's own all-reduce.

    Collective.  Parameters and errors as in `attach`.
    """
    if optimizer is None:
        raise ConfigError('overlap="forward" needs the optimizer: commhooks.register(ddp, optimizer)')
    group = ddp.process_group
    exchange: SliceExchange
    trial = None
    rendezvous = group_rendezvous(group, config.timeout_s)
    if config.schedule == "native":
        exchange = NativeExchange(group, rendezvous, config.slice_numel, config.priority, config.timeout_s)
    else:
        engine = engine_for(group, config)
        exchange = EngineExchange(engine, rendezvous, config.timeout_s)
        # Where trees are bound to win there is nothing to try; nor where the user has said what to do.
        if config.overlap == config.schedule == "auto" and not trees_surely_win(engine):
            trial = OverlapTrial()
    return Handle(attach(ddp, optimizer, exchange, config, trial))


def trees_surely_win(engine: Engine) -> bool:
    """Whether the plan's rate is far above the native collective's on a network whose rates are known."""
    choice = engine.predicted_choice()
    return choice is not None and choice.way is Way.TREES and not engine.one_host and engine.world_size > 1


def attach(
    ddp: DistributedDataParallel,
    optimizer: Any,
    exchange: SliceExchange,
    config: Config,
    trial: OverlapTrial | None = None,
) -> DeferredSteps:
    """Let steps of `optimizer` and the next forward overlap with communication.

    Parameters
    ----------
    ddp : the wrapped model, without a communication hook
    optimizer : one optimizer, or several, that hold parameters of this model only
    exchange : averages slices; this model's own
    config : ``priority`` is read; must be equal on all ranks
    trial : times steps with overlap and without, and decides; None: overlap

    Raises
    ------
    UnsupportedModelError
        A model or optimizer that can't be served; the message names the supported way.
    ConfigError
        A communication hook is registered already.
    """
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    _refuse_model(ddp)
    steps = DeferredSteps(ddp, [unwrapped(one) for one in optimizers], exchange, config, trial)
    ddp.register_comm_hook(steps, _hook)
    steps.wire()
    register_exit()
    return steps


def _hook(state: DeferredSteps, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.on_bucket(bucket)


def _refuse_model(ddp: Any) -> None:
    if not isinstance(ddp, DistributedDataParallel):
        raise UnsupportedModelError(
            f"{type(ddp).__name__} is not a DistributedDataParallel model; wrap the model first, and register what "
            "DistributedDataParallel(model) returned (under torch.compile: before compiling)"
        )
    if ddp._comm_hooks:
        name = getattr(ddp._comm_hooks[0][0], "__qualname__", str(ddp._comm_hooks[0][0]))
        raise ConfigError(
            f"this DDP model already has the communication hook {name}; DDP takes one for good. Make a new "
            "DistributedDataParallel, or register commhooks first"
        )
    if getattr(ddp, "mixed_precision", None) is not None:
        raise UnsupportedModelError(
            'DDP(mixed_precision=…) casts parameters itself; use torch.autocast instead, or overlap="backward"'
        )


# --- the end of the process ------------------------------------------------------------------------------------------------

_exit_registered = False


def register_exit() -> None:
    """Once per process: let deferred steps go at its end."""
    global _exit_registered
    if not _exit_registered:
        _exit_registered = True
        atexit.register(_close_all)


def _close_all() -> None:
    """Peers may still need our part of the last slices; waits a bounded time, raises nothing."""
    for steps in list(live):
        try:
            steps.let_go(EXIT_LIMIT_S)
        except CommError as error:
            log.warning("commhooks: at exit: %s", error)
