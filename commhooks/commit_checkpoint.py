"""One shard's parameters in a file: written once per check period, read at a restart.

Where in the flow: parameter_server -> **commit_checkpoint** -> disk -> adsp, at the next start.

Invariants: a file is complete or absent (written beside, then renamed); one that belongs to another model or other ranks is
refused; nothing is unpickled.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from commhooks.core.commit.update import Array
from commhooks.errors import ConfigError


class ShardFile:
    """Where one rank's shard is saved.

    Parameters
    ----------
    path : the user's path; the rank is appended, ``{rank}`` in it is replaced
    rank : this rank
    digest : of the layout (sizes and holders of all slices)
    """

    def __init__(self, path: str, rank: int, digest: str) -> None:
        self.path = Path(path.replace("{rank}", str(rank)) if "{rank}" in path else f"{path}.rank{rank}")
        self._digest = digest
        self._lock = threading.Lock()

    def save(self, values: Mapping[int, Array]) -> None:
        """Write; any thread."""
        with self._lock:
            beside = self.path.with_name(self.path.name + ".new")
            arrays: dict[str, Any] = {f"slice_{i}": v for i, v in values.items()}
            with beside.open("wb") as file:
                np.savez(file, digest=np.frombuffer(self._digest.encode(), np.uint8), **arrays)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(self.path)

    def load(self) -> dict[int, Array] | None:
        """The saved values; None if there is no file.

        Raises
        ------
        ConfigError
            The file is damaged, or of another model or placement.
        """
        if not self.path.exists():
            return None
        try:
            with np.load(self.path, allow_pickle=False) as saved:
                digest = saved["digest"].tobytes().decode()
                values = {int(n.removeprefix("slice_")): saved[n] for n in saved.files if n != "digest"}
        except (ValueError, KeyError, OSError, EOFError) as error:
            raise ConfigError(
                f"server checkpoint {self.path} can't be read ({error}); remove it to start afresh"
            ) from error
        if digest != self._digest:
            raise ConfigError(
                f"server checkpoint {self.path} is of another model, slice size or number of ranks (digest {digest}, "
                f"expected {self._digest}); remove it to start afresh, or point COMMHOOKS_COMMIT_CHECKPOINT elsewhere"
            )
        return values
