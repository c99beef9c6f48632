"""Every error this package raises, as one tree.

Where in the flow: imported by every ring; imports nothing.

Invariants: a message says what failed (with ids such as ``step 12 bucket 3 slice 7 rank 0->2``), what was seen
against what was expected with units, and what to do about it.  ``except CommhooksError`` catches all of them.
"""


class CommhooksError(Exception):
    """Base of all errors of this package."""


class ConfigError(CommhooksError, ValueError):
    """A setting, argument or call is wrong; nothing was started."""


class UnsupportedModelError(CommhooksError, ValueError):
    """A model, optimizer or use that can't be served; the message names the supported way."""


class TopologyError(CommhooksError, ValueError):
    """A topology is malformed, is for other ranks, or doesn't connect the group."""


class MissingDependency(CommhooksError, ImportError):
    """A program or package that the call needs isn't installed; the message names the package."""


class CommError(CommhooksError, RuntimeError):
    """Communication failed while running; the engine that raised it stays latched with this error."""


class PeerLost(CommError):
    """A peer process ended, was killed, or stopped answering."""


class CommTimeout(CommError, TimeoutError):
    """A live peer didn't deliver what was awaited within the limit."""


class Mismatch(CommError):
    """Two ranks disagree about a setting, a plan or a tensor's layout."""


class AdmissionError(CommError):
    """A connection failed the handshake (wrong secret, other version, not our protocol)."""


class ProtocolError(CommError):
    """A frame doesn't fit: unknown kind, impossible size, or out of sequence."""


class RemoteError(CommError):
    """Another rank failed for a reason of its own; the message carries its words."""


class InternalError(CommError):
    """A bug in this package: an invariant is broken."""
