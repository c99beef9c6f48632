"""Where log lines go when *we* are the program: the command line and zero-code runs.

Where in the flow: called by entry points only.  As a library, the package logs through ``logging`` and configures nothing.
"""

from __future__ import annotations

import logging

FORMAT = "commhooks: %(levelname)s: %(message)s"


def show_log(level: str, rank: str | None = None) -> None:
    """Send this package's log lines to standard error, once; a handler that someone installed before is kept.

    Parameters
    ----------
    level : ``debug``, ``info``, ``warning`` or ``error``.
    rank : shown in each line when given.
    """
    logger = logging.getLogger("commhooks")
    logger.setLevel(level.upper())
    if logger.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(
        logging.Formatter(FORMAT if rank is None else FORMAT.replace(": ", f"[{rank}]: ", 1))
    )
    logger.addHandler(handler)
    logger.propagate = (
        False  # the script may configure the root logger later; our lines must not appear twice
    )
