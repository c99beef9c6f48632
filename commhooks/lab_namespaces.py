"""A lab's network namespaces: made, changed, entered, removed, and swept up after labs that were killed.

Where in the flow: lab_network (which commands) -> **lab_namespaces** -> `ip` and `tc` through shell.

Invariants: a namespace's name holds the id and the start time of the process that made it, so that a later lab can tell a
dead lab's from a running one's; everything a lab makes is inside its own namespaces, so removing these removes all of it;
removing twice, or two labs sweeping at once, is fine.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from commhooks import shell
from commhooks.core.topology import Resource
from commhooks.errors import CommhooksError, ConfigError
from commhooks.lab_network import Network, commands, limit

_FOLDER = Path("/run/netns")  # where `ip netns` keeps the names
_NAME = re.compile(r"commhooks-lab-(\d+)-(\d+)-\d+(?:-.*)?")
_serial = itertools.count()

# `ip netns exec` has made a mount namespace, and `unshare --uts` one of host names, so neither change is seen outside.
_ENTER = """
echo "$1" > /proc/sys/kernel/hostname
if [ -e /etc/hosts ]; then mount --bind "$2" /etc/hosts; fi
shift 2
exec "$@"
"""


def folders() -> list[Path]:
    """Where a lab's folder may be: the path of a socket in it may have 107 bytes at most, and TMPDIR may be longer."""
    return list(dict.fromkeys([Path(tempfile.gettempdir()), Path("/tmp")]))


def folder_for(name: str) -> Path:
    """The folder of the lab with this name."""
    longest = 107 - len("/control")
    return next((f / name for f in folders() if len(str(f / name)) <= longest), folders()[-1] / name)


def unique_name() -> str:
    """A name for a lab that no other process, before or after, gives."""
    pid = os.getpid()
    return f"commhooks-lab-{pid}-{shell.start_time(pid)}-{next(_serial)}"


class Namespaces:
    """The namespaces of one lab.

    Parameters
    ----------
    network
        What to make.
    name
        From ``unique_name``.
    """

    def __init__(self, network: Network, name: str) -> None:
        self.network = network
        self.names: dict[int | None, str] = {None: f"{name}-core"}
        self.names |= {rank: f"{name}-r{rank}" for rank in range(network.topology.world_size)}

    def make(self) -> None:
        """Make everything; blocks for some tenths of a second.  Whatever goes wrong, call ``remove``.

        Raises
        ------
        MissingDependency
            `ip` or `tc` isn't installed.
        CommhooksError
            The kernel refuses something; the message has its words.
        """
        for program in ("ip", "tc", "unshare"):
            shell.find(program)
        made = commands(self.network, self.names)
        _feed(["ip", "-batch", "-"], made.outside)
        for key, lines in made.sysctl.items():
            _set_sysctls(self.names[key], lines)
        for key, lines in made.ip.items():
            _feed(["ip", "-n", self.names[key], "-batch", "-"], lines)
        for key, lines in made.tc.items():
            _feed(["tc", "-n", self.names[key], "-batch", "-"], lines)

    def set_rate(self, resource: Resource, rate_mbit_per_s: float) -> None:
        """Change a resource's rate while traffic flows.

        Raises
        ------
        ConfigError
            For a rate that isn't above 0.
        """
        if not rate_mbit_per_s > 0:
            raise ConfigError(f"rate {rate_mbit_per_s:g} Mbit/s for {resource.name}; expected one above 0")
        bucket = self.network.buckets()[resource.name]
        line = limit(bucket.device, rate_mbit_per_s, "change")
        _feed(["tc", "-n", self.names[bucket.rank], "-batch", "-"], [line])

    def entering(self, rank: int, hosts_file: Path) -> list[str]:
        """The words to put before a command so that it runs on a rank's emulated host.

        Besides the network it gets a host name, and an ``/etc/hosts`` in which that name is its own address: programs look
        their own name up to learn where they can be reached (`hosts_file` holds ``hosts_text``).
        """
        inside = [f"host{rank}", str(hosts_file)]
        return [
            "ip",
            "netns",
            "exec",
            self.names[rank],
            "unshare",
            "--uts",
            "sh",
            "-ec",
            _ENTER,
            "sh",
            *inside,
        ]

    def hosts_text(self) -> str:
        """The content of ``/etc/hosts`` on all emulated hosts."""
        ranks = range(self.network.topology.world_size)
        # The second form is how an address looks to a socket that also speaks IPv6.
        forms = ("", "::ffff:")
        lines = [f"{form}{self.network.fastest(rank).address} host{rank}" for form in forms for rank in ranks]
        return "\n".join(["127.0.0.1 localhost", *lines]) + "\n"

    def remove(self) -> None:
        """Kill what still runs inside and remove the namespaces, and with them all that is in them."""
        for name in self.names.values():
            remove_namespace(name)


def _feed(command: list[str], lines: list[str]) -> None:
    if lines:
        shell.run(command, stdin="\n".join(lines) + "\n")


def _set_sysctls(namespace: str, settings: list[str]) -> None:
    # The files under /proc/sys/net show the namespace of the process that opens them, so a process in there must do it.
    lines = [_set_sysctl(*setting.split("=")) for setting in settings]
    shell.run(["ip", "netns", "exec", namespace, "sh", "-e"], stdin="\n".join(lines) + "\n")


def _set_sysctl(name: str, value: str) -> str:
    line = f"echo {value} > /proc/sys/{name}"
    optional = name.startswith("net/bridge/")  # a module that needn't be there
    return f"if [ -e /proc/sys/{name} ]; then {line}; fi" if optional else line


def remove_namespace(name: str) -> None:
    """Kill every process in a namespace (it is the lab's, so they are), then remove it; no error when it is gone."""
    if not (_FOLDER / name).exists():
        return
    for _ in range(20):  # a process may start another one between the listing and the kill
        pids = [int(pid) for pid in shell.run(["ip", "netns", "pids", name], check=False).stdout.split()]
        if not pids:
            break
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    shell.run(["ip", "netns", "del", name], check=False)


def stale() -> Iterator[str]:
    """Names of namespaces and folders whose lab's process doesn't run any more."""
    for folder in (_FOLDER, *folders()):
        with suppress(FileNotFoundError):
            for path in sorted(folder.glob("commhooks-lab-*")):
                match = _NAME.fullmatch(path.name)
                if match and shell.start_time(int(match[1])) != int(match[2]):
                    yield str(path)


def sweep() -> list[str]:
    """Remove what killed labs left behind; returns what was removed."""
    removed = []
    for path in stale():
        with suppress(CommhooksError, OSError):
            if Path(path).parent == _FOLDER:
                remove_namespace(Path(path).name)
            else:
                shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed
