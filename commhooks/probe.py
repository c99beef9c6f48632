"""``commhooks probe``: under a launcher, measure the cluster; print what it is; write a topology file.

Where in the flow: torchrun, the lab or horovodrun starts one per rank -> **here** -> probing -> report, file, cache.

Invariants: rank 0 prints and writes; files are whole or not there; every rank ends with the same exit code.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
from collections.abc import Iterator
from pathlib import Path

from commhooks import probe_cache, probe_report
from commhooks.bootstrap import Rendezvous, StoreRendezvous
from commhooks.config import Config
from commhooks.core.topology import Topology
from commhooks.errors import ConfigError
from commhooks.hosts import interface_address, route_address
from commhooks.planning import read_topology
from commhooks.probing import Probe, probe

_HOW = (
    "start it with a launcher: torchrun --nproc-per-node 1 --nnodes 4 … -m commhooks probe, horovodrun -np 4 commhooks probe, "
    "or commhooks lab nic:200,800 -- commhooks probe"
)
_START_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="write the topology there (COMMHOOKS_TOPOLOGY=FILE uses it)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the matrix into a PNG")


def main(namespace: argparse.Namespace) -> int:
    """Measure; print and write on rank 0."""
    config = Config.load({}, os.environ)
    for path in (namespace.output, namespace.plot):
        _check_folder(path)
    with _launcher(config) as rendezvous:
        declared = _declared(config, rendezvous.world_size)
        cache = probe_cache.folder(os.environ.get("XDG_CACHE_HOME"))
        found = probe(rendezvous, config, _addresses(config), cache, reuse=False)
        if rendezvous.rank == 0:
            _hand_out(namespace, found, declared)
    return 0


def _check_folder(path: Path | None) -> None:
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigError(
            f"{path}: there is no folder {path.absolute().parent}; make it first, nothing was measured"
        )


def _hand_out(namespace: argparse.Namespace, found: Probe, declared: Topology | None) -> None:
    picture = probe_report.png(found) if namespace.plot is not None else b""
    if namespace.output is not None:
        content = json.dumps(found.topology.to_json(), indent=1) + "\n"
        probe_cache.write_whole(namespace.output, content.encode())
    if namespace.plot is not None:
        probe_cache.write_whole(namespace.plot, picture)
    if namespace.json:
        print(json.dumps(probe_report.as_json(found, declared)))
    else:
        print(probe_report.text(found, declared))


def _declared(config: Config, world_size: int) -> Topology | None:
    """What the settings say of the network, to be shown beside."""
    return None if config.topology in ("uniform", "probe") else read_topology(config.topology, world_size)


def _addresses(config: Config) -> list[str]:
    named = (
        config.interface or os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("HOROVOD_GLOO_IFACE", "")
    )
    interfaces = [name.strip() for name in named.split(",") if name.strip()]
    host = os.environ.get("MASTER_ADDR") or os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    return [interface_address(name) for name in interfaces] or [route_address(host)]


@contextlib.contextmanager
def _launcher(config: Config) -> Iterator[Rendezvous]:
    """The rendezvous of whichever launcher started this process."""
    if all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        yield _from_torchrun(config)
    elif any(name in os.environ for name in ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")):
        import commhooks.horovod as hvd

        hvd.init()
        try:
            yield hvd.HorovodRendezvous(hvd, hvd.global_process_set)
        finally:
            hvd.shutdown()
    else:
        raise ConfigError(
            f"no launcher started this process (RANK, WORLD_SIZE and MASTER_ADDR aren't set); {_HOW}"
        )


def _from_torchrun(config: Config) -> Rendezvous:
    import torch.distributed as dist

    timeout_s = min(config.timeout_s, _START_S)
    try:
        store, rank, world_size = next(
            iter(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=timeout_s)))
        )
    except (RuntimeError, ValueError, dist.DistStoreError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise ConfigError(f"the launcher's store at {where} can't be reached: {error}") from error
    return StoreRendezvous(store, rank, world_size, "commhooks/probe", timeout_s)
