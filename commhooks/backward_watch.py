"""Tells when ``backward()`` begins and ends on the user's thread.

Where in the flow: the user's ``loss.backward()`` -> **backward_watch** -> deferred.

DDP's hooks run inside the backward pass, where modes that we put on the stack are taken off again, and where it is too late to
finish what the last step left.  So ``torch.autograd.backward``, which every ``Tensor.backward`` goes through, is wrapped
while there is a watcher, and only then.

Invariants: without watchers PyTorch's own function stands in its place; a watcher that was collected is forgotten.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Protocol

import torch


class BackwardWatcher(Protocol):
    """Who wants to know."""

    def before_backward(self) -> None:
        """A backward pass is about to run on this thread."""

    def after_backward(self) -> None:
        """It has ended without an error."""


_watchers: weakref.WeakSet[Any] = weakref.WeakSet()
_original: Any = None
_wrapper: Any = None


def watch(watcher: BackwardWatcher) -> None:
    """Call `watcher` from now on."""
    global _original, _wrapper
    _watchers.add(watcher)
    if _wrapper is not None and torch.autograd.backward is _wrapper:
        return
    original = _original = torch.autograd.backward

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        for one in list(_watchers):
            one.before_backward()
        result = original(*args, **kwargs)
        for one in list(_watchers):
            one.after_backward()
        return result

    _wrapper = backward
    torch.autograd.backward = backward


def unwatch(watcher: BackwardWatcher) -> None:
    """Call `watcher` no more."""
    global _wrapper
    _watchers.discard(watcher)
    # Someone may have wrapped ours in turn; then it stays, and calls nobody.
    if not _watchers and torch.autograd.backward is _wrapper:
        torch.autograd.backward = _original
        _wrapper = None
