"""The fixed header of every frame, and the bounds a frame must fit.

Where in the flow: between the engine (which fills the ids in) and the links (which only carry them).

Invariants: one layout, little-endian, `HEADER_BYTES` long; a header that doesn't start with `MAGIC` and `VERSION`, has an
unknown kind, or announces more than `MAX_PAYLOAD_BYTES` is refused with its numbers before a byte of payload is read.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from commhooks.errors import ProtocolError

MAGIC = 0xC033
VERSION = 1
MAX_PAYLOAD_BYTES = 1 << 30

_STRUCT = struct.Struct("<HBBHHIIIIIIQ")
HEADER_BYTES = _STRUCT.size


class Kind(enum.IntEnum):
    """What a frame carries."""

    REDUCE = 1  # a partial sum, child -> parent
    BROADCAST = 2  # a finished value, parent -> child
    MESSAGE = 3  # point to point: `extra` bytes of header, then the payload
    ACK = 4  # same host: the memory named by `extra` has been read
    HEARTBEAT = 5  # "this process is alive"
    ABORT = 6  # "I failed": JSON with the reason
    QUERY = 7  # "what keeps this slice?"
    GOODBYE = 8  # orderly end; what comes after is no failure


class Header(NamedTuple):
    """Ids of one frame.  ``stream, step, bucket, slice, tree`` name a slice; links don't look at them."""

    kind: int
    tree: int
    stream: int
    step: int
    bucket: int
    slice: int
    layout: int
    length: int  # bytes of payload
    checksum: int
    extra: int


def pack(header: Header) -> bytes:
    """The header's bytes."""
    return _STRUCT.pack(MAGIC, VERSION, *header)


def control(kind: Kind, length: int = 0, extra: int = 0) -> Header:
    """A header that names no slice."""
    return Header(kind, 0, 0, 0, 0, 0, 0, length, 0, extra)


_KINDS = frozenset(int(kind) for kind in Kind)


def unpack(raw: bytes | bytearray | memoryview) -> Header:
    """Read a header.

    Raises
    ------
    ProtocolError
        Not our magic, another version, an unknown kind, or a payload beyond the bound.
    """
    magic, version, *fields = _STRUCT.unpack(raw)
    if magic != MAGIC or version != VERSION:
        raise ProtocolError(
            f"frame starts with magic {magic:#06x} version {version}; expected {MAGIC:#06x} version {VERSION}"
        )
    header = Header(*fields)
    if header.kind not in _KINDS:
        raise ProtocolError(f"frame of unknown kind {header.kind}")
    if header.length > MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"frame announces {header.length} bytes; the bound is {MAX_PAYLOAD_BYTES} bytes")
    return header
