"""One engine per process group and configuration, started at first use.

Where in the flow: register / all_reduce -> **groups** -> engine.

Invariants: starting is collective, so every rank must ask in the same order; two uses with equal settings share an engine.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Mapping

import torch.distributed as dist

from commhooks.bootstrap import group_rendezvous
from commhooks.config import Config
from commhooks.engine import Engine, Surroundings
from commhooks.errors import ConfigError
from commhooks.planning import Subgroup, planner_for
from commhooks.timeline import Recorder

_engines: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Config, Engine]] = weakref.WeakKeyDictionary()


def load_config(arguments: Mapping[str, object]) -> Config:
    """Settings of an entry point: arguments, then this process's environment, then defaults."""
    return Config.load(arguments, os.environ)


def surroundings(config: Config) -> Surroundings:
    """What the launcher left in the environment about the network."""
    named = config.interface or os.environ.get("GLOO_SOCKET_IFNAME", "")
    interfaces = tuple(name.strip() for name in named.split(",") if name.strip())
    return Surroundings(interfaces, os.environ.get("MASTER_ADDR"), lab_pacing(os.environ))


def lab_pacing(environ: Mapping[str, str]) -> dict[int, float]:
    """What a lab without a network of its own wants kept to, in payload bytes/s per peer; usually nothing."""
    fields = json.loads(environ.get("COMMHOOKS_LAB_PACING", "{}"))
    return {int(peer): float(rate) for peer, rate in fields.get("pacing_bytes_per_s", {}).items()}


def engine_for(group: dist.ProcessGroup | None, config: Config) -> Engine:
    """The engine of a group (collective at first use).

    Raises
    ------
    ConfigError
        No process group, or this process is not in it.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "no process group: call torch.distributed.init_process_group(...) first, and start the script with a launcher "
            "such as `torchrun --nproc-per-node 4 train.py`"
        )
    key = group if group is not None else dist.distributed_c10d._get_default_group()
    engines = _engines.setdefault(key, {})
    engine = engines.get(config)
    if engine is None or engine.closed:
        rendezvous = group_rendezvous(key, config.timeout_s)
        ranks, total = dist.get_process_group_ranks(key), dist.get_world_size()
        subgroup = Subgroup(ranks, total) if len(ranks) < total else None
        planner = planner_for(config, rendezvous.world_size, os.environ.get("XDG_CACHE_HOME"), subgroup)
        timeline = Recorder(config.timeline, dist.get_rank()) if config.timeline else None
        engine = engines[config] = Engine.start(rendezvous, config, planner, surroundings(config), timeline)
        # An engine outlives its users (its thread holds it), but not its group.
        weakref.finalize(key, engine.close, wait=False).atexit = False
    return engine
