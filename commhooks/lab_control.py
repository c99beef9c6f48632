"""Rates that change while a lab runs: by time, and on demand of a process inside it.

Where in the flow: lab and its ranks -> **lab_control** -> lab_namespaces (``tc``).

Invariants: a request is one message and one answer; a bad one is answered with the error's words and changes nothing; the
socket is a path, because paths are seen from every network namespace and ports aren't.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from commhooks.core.topology import Resource
from commhooks.errors import CommhooksError, ConfigError, TopologyError
from commhooks.lab_network import Network


@dataclass(frozen=True)
class Change:
    """A rate that changes while the ranks run."""

    after_s: float
    resource: str
    mbit_per_s: float


def parse_change(text: str) -> Change:
    """``T:resource=RATE``: after T seconds a resource has another rate in Mbit/s.

    Raises
    ------
    ConfigError
        For anything else.
    """
    after, _, rest = text.partition(":")
    resource, _, rate = rest.rpartition("=")
    try:
        change = Change(float(after), resource.strip(), float(rate))
    except ValueError:
        change = Change(-1.0, "", 0.0)
    if change.after_s < 0 or not change.resource or not change.mbit_per_s > 0:
        raise ConfigError(
            f"--change {text!r}: expected SECONDS:RESOURCE=MBIT, as in '20:site0->site1=100', '20:wan=100', '5:rank2.*=50'"
        )
    return change


def resources_named(network: Network, pattern: str) -> list[Resource]:
    """The limited resources that a name, a pattern or ``wan`` means.

    Raises
    ------
    TopologyError
        None is; the message lists those that there are.
    """
    limited = network.buckets()
    names = [
        name
        for name in limited
        if name == pattern or fnmatchcase(name, pattern) or (pattern == "wan" and name in network.wires)
    ]
    if not names:
        raise TopologyError(
            f"no resource of the lab is called {pattern!r}; there are {', '.join(sorted(limited))}"
            + (" (wan: all shared cuts)" if network.wires else "")
        )
    return [resource for resource in network.topology.resources if resource.name in names]


class Control:
    """A socket at which any process of the lab may ask for another rate (paths are seen from every namespace)."""

    def __init__(self, path: Path, set_rate: Callable[[str, float], list[str]]) -> None:
        self.path = path
        self._set_rate = set_rate
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(str(self.path))
        self._socket.listen(16)
        self.descriptor = self._socket.fileno()

    def answer(self) -> None:
        """Serve one request: ``[resource, rate]`` as JSON, answered by the list of names or by an error's words."""
        connection, _ = self._socket.accept()
        with connection:
            connection.settimeout(1.0)
            try:
                resource, rate = json.loads(connection.recv(4096))
                reply: Any = self._set_rate(str(resource), float(rate))
            except (CommhooksError, ValueError, TypeError, OSError) as error:
                reply = f"{type(error).__name__}: {error}"
            with suppress(OSError):  # who asked has gone
                connection.send(json.dumps(reply).encode())

    def close(self) -> None:
        """Nothing can be asked any more."""
        self._socket.close()


def ask(path: str, resource: str, rate_mbit_per_s: float) -> list[str]:
    """Ask the lab behind a socket for another rate; the names of the resources that were changed.

    Raises
    ------
    ConfigError
        The lab refuses; the message has its words.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.settimeout(30.0)
        asking.connect(path)
        asking.send(json.dumps([resource, rate_mbit_per_s]).encode())
        reply = json.loads(asking.recv(1 << 16))
    if isinstance(reply, str):
        raise ConfigError(f"the lab refused {resource}={rate_mbit_per_s:g}: {reply}")
    return list(reply)
