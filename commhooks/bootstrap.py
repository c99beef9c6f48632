"""How ranks find each other before there is a link: all-gathers of JSON through the launcher's own store.

Where in the flow: register -> **bootstrap** -> mesh.  The store (torch.distributed's TCPStore, Horovod's rendezvous) belongs to
the launcher and is trusted with the job's secret; nothing read from it is unpickled.

Invariants: every rank calls `exchange` with the same names in the same order; a rank that doesn't come is named.
"""

from __future__ import annotations

import datetime
import json
from typing import Any, Protocol

import torch.distributed as dist

from commhooks.errors import CommTimeout, ConfigError

Json = Any


class Rendezvous(Protocol):
    """The few things that starting needs of a launcher."""

    rank: int
    world_size: int

    def exchange(self, name: str, value: Json) -> list[Json]:
        """Give `value`, get every rank's, in rank order.  Blocks until all have called it with this `name`."""


class StoreRendezvous:
    """Rendezvous over a `torch.distributed` store.

    Parameters
    ----------
    store : any c10d store that all ranks share
    prefix : a name that no other rendezvous on this store uses
    timeout_s : how long to wait for a rank
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, prefix: str, timeout_s: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = dist.PrefixStore(prefix, store)
        self._timeout_s = timeout_s
        self._turn = 0

    def exchange(self, name: str, value: Json) -> list[Json]:
        self._turn += 1
        key = f"{self._turn}/{name}"
        self._store.set(f"{key}/{self.rank}", json.dumps(value))
        keys = [f"{key}/{rank}" for rank in range(self.world_size)]
        try:
            self._store.wait(keys, datetime.timedelta(seconds=self._timeout_s))
        except (RuntimeError, dist.DistStoreError) as error:
            missing = [rank for rank, k in enumerate(keys) if not self._store.check([k])]
            raise CommTimeout(
                f"start-up exchange {name!r}: nothing from ranks {missing} within {self._timeout_s:g} s; "
                "every rank must make the same commhooks calls in the same order, with COMMHOOKS=0 on all or none"
            ) from error
        return [json.loads(self._store.get(k)) for k in keys]


_counters: dict[str, int] = {}


def group_rendezvous(group: dist.ProcessGroup | None, timeout_s: float) -> StoreRendezvous:
    """A fresh rendezvous among the ranks of a process group (collective: all of them call it).

    Raises
    ------
    ConfigError
        No process group is initialised, or this process isn't in the group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "no process group: call torch.distributed.init_process_group(...) first, and start the script with a launcher "
            "such as `torchrun --nproc-per-node 4 train.py`"
        )
    group = group if group is not None else dist.group.WORLD
    rank = dist.get_rank(group)
    if rank < 0:
        raise ConfigError("this process is not a member of the process group it was given")
    ranks = dist.get_process_group_ranks(group)
    # The name must be equal on the group's ranks and differ between groups and between calls.
    members = "-".join(map(str, ranks))
    count = _counters[members] = _counters.get(members, 0) + 1
    store = (
        dist.distributed_c10d._get_default_store()
    )  # the launcher's store; torch has no public name for it
    return StoreRendezvous(store, rank, len(ranks), f"commhooks/{members}/{count}", timeout_s)
