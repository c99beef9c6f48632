"""Whoever connects to a link's port without being one of the job's ranks neither disturbs nor delays a run, and is counted.

Two ranks train; the third, no member of their group, is the stranger.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
from collections.abc import Callable

import harness
import pytest
import torch
import torch.distributed as dist

import commhooks
from commhooks.links.admission import Claim, Connecting
from commhooks.links.frames import HEADER_BYTES, Kind, control, pack

STRANGER = 2
GREETING_BYTES = 8 + 2 + 32

Address = tuple[str, int]


def _connect(address: Address) -> socket.socket:
    sock = socket.create_connection(address, timeout=30)
    sock.settimeout(30)
    return sock


def _read(sock: socket.socket, nbytes: int) -> bytes:
    parts = b""
    while len(parts) < nbytes and (part := sock.recv(nbytes - len(parts))):
        parts += part
    return parts


def _is_dropped(sock: socket.socket) -> None:
    """The other side closes; whatever it still says is its greeting."""
    with contextlib.suppress(ConnectionError):
        while sock.recv(4096):
            pass


# --- kinds of strangers: each returns how many connections must have been refused by then ---------------------------------


def random_bytes(address: Address) -> int:
    for size in (1, 3000, 100_000):
        sock = _connect(address)
        with contextlib.suppress(ConnectionError):
            sock.sendall(os.urandom(max(size, 200)))
        _is_dropped(sock)
    return 3


def old_version(address: Address) -> int:
    sock = _connect(address)
    greeting = _read(sock, GREETING_BYTES)
    claim = Claim(0, 1, 0)
    side = Connecting(b"whatever", secrets.token_bytes(32), claim)
    hello = bytearray(side.receive(greeting))
    hello[8:10] = struct.pack("<H", 0)
    sock.sendall(hello)
    _is_dropped(sock)
    return 1


def wrong_secret(address: Address) -> int:
    for claimed in (0, 1, 77):
        sock = _connect(address)
        side = Connecting(secrets.token_bytes(32), secrets.token_bytes(32), Claim(claimed, 1, 0))
        sock.sendall(side.receive(_read(sock, GREETING_BYTES)))
        _is_dropped(sock)
    return 3


def frames_without_admission(address: Address) -> int:
    """Someone who knows the frames but not the secret: an abort, and a slice of a gigabyte."""
    for frame in (pack(control(Kind.ABORT, 2)) + b"{}", pack(control(Kind.BROADCAST, 1 << 30)) + bytes(4096)):
        sock = _connect(address)
        with contextlib.suppress(ConnectionError):
            sock.sendall(frame + bytes(HEADER_BYTES))
        _is_dropped(sock)
    return 2


def closed_at_once(address: Address) -> int:
    for _ in range(20):
        _connect(address).close()
    return 0  # counted when they are noticed


_held: list[socket.socket] = []


def silence(address: Address) -> int:
    _held.extend(_connect(address) for _ in range(5))
    return 0


def half_a_hello(address: Address) -> int:
    sock = _connect(address)
    side = Connecting(b"whatever", secrets.token_bytes(32), Claim(0, 1, 0))
    sock.sendall(side.receive(_read(sock, GREETING_BYTES))[:40])
    _held.append(sock)
    return 0


def hundreds(address: Address) -> int:
    """More than are held at once: the oldest go."""
    _held.extend(_connect(address) for _ in range(300))
    return 300 - 64


KINDS: tuple[Callable[[Address], int], ...] = (
    random_bytes,
    old_version,
    wrong_secret,
    frames_without_admission,
    closed_at_once,
    silence,
    half_a_hello,
    hundreds,
)


# --- what the ranks do -----------------------------------------------------------------------------------------------------


def beset(links: str) -> int:
    """In a rank: compute while the stranger is at work; returns how many strangers were dropped."""
    group = dist.new_group([0, 1])
    if dist.get_rank() == STRANGER:
        ports = [harness.await_note("port of rank 0"), harness.await_note("port of rank 1")]
        dropped = 0
        for kind in KINDS:
            for address in ports:
                dropped += kind(tuple(address))
        harness.note("enough")
        return dropped // 2
    settings = {"links": links, "schedule": "trees", "timeout_s": 60, "heartbeat_s": 30}
    state = commhooks.CommHookState(group, **settings)
    assert state.engine is not None
    rank = dist.get_rank()
    harness.note(f"port of rank {rank}", state.engine.placements[rank].tcp[0])
    left = True
    while left:
        ready = torch.tensor([float(harness.noted("enough")), rank + 1.0, *range(1000)])
        commhooks.all_reduce(ready, group, **settings)
        assert ready[1] == 3.0 and ready[-1] == 2 * 999.0
        left = ready[0] < 2
    state.engine.raise_if_failed()
    return int(state.stats()["strangers_dropped"])


@pytest.mark.parametrize("links", ["tcp", "shm"])
def test_strangers_neither_disturb_nor_delay(links: str) -> None:
    first, second, wanted = harness.run(3, beset, links)
    assert first >= wanted and second >= wanted, (first, second, wanted)


def crowded_start() -> int:
    """In a rank: strangers wait at the port before the job's own ranks come."""
    from commhooks import hosts

    make = hosts.Home.__init__

    def make_then_crowd(home: hosts.Home, *arguments: object) -> None:
        make(home, *arguments)  # type: ignore[arg-type]
        for number in range(100):
            sock = socket.create_connection(home.listeners[0].getsockname())
            if number % 2:
                sock.sendall(os.urandom(300))
            _held.append(sock)

    hosts.Home.__init__ = make_then_crowd  # type: ignore[method-assign]
    settings = {"links": "tcp", "schedule": "trees", "timeout_s": 60}
    total = commhooks.all_reduce(torch.ones(1000), **settings)
    assert total.min() == total.max() == 3.0
    return int(commhooks.CommHookState(**settings).stats()["strangers_dropped"])


def test_crowd_at_the_door_does_not_keep_ranks_out() -> None:
    assert min(harness.run(3, crowded_start)) >= 30
