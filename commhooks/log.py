"""Where log lines go when *we* are the program: the command line and zero-code runs.

Where in the flow: called by entry points only.  As a library, the package logs through ``logging`` and configures nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

FORMAT = "commhooks: %(levelname)s: %(message)s"


def show_log(level: str, environ: Mapping[str, str]) -> None:
    """Send this package's log lines to standard error, once; a handler that someone installed before is kept.

    Parameters
    ----------
    level : ``debug``, ``info``, ``warning`` or ``error``.
    environ : the environment; a launcher's rank in it is shown in each line.
    """
    logger = logging.getLogger("commhooks")
    logger.setLevel(level.upper())
    if logger.handlers or logging.getLogger().handlers:
        return
    rank = environ.get("RANK", environ.get("HOROVOD_RANK"))
    handler = logging.StreamHandler()
    handler.setFormatter(
        logging.Formatter(FORMAT if rank is None else FORMAT.replace(": ", f"[{rank}]: ", 1))
    )
    logger.addHandler(handler)
    logger.propagate = (
        False  # the script may configure the root logger later; our lines must not appear twice
    )
