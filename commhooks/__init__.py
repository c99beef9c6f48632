"""commhooks: DDP communication hooks and a Horovod optimizer wrapper for imperfect networks.

``commhooks.register(ddp_model)`` is the one line; see README.  Importing this package loads nothing else and does nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "register": "commhooks.ddp",
    "CommHookState": "commhooks.ddp",
    "allreduce_hook": "commhooks.ddp",
    "compose": "commhooks.ddp",
    "all_reduce": "commhooks.collectives",
    "broadcast": "commhooks.collectives",
    "reduce": "commhooks.collectives",
    "gather": "commhooks.collectives",
    "all_gather": "commhooks.collectives",
    "reduce_scatter": "commhooks.collectives",
    "Config": "commhooks.config",
    "CommhooksError": "commhooks.errors",
    "ConfigError": "commhooks.errors",
    "UnsupportedModelError": "commhooks.errors",
    "TopologyError": "commhooks.errors",
    "MissingDependency": "commhooks.errors",
    "CommError": "commhooks.errors",
    "PeerLost": "commhooks.errors",
    "CommTimeout": "commhooks.errors",
    "Mismatch": "commhooks.errors",
    "RemoteError": "commhooks.errors",
    "InternalError": "commhooks.errors",
}

__all__ = [*_HOMES, "__version__"]

if TYPE_CHECKING:
    from commhooks.collectives import all_gather, all_reduce, broadcast, gather, reduce, reduce_scatter
    from commhooks.config import Config
    from commhooks.ddp import CommHookState, allreduce_hook, compose, register
    from commhooks.errors import (
        CommError,
        CommhooksError,
        CommTimeout,
        ConfigError,
        InternalError,
        Mismatch,
        MissingDependency,
        PeerLost,
        RemoteError,
        TopologyError,
        UnsupportedModelError,
    )


def __getattr__(name: str) -> Any:
    """Load what is asked for, when it is asked for (PEP 562)."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'commhooks' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
