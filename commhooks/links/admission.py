"""Who may become a link: a challenge both ways over a shared secret, before any frame is read.

Where in the flow: a fresh connection -> **admission** -> a link.

The accepting side greets with a nonce. The connecting side answers with its own nonce, its claim (rank, channel)
and an HMAC of all of it; the accepting side checks and answers with an HMAC of its own. Nothing else is exchanged,
nothing is unpickled, and neither side learns anything from a stranger's attempt but that it failed.

Invariants: sans-IO (bytes in, bytes out, no clock); fixed message sizes, so at most `LONGEST_MESSAGE_BYTES` are
ever buffered; an admission ends exactly once, admitted or refused.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass

from commhooks.errors import AdmissionError
from commhooks.links.frames import VERSION

_MAGIC = b"COMMHOOK"
_NONCE_BYTES = 32
_GREETING = struct.Struct(f"<8sH{_NONCE_BYTES}s")
_HELLO = struct.Struct(f"<8sHIII{_NONCE_BYTES}s32s")
_WELCOME = struct.Struct("<32s")
LONGEST_MESSAGE_BYTES = max(_GREETING.size, _HELLO.size, _WELCOME.size)


@dataclass(frozen=True)
class Claim:
    """Who the connecting side says it is, and which link it wants to whom."""

    rank: int
    target: int
    channel: int


def _proof(secret: bytes, role: bytes, greeting_nonce: bytes, hello_nonce: bytes, claim: Claim) -> bytes:
    text = b"|".join(
        (role, greeting_nonce, hello_nonce, f"{claim.rank}/{claim.target}/{claim.channel}".encode())
    )
    return hmac.new(secret, text, hashlib.sha256).digest()


class _Admission(ABC):
    """Collects one fixed-size message at a time."""

    def __init__(self, secret: bytes, nonce: bytes, expected: struct.Struct) -> None:
        if len(nonce) != _NONCE_BYTES:
            raise ValueError(f"nonce of {len(nonce)} bytes; it must be {_NONCE_BYTES}")
        self._secret = secret
        self._nonce = nonce
        self._expected: struct.Struct | None = expected
        self._buffer = b""
        self.admitted = False
        self.claim: Claim | None = None

    @property
    def wanted_bytes(self) -> int:
        """How many bytes to read at most now: never into the frames that follow."""
        return self._expected.size - len(self._buffer) if self._expected is not None else 0

    def receive(self, chunk: bytes) -> bytes:
        """Take bytes in; returns bytes to send.

        Raises
        ------
        AdmissionError
            The other side isn't one of this job's ranks.
        """
        expected = self._expected
        if expected is None or len(chunk) > self.wanted_bytes:
            raise AdmissionError(f"{len(chunk)} bytes where {self.wanted_bytes} were expected")
        self._buffer += chunk
        if len(self._buffer) < expected.size:
            return b""
        fields = expected.unpack(self._buffer)
        self._buffer = b""
        return self._message(fields)

    @abstractmethod
    def _message(self, fields: tuple[bytes, ...]) -> bytes:
        """Take a whole message in; returns the answer."""


def _check_preamble(magic: bytes, version: int) -> None:
    if magic != _MAGIC:
        raise AdmissionError(f"starts with {magic!r}, not with {_MAGIC!r}: not this protocol")
    if version != VERSION:
        raise AdmissionError(f"speaks version {version}; this is version {VERSION}")


class Accepting(_Admission):
    """The side that accepted the connection; send `greeting` first."""

    def __init__(self, secret: bytes, nonce: bytes, rank: int) -> None:
        super().__init__(secret, nonce, _HELLO)
        self._rank = rank
        self.greeting = _GREETING.pack(_MAGIC, VERSION, nonce)

    def _message(self, fields: tuple) -> bytes:  # type: ignore[type-arg]
        magic, version, rank, target, channel, hello_nonce, proof = fields
        _check_preamble(magic, version)
        claim = Claim(rank, target, channel)
        wanted = _proof(self._secret, b"connecting", self._nonce, hello_nonce, claim)
        if not hmac.compare_digest(proof, wanted):
            raise AdmissionError(f"claims to be rank {rank} without knowing this job's secret")
        if target != self._rank:
            raise AdmissionError(f"rank {rank} looks for rank {target}; this is rank {self._rank}")
        self._expected = None
        self.admitted = True
        self.claim = claim
        return _WELCOME.pack(_proof(self._secret, b"accepting", self._nonce, hello_nonce, claim))


class Connecting(_Admission):
    """The side that opened the connection."""

    def __init__(self, secret: bytes, nonce: bytes, claim: Claim) -> None:
        super().__init__(secret, nonce, _GREETING)
        self.claim = claim
        self._greeting_nonce = b""

    def _message(self, fields: tuple) -> bytes:  # type: ignore[type-arg]
        assert self.claim is not None
        if self._expected is _GREETING:
            magic, version, self._greeting_nonce = fields
            _check_preamble(magic, version)
            self._expected = _WELCOME
            proof = _proof(self._secret, b"connecting", self._greeting_nonce, self._nonce, self.claim)
            claim = self.claim
            return _HELLO.pack(_MAGIC, VERSION, claim.rank, claim.target, claim.channel, self._nonce, proof)
        (proof,) = fields
        wanted = _proof(self._secret, b"accepting", self._greeting_nonce, self._nonce, self.claim)
        if not hmac.compare_digest(proof, wanted):
            raise AdmissionError("the accepting side doesn't know this job's secret")
        self._expected = None
        self.admitted = True
        return b""
