"""The end of a process: engines say goodbye at exit, and forked children let go of their parent's descriptors.

Where in the flow: engine -> **exits**.  Registered with the first engine, not on import.
"""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol


class Closable(Protocol):
    """An engine, as far as ending is concerned."""

    def close(self) -> None:
        """End in order, within seconds."""

    def abandon(self) -> None:
        """In a forked child: let go of the parent's descriptors."""


_open: weakref.WeakSet[Closable] = weakref.WeakSet()
_registered = False


def opened(engine: Closable) -> None:
    """Close `engine` when the process ends."""
    global _registered
    _open.add(engine)
    if not _registered:
        _registered = True
        atexit.register(close_all)
        os.register_at_fork(after_in_child=_abandon_all)


def closed(engine: Closable) -> None:
    """`engine` has ended by itself."""
    _open.discard(engine)


def close_all() -> None:
    """Close every open engine."""
    for engine in list(_open):
        engine.close()


def _abandon_all() -> None:
    for engine in list(_open):
        engine.abandon()
    _open.clear()
