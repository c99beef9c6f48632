"""What `register` gives back.

Where in the flow: user -> **handle** -> hook state and engine.
"""

from __future__ import annotations

from typing import Any, Protocol


class Backend(Protocol):
    """What stands behind a handle; one per mode (backward, forward, ADSP, off)."""

    def flush(self) -> None:
        """Block until everything under way is applied."""

    def stats(self) -> dict[str, Any]: ...

    def report_loss(self, loss: float) -> None: ...

    def finish(self) -> None: ...


class Handle:
    """Control of one registered model.  All methods are for the training thread.

    Use as a context manager to `finish` at the end of a block.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._finished = False

    def flush(self) -> None:
        """Block until every gradient and every optimizer step under way is applied."""
        self._backend.flush()

    def stats(self) -> dict[str, Any]:
        """Counters, the plan and its reason, what was decided and why."""
        return self._backend.stats()

    def report_loss(self, loss: float) -> None:
        """Give ADSP's search the training loss of this step; without a commit policy it has no effect."""
        self._backend.report_loss(float(loss))

    def finish(self) -> None:
        """End of training: flush, and (ADSP) make all ranks' parameters equal.  Calling it again does nothing."""
        if not self._finished:
            self._finished = True
            self._backend.finish()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an exception there may be nothing left to wait for, and its message must be the one that is seen.
        if kind is None:
            self.finish()


class Off:
    """`COMMHOOKS=0`: nothing was registered."""

    def flush(self) -> None: ...

    def stats(self) -> dict[str, Any]:
        return {"enabled": False, "reason": "COMMHOOKS=0"}

    def report_loss(self, loss: float) -> None: ...

    def finish(self) -> None: ...
