"""Rank 0 tells the others what to do next, and hears how it went: a star of connections for the time of a probe.

Where in the flow: probing -> **control** -> sockets.

Messages are JSON behind a length.  Whatever goes wrong on any rank travels through rank 0, so that every rank raises the
same error; a rank that leaves without a word (killed, interrupted) is named by it.

Invariants: no message is read before both ends have proved the job's secret; a message is at most `LONGEST_BYTES`; no wait
is without a limit.
"""

from __future__ import annotations

import json
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

from commhooks import errors
from commhooks.errors import AdmissionError, CommError, CommhooksError, CommTimeout, PeerLost, TopologyError
from commhooks.links.admission import Accepting, Claim, Connecting

LONGEST_BYTES = 16 << 20
_CONTROL = 0xFFFFFFFF  # the claim's channel
_HANDSHAKE_S = 2.0  # a stranger holds the others up for so long
_RETRY_S = 0.05
_SIZE = struct.Struct("<I")
_RTT_OFFSET = 68  # of tcpi_rtt, in microseconds, in Linux' struct tcp_info


def as_json(error: CommhooksError) -> dict[str, str]:
    """An error for the other ranks."""
    return {"kind": type(error).__name__, "words": str(error)}


def from_json(failed: dict[str, str]) -> CommhooksError:
    """The same error again; a kind that isn't ours is a plain ``CommError``."""
    kind = getattr(errors, failed["kind"], CommError)
    known = isinstance(kind, type) and issubclass(kind, CommhooksError)
    return (kind if known else CommError)(failed["words"])


class Wire:
    """One end of a connection between rank 0 and another rank.

    Parameters
    ----------
    sock : admitted
    rank : the one at the other end
    """

    def __init__(self, sock: socket.socket, rank: int) -> None:
        self._sock = sock
        self.rank = rank

    def send(self, message: Any) -> None:
        """Raises PeerLost when the other end has gone."""
        body = json.dumps(message).encode()
        try:
            self._sock.sendall(_SIZE.pack(len(body)) + body)
        except OSError as error:
            raise self._gone() from error

    def receive(self, limit_s: float) -> Any:
        """The next message.

        Raises
        ------
        PeerLost, CommTimeout
            The other end has gone, or is silent for `limit_s`.
        """
        self._sock.settimeout(limit_s)
        try:
            (size,) = _SIZE.unpack(self._exactly(_SIZE.size))
            if size > LONGEST_BYTES:
                raise errors.ProtocolError(
                    f"probe: a message of {size} bytes from rank {self.rank}; at most {LONGEST_BYTES}"
                )
            return json.loads(self._exactly(size))
        except TimeoutError as error:
            raise CommTimeout(f"probe: nothing from rank {self.rank} for {limit_s:g} s") from error
        except OSError as error:
            raise self._gone() from error

    def _exactly(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = self._sock.recv(size - len(parts))
            if not part:
                raise self._gone()
            parts += part
        return bytes(parts)

    def _gone(self) -> PeerLost:
        return PeerLost(
            f"probe: rank {self.rank} left before the end (killed, interrupted, or its host is unreachable)"
        )

    def round_trip_s(self) -> float:
        """The kernel's smoothed round trip time."""
        fields = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        return float(struct.unpack_from("I", fields, _RTT_OFFSET)[0]) * 1e-6

    def close(self) -> None:
        self._sock.close()


def connect(rank: int, address: tuple[str, int], own: str, secret: bytes, limit_s: float) -> Wire:
    """A wire to rank 0; tries again until the limit.

    Raises
    ------
    TopologyError
        Rank 0 can't be reached.
    """
    deadline_s = time.monotonic() + limit_s
    claim = Claim(rank, 0, _CONTROL)
    while True:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.settimeout(max(0.1, min(limit_s, deadline_s - time.monotonic())))
        try:
            sock.connect(address)
            _admit(sock, Connecting(secret, secrets.token_bytes(32), claim), b"")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return Wire(sock, 0)
        except (OSError, AdmissionError) as error:
            sock.close()
            if time.monotonic() + _RETRY_S > deadline_s or isinstance(error, AdmissionError):
                raise TopologyError(
                    f"probe: rank {rank} ({own}) can't reach rank 0 at {address[0]}:{address[1]}: {error}. If an address is of "
                    "a wrong network, set COMMHOOKS_INTERFACE (or GLOO_SOCKET_IFNAME) to the interface that reaches the others"
                ) from error
            time.sleep(_RETRY_S)


def accept_all(listener: socket.socket, world_size: int, secret: bytes, limit_s: float) -> dict[int, Wire]:
    """Rank 0: a wire to every other rank.

    Raises
    ------
    CommTimeout
        Some rank didn't come.
    """
    wires: dict[int, Wire] = {}
    deadline_s = time.monotonic() + limit_s
    listener.setblocking(True)
    try:
        while len(wires) < world_size - 1:
            listener.settimeout(max(0.01, deadline_s - time.monotonic()))
            _accept(listener, secret, wires)
    except TimeoutError:
        for wire in wires.values():
            wire.close()
        missing = sorted(set(range(1, world_size)) - set(wires))
        raise CommTimeout(f"probe: ranks {missing} didn't come to rank 0 within {limit_s:g} s") from None
    finally:
        listener.setblocking(False)
    return wires


def _accept(listener: socket.socket, secret: bytes, wires: dict[int, Wire]) -> None:
    sock, _ = listener.accept()
    sock.settimeout(_HANDSHAKE_S)
    side = Accepting(secret, secrets.token_bytes(32), 0)
    try:
        _admit(sock, side, side.greeting)
        claim = side.claim
        if claim is None or claim.channel != _CONTROL:
            raise AdmissionError("not a control connection")
    except (OSError, AdmissionError):  # a stranger
        sock.close()
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    wires[claim.rank] = Wire(sock, claim.rank)


def _admit(sock: socket.socket, side: Accepting | Connecting, first: bytes) -> None:
    if first:
        sock.sendall(first)
    while wanted := side.wanted_bytes:
        chunk = sock.recv(wanted)
        if not chunk:
            raise ConnectionError("closed before admission")
        answer = side.receive(chunk)
        if answer:
            sock.sendall(answer)


def gather(wires: dict[int, Wire], own: Any, limit_s: float) -> list[Any]:
    """Rank 0: every rank's answer in rank order; raises the weightiest failure, after all have been heard.

    Raises
    ------
    CommhooksError
        What some rank reported, or that it has gone or is silent.
    """
    answers: list[Any] = [own]
    for rank in sorted(wires):
        try:
            answers.append(wires[rank].receive(limit_s))
        except CommError as error:
            answers.append({"failed": as_json(error)})
    failures = [answer["failed"] for answer in answers if "failed" in answer]
    if failures:
        raise from_json(min(failures, key=lambda failed: _WEIGHT.get(failed["kind"], len(_WEIGHT))))
    return answers


# A rank that has gone explains why others wait; one that has no route does so, too.
_WEIGHT = {"PeerLost": 0, "TopologyError": 1, "ConfigError": 2, "CommTimeout": 3}


def tell(wires: Sequence[Wire], message: Any) -> list[CommError]:
    """Rank 0: send a message to every other rank; what went wrong with those that have gone."""
    lost: list[CommError] = []
    for wire in wires:
        try:
            wire.send(message)
        except CommError as error:
            lost.append(error)
    return lost
