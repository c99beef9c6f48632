"""The ranks of a bench: joined when a launcher (torchrun, the lab) started this process, else started here on loopback.

Where in the flow: ``bench …`` commands -> **launch** -> the same command once per rank.

Invariants: rank 0's standard output is the command's; ranks started here are gone when the command ends, however it ends.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from commhooks.config import Config
from commhooks.errors import ConfigError
from commhooks.lab_environment import Place, variables
from commhooks.lab_ranks import Interrupted, RankCommand, Ranks, signals_interrupt, write_stderr


def launched() -> bool:
    """Whether a launcher started this process as one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank() -> int:
    """This process's rank, as its launcher says."""
    return int(os.environ.get("RANK", 0))


def settings() -> Config:
    """The settings of this process's environment."""
    return Config.load({}, os.environ)


def default_variable(name: str, value: str) -> None:
    """Set an environment variable of this process for a library that reads it later, unless the user has set it."""
    os.environ.setdefault(name, value)


def start_local(ranks: int, arguments: Sequence[str], grace_s: float = 30.0) -> int:
    """Run ``commhooks ARGUMENTS`` once per rank on this host; the exit code of the rank that failed first.

    Raises
    ------
    ConfigError
        Fewer than 1 rank.
    """
    if ranks < 1:
        raise ConfigError(f"{ranks} ranks; expected at least 1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    argv = (sys.executable, "-m", "commhooks", *arguments)
    commands = [RankCommand(argv, _variables(Place.local(number, ranks, port))) for number in range(ranks)]
    sys.stdout.flush()
    running = Ranks(commands, write_stderr, None, grace_s)
    with signals_interrupt():
        try:
            return running.run()
        except Interrupted as interrupt:
            return 128 + interrupt.number


def _variables(place: Place) -> dict[str, str]:
    return variables(place, None, os.environ)


@contextmanager
def process_group() -> Iterator[None]:
    """The default process group over Gloo, from the launcher's variables; destroyed at the end."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def forked_rank(rank: int, ranks: int, store_path: str) -> Iterator[None]:
    """In a process that was forked here: one rank of a process group over Gloo on loopback, without any launcher.

    Parameters
    ----------
    rank, ranks
        Its number, and how many there are.
    store_path
        A file that all of them use and that doesn't exist before (a store in a file outlives any rank).
    """
    os.environ.update(_variables(Place.local(rank, ranks, 0)))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store_path, ranks), rank=rank, world_size=ranks)
    yield
