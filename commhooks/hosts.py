"""Where ranks live: which share a host, at which addresses they listen, and which kind of link joins two of them.

Where in the flow: bootstrap -> **hosts** -> mesh.

Invariants: "same host" means same kernel, same network namespace and same process namespace, so emulated hosts on
one machine are different hosts; memory is read across processes only after it has been tried and the bytes were
right; the choice is the same on both ends, because both compute it from the same placements.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import secrets
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from commhooks.errors import ConfigError
from commhooks.links.base import Link, LinkEvents
from commhooks.links.frames import MAX_PAYLOAD_BYTES
from commhooks.links.shm import HALF_BYTES, MemoryLink, SharedFileLink, read_memory
from commhooks.links.stream import StreamLink
from commhooks.links.tcp import TcpLink, pace

log = logging.getLogger(__name__)

_SIOCGIFADDR = 0x8915
_PROBE_BYTES = 32


class Address(NamedTuple):
    """One way to a peer: socket family, address, and whether to bind the own end to the channel's interface."""

    family: int
    where: Any
    source: bool


@dataclass(frozen=True)
class Placement:
    """What one rank tells the others about itself (travels as JSON)."""

    rank: int
    host: str
    hostname: str
    tcp: tuple[tuple[str, int], ...]  # one (address, port) per channel
    unix: str
    pid: int
    probe_address: int
    probe_hex: str
    links: str
    readable: tuple[int, ...] = ()  # ranks whose memory this rank has read successfully

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Placement:
        tcp = tuple((str(address), int(port)) for address, port in fields["tcp"])
        return Placement(**{**fields, "tcp": tcp, "readable": tuple(fields["readable"])})

    def describe(self, channel: int) -> str:
        address = "{}:{}".format(*self.tcp[channel]) if channel < len(self.tcp) else f"no channel {channel}"
        return f"{self.hostname} {address}"

    def same_host(self, other: Placement) -> bool:
        return self.host == other.host

    def local_kind(self, other: Placement) -> str | None:
        """``"readv"``, ``"file"``, or None when the two talk TCP."""
        if not self.same_host(other) or self.links == "tcp":
            return None
        both = other.rank in self.readable and self.rank in other.readable
        return "readv" if both else "file"


class Home:
    """This rank's listeners and its placement; makes links according to two placements.

    Parameters
    ----------
    rank : this rank
    links : ``auto``, ``tcp`` or ``shm``
    interfaces : one name per channel; empty: one channel on the route to `rendezvous_host`
    rendezvous_host : an address that the launcher gave, to find the route

    Raises
    ------
    ConfigError
        An interface doesn't exist or has no IPv4 address.
    """

    def __init__(
        self, rank: int, links: str, interfaces: tuple[str, ...], rendezvous_host: str | None
    ) -> None:
        self._probe = ctypes.create_string_buffer(secrets.token_bytes(_PROBE_BYTES), _PROBE_BYTES)
        addresses = [interface_address(name) for name in interfaces] or [route_address(rendezvous_host)]
        self.listeners = [_listen(socket.AF_INET, (address, 0)) for address in addresses]
        unix = "commhooks-" + secrets.token_hex(12)
        self.listeners.append(_listen(socket.AF_UNIX, "\0" + unix))
        ports = [listener.getsockname()[1] for listener in self.listeners[: len(addresses)]]
        self.placement = Placement(
            rank=rank,
            host=host_identity(),
            hostname=socket.gethostname(),
            tcp=tuple(zip(addresses, ports, strict=True)),
            unix=unix,
            pid=os.getpid(),
            probe_address=ctypes.addressof(self._probe),
            probe_hex=self._probe.raw.hex(),
            links=links,
        )

    def try_memory(self, placements: list[Placement]) -> Placement:
        """Read every same-host rank's probe; the placement says afterwards whose memory can be read."""
        readable = tuple(p.rank for p in placements if p.same_host(self.placement) and _can_read(p))
        self.placement = replace(self.placement, readable=readable)
        return self.placement

    def close(self) -> None:
        """Stop listening."""
        for listener in self.listeners:
            listener.close()


