"""TCP: a stream link with a small unsent backlog.

Where in the flow: engine -> **links** -> kernel.

Invariants: what the kernel has taken can't be overtaken any more, so it takes little: with `TCP_NOTSENT_LOWAT` a more urgent
slice waits for about one slice, not for megabytes of socket buffer (P3's ZeroMQ high-water mark of 1 has the same purpose).
"""

from __future__ import annotations

import contextlib
import socket
import struct

from commhooks.errors import ConfigError
from commhooks.links.base import LinkEvents
from commhooks.links.frames import HEADER_BYTES
from commhooks.links.stream import StreamLink

NOTSENT_LOWAT_BYTES = 128 * 1024
_LARGEST_LOWAT_BYTES = 1 << 20
# An interpreter that shares few cores comes back to a socket after milliseconds; a shorter backlog lets the link run dry.
_BACKLOG_S = 5e-3


def backlog_bytes(bytes_per_s: float) -> int:
    """How much unsent data the kernel may hold at a rate (0: unknown): about what it sends until we come round again."""
    return int(min(max(bytes_per_s * _BACKLOG_S, NOTSENT_LOWAT_BYTES), _LARGEST_LOWAT_BYTES))


# Linux value; the name came to the socket module in Python 3.12.
_TCP_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)
_TCP_CONGESTION = getattr(socket, "TCP_CONGESTION", 13)
_SO_MAX_PACING_RATE = 47  # Linux; the socket module has no name for it


# The kernel tells of every few packets unless told to wait; above this much it is better read early.
_LARGEST_AWAITED_BYTES = 64 * 1024


class TcpLink(StreamLink):
    """Frames over one TCP connection."""

    kind = "tcp"

    _awaited = 1

    def on_readable(self) -> None:
        """Then sleep until a payload's rest is there, or a good part of it: a wake-up costs more than reading a packet does."""
        super().on_readable()
        left = len(self._into) - self._into_got if self._into is not None else 0
        awaited = 1 if left <= HEADER_BYTES else min(left, _LARGEST_AWAITED_BYTES)
        if awaited != self._awaited and not self._failed:
            self._awaited = awaited
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, awaited)


# Measured on shaped links, both directions loaded: BBR, many hosts' default, loses 2-12 % to cubic on these
# application-limited flows, most where flows share a card.
PREFERRED_CONGESTION = "cubic"


def tune(
    sock: socket.socket, congestion: str = "auto", notsent_lowat_bytes: int = NOTSENT_LOWAT_BYTES
) -> None:
    """Set a connected or listening socket up for slices.

    Parameters
    ----------
    congestion : a congestion control of the kernel's, or ``auto``: cubic where there is one

    Raises
    ------
    ConfigError
        The kernel doesn't offer the congestion control.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):  # not Linux: slices are less preemptible, nothing else changes
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, notsent_lowat_bytes)
    wanted = PREFERRED_CONGESTION if congestion == "auto" else congestion
    try:
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_CONGESTION, wanted.encode())
    except OSError as error:
        if congestion != "auto":
            raise ConfigError(
                f"COMMHOOKS_TCP_CONGESTION is {congestion!r}, which this kernel refuses ({error}); "
                "see /proc/sys/net/ipv4/tcp_available_congestion_control for what it offers"
            ) from error


def pace(sock: socket.socket, bytes_per_s: float) -> None:
    """Keep the kernel from sending faster than this on a connection (for a lab without a network of its own)."""
    sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("Q", round(bytes_per_s)))


def make(sock: socket.socket, peer: int, channel: int, events: LinkEvents) -> TcpLink:
    """A link over a socket that has passed admission."""
    return TcpLink(sock, peer, channel, events)
