"""Remember what a cluster was measured as, by its fingerprint.

Where in the flow: probing (rank 0) -> **cache** -> a file per cluster in the user's cache folder.

The fingerprint is made of every rank's host name, addresses and hardware addresses, so that another card, another host or
another number of ranks is another cluster.  `commhooks probe` always measures, and replaces what is remembered.

Invariants: a file is whole or not there (written beside its place and moved); an unreadable one is measured again, never
an error.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import socket
import struct
import tempfile
import time
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

KEEP_S = 7 * 86_400.0  # networks change; a week-old measurement is made again
MOST_FILES = 64
_SIOCGIFADDR, _SIOCGIFHWADDR = 0x8915, 0x8927


def folder(cache_home: str | None) -> Path:
    """Where the files are.

    Parameters
    ----------
    cache_home : ``XDG_CACHE_HOME``, or None for ``~/.cache``
    """
    return Path(cache_home or os.path.expanduser("~/.cache")) / "commhooks" / "topologies"


def hardware_address(address: str) -> str:
    """The hardware address of the interface that has an IPv4 address; empty where it can't be found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                if socket.inet_ntoa(fcntl.ioctl(sock, _SIOCGIFADDR, request)[20:24]) == address:
                    return fcntl.ioctl(sock, _SIOCGIFHWADDR, request)[18:24].hex(":")
    return ""


def fingerprint(ranks: list[Any]) -> str:
    """One word for what every rank says of itself (JSON values, in rank order)."""
    return hashlib.sha256(json.dumps(ranks, sort_keys=True).encode()).hexdigest()[:32]


def load(where: Path, name: str) -> dict[str, Any] | None:
    """What was stored under a fingerprint; None when there is nothing, or nothing fresh and whole."""
    path = where / f"{name}.json"
    try:
        if time.time() - path.stat().st_mtime > KEEP_S:
            return None
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("the cached topology %s can't be read (%s); measuring again", path, error)
        return None
    return found if isinstance(found, dict) else None


def store(where: Path, name: str, content: dict[str, Any]) -> None:
    """Remember; a folder that can't be written is logged, and nothing else happens."""
    try:
        where.mkdir(parents=True, exist_ok=True)
        write_whole(where / f"{name}.json", json.dumps(content).encode())
        newest_first = sorted(where.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in newest_first[MOST_FILES:]:
            path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("the measured topology can't be cached in %s: %s", where, error)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is whole or, whatever interrupts, not there (or what it was before).

    Raises
    ------
    OSError
        It can't be written.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)  # as an ordinary file; mkstemp's are private
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