def largest_slice_bytes(placements: Sequence[Placement]) -> int:
    """What every link among these ranks carries in one frame; equal on all ranks."""
    by_file = any(one.local_kind(other) == "file" for one, other in combinations(placements, 2))
    return HALF_BYTES // 4 if by_file else MAX_PAYLOAD_BYTES // 4


class LinkMaker:
    """Chooses and builds the link to each peer from everybody's placements."""

    def __init__(
        self,
        rank: int,
        placements: list[Placement],
        window: int = 0,
        pacing_bytes_per_s: Mapping[int, float] | None = None,
    ) -> None:
        self._rank = rank
        self._placements = placements
        self._window = window
        self._pacing_bytes_per_s = pacing_bytes_per_s or {}
        own = placements[rank]
        if own.links == "shm":
            away = [p.rank for p in placements if not p.same_host(own)]
            if away:
                raise ConfigError(
                    f"COMMHOOKS_LINKS is 'shm', but ranks {away} are on other hosts than rank {rank}; use 'auto' or 'tcp'"
                )

    def kinds(self) -> dict[str, int]:
        """How many peers are reached how (for the log)."""
        own = self._placements[self._rank]
        counts: dict[str, int] = {}
        for other in self._placements:
            if other.rank != self._rank:
                kind = own.local_kind(other) or "tcp"
                counts[kind] = counts.get(kind, 0) + 1
        return counts

    def way_to(self, peer: int, channel: int) -> Address:
        own, other = self._placements[self._rank], self._placements[peer]
        if own.local_kind(other) is not None:
            return Address(socket.AF_UNIX, "\0" + other.unix, False)
        if channel >= len(other.tcp) or channel >= len(own.tcp):
            raise ConfigError(
                f"the plan uses channel {channel} between ranks {self._rank} and {peer}, which have {len(own.tcp)} and "
                f"{len(other.tcp)} interfaces; name one per channel: COMMHOOKS_INTERFACE=eth0,eth1"
            )
        return Address(socket.AF_INET, other.tcp[channel], len(own.tcp) > 1)

    def source(self, channel: int) -> str:
        return self._placements[self._rank].tcp[channel][0]

    def describe(self, rank: int, channel: int) -> str:
        return self._placements[rank].describe(channel)

    def make(self, sock: socket.socket, peer: int, channel: int, events: LinkEvents) -> Link:
        """The link over a socket that has passed admission."""
        link = self._made(sock, peer, channel, events)
        link.window = self._window
        return link

    def _made(self, sock: socket.socket, peer: int, channel: int, events: LinkEvents) -> StreamLink:
        own, other = self._placements[self._rank], self._placements[peer]
        kind = own.local_kind(other)
        if kind is None:
            if peer in self._pacing_bytes_per_s:
                pace(sock, self._pacing_bytes_per_s[peer])
            return TcpLink(sock, peer, channel, events)
        if kind == "readv":
            return MemoryLink(sock, peer, channel, events, other.pid)
        return SharedFileLink(sock, peer, channel, events, makes=self._rank < peer)


def host_identity() -> str:
    """Kernel, network namespace and process namespace, as one word."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = "/".join(str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("net", "pid"))
        return f"{boot}/{spaces}"
    except OSError:
        return socket.gethostname()


def interface_address(name: str) -> str:
    """The IPv4 address of a network interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError as error:
            there = ", ".join(other for _, other in socket.if_nameindex())
            raise ConfigError(
                f"interface {name!r} doesn't exist or has no IPv4 address ({error.strerror}); this host has: {there}"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def route_address(rendezvous_host: str | None) -> str:
    """The own address on the route to the rendezvous; loopback when there is none."""
    if rendezvous_host:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            try:
                sock.connect((rendezvous_host, 9))  # sends nothing; picks the route
                return str(sock.getsockname()[0])
            except OSError as error:
                log.debug("no route to %s (%s)", rendezvous_host, error)
    return "127.0.0.1"


def _listen(family: int, where: Any) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    sock.bind(where)
    sock.listen(128)
    return sock


def _can_read(other: Placement) -> bool:
    target = bytearray(_PROBE_BYTES)
    try:
        read_memory(other.pid, other.probe_address, memoryview(target))
    except OSError as error:
        log.debug("memory of rank %d (process %d) can't be read: %s", other.rank, other.pid, error)
        return False
    return target.hex() == other.probe_hex
